"""Dynamo's conditional disaggregation: a prompt stays on the decode worker where little of it is to be computed
(``isl-bounding``), where the prefill worker is busy (``prefill-load``), or either (``isl-or-load``).

Little is fewer than ``tokens`` and less than ``ratio`` of the prompt. A prefill worker is busy with more than
``prefill_busy`` passes' worth of tokens waiting. None of them keeps a prompt on a decode worker with more than
``decode_busy`` of its blocks in use; 0 turns that off, as it is by default. Figures are Dynamo's, but for ``prefill_busy``:
there it has none, and the queue's threshold is taken.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.deciders import Decider, SplitInput

_LITTLE = {
    "tokens": Option(2048, "Tokens to compute below which a prompt stays."),
    "ratio": Option(0.7, "Share of the prompt below which what is to compute must be as well."),
}
_BUSY = {"prefill_busy": Option(1.0, "Passes' worth of waiting tokens beyond which a prefill worker is busy.")}
_DECODE = {"decode_busy": Option(0, "Share of blocks in use beyond which no prompt stays; 0: not looked at.")}


class _Conditional(Decider):
    """Common part of the three: the decode worker must not be busy."""

    def splits(self, split: SplitInput | None) -> bool:
        assert split is not None
        limit, blocks = self.options["decode_busy"], split.decode.pace.capacity
        if limit and (not blocks or split.decode.decision.active_blocks > limit * blocks):
            return True
        return not self._stays(split)

    def _stays(self, split: SplitInput) -> bool:
        raise NotImplementedError

    def _little(self, split: SplitInput) -> bool:
        new = split.decode.uncached
        return new < self.options["tokens"] and new < self.options["ratio"] * max(1, split.num_tokens)

    def _busy(self, split: SplitInput) -> bool:
        return split.prefill.decision.prefill_tokens > self.options["prefill_busy"] * split.prefill.tokens_per_pass


class IslBounding(_Conditional):
    OPTIONS: ClassVar[Options] = {**_LITTLE, **_DECODE}

    def _stays(self, split: SplitInput) -> bool:
        return self._little(split)


class PrefillLoad(_Conditional):
    OPTIONS: ClassVar[Options] = {**_BUSY, **_DECODE}

    def _stays(self, split: SplitInput) -> bool:
        return self._busy(split)


class IslOrLoad(_Conditional):
    OPTIONS: ClassVar[Options] = {**_LITTLE, **_BUSY, **_DECODE}

    def _stays(self, split: SplitInput) -> bool:
        return self._little(split) or self._busy(split)
