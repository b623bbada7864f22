"""``drift``: drift plus penalty, as BLIS has it (EDPP): keep queues short, first tokens within a target, and transfers few.

A virtual queue grows by what first tokens come later than ``target_ms``, and shrinks by what they come sooner. Each way of a
request adds work to queues that have some already; the way with the smaller weighted sum is taken:

    backlog where it goes * work it adds there + virtual queue * its time to first token + weight * transfer

all in milliseconds of prefill. BLIS's own figures are for its latency model; ``weight`` is what one transfer's millisecond
counts against a millisecond of backlog and one of work.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.deciders import Decider, SplitInput


class Drift(Decider):
    OPTIONS: ClassVar[Options] = {
        "target_ms": Option(500, "Time to first token that is aimed for, in milliseconds."),
        "weight": Option(100, "Weight of the time that transfers take."),
    }

    def __init__(self, options: Mapping[str, float] | None = None) -> None:
        super().__init__(options)
        self.late_ms = 0.0
        """The virtual queue."""

    def splits(self, split: SplitInput | None) -> bool:
        assert split is not None
        over = self._cost(split, True)
        return over < self._cost(split, False)

    def _cost(self, split: SplitInput, over: bool) -> float:
        place, send = (split.prefill, split.send_ms) if over else (split.decode, 0.0)
        backlog = place.pace.prefill(place.decision.prefill_tokens)
        work = place.pace.prefill(place.uncached)
        if not over:
            # Whoever decodes there waits as long.
            backlog += work * place.decision.active_requests
        return backlog * work + self.late_ms * (place.prefill_ms + send) + self.options["weight"] * send

    def served(self, ttft_ms: float) -> None:
        self.late_ms = max(0.0, self.late_ms + ttft_ms - self.options["target_ms"])
