"""``least-time``: whichever way gives the first token sooner, with what a prompt costs those who decode beside it.

    handed over = prefill there, behind what waits + the transfer + a decode step
    kept        = prefill here, behind what waits + interference * this prefill * requests that decode here

The second term of ``kept`` is that of ``least-time`` routing, with the same figure.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.deciders import Decider, SplitInput


class Soonest(Decider):
    OPTIONS: ClassVar[Options] = {
        "interference": Option(0.15, "Weight of what a prompt costs requests that decode there."),
    }

    def splits(self, split: SplitInput | None) -> bool:
        assert split is not None
        here = split.decode
        requests = here.decision.active_requests
        step = here.pace.step(requests + 1, (here.decision.active_blocks + here.decision.blocks) * _block(split))
        over = split.prefill.prefill_ms + split.send_ms + step
        kept = here.prefill_ms + self.options["interference"] * here.pace.prefill(here.uncached) * requests
        return over < kept


def _block(split: SplitInput) -> int:
    """Return tokens of a block, near enough."""
    return max(1, split.num_tokens // max(1, split.decode.decision.blocks))
