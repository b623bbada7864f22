"""Sliding windows: each token sees the last ``window`` tokens, itself included."""

from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from kvyard.blocks.rule import NO_MATCH, Rule, RuleMatch
from kvyard.blocks.spans import Spans, clip
from kvyard.blocks.spec import Attention, ConfigError, GroupSpec
from kvyard.integers import ceil_div


@mypyc_attr(allow_interpreted_subclasses=True)
class WindowRule(Rule):
    """Sliding window: a hit needs the trailing window only, and blocks before it go stale."""

    forgets: ClassVar[bool] = True

    def __init__(self, block_size: int, window: int) -> None:
        super().__init__(block_size)
        self.window = window

    def stale(self, computed: int) -> int:
        return max(0, computed - self.window + 1)

    def fresh_until(self, position: int) -> int:
        return (position + 1) * self.block_size + self.window - 2

    def needed(self, drop: bool) -> int:
        """Return the number of consecutive blocks that a hit rests on, including the one to be discarded."""
        return -((1 - self.window) // self.block_size) + drop

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> RuleMatch:
        size = self.block_size
        blocks = limit // size
        period = max(1, alignment // size)
        need = max(1, self.needed(drop))
        for low, high in reversed(spans):
            high = min(high, blocks)
            # Where the interval may end so that what remains after the drop is aligned.
            end = high - (high - drop) % period if high > low else low
            if end <= low:
                continue
            if end - low >= need:
                return RuleMatch((end - drop) * size, end - need)
            if low == 0:
                # A prefix shorter than the window is complete by itself.
                end -= end % period
                if drop and end:
                    end -= 1
                    end -= end % period
                return RuleMatch(end * size, 0)
        return NO_MATCH

    def cap(self, in_flight: int, max_tokens: int) -> int | None:
        # One more, since a window need not start at a block's edge.
        return ceil_div(min(self.window - 1 + in_flight, max_tokens), self.block_size) + 1

    def keeps_all(self, alignment: int, eagle: bool, retention: int | None) -> bool:
        segment = alignment if retention is None else retention
        # Windows that end so close together overlap or touch.
        return alignment % self.block_size != 0 or (segment > 0 and segment // self.block_size <= self.needed(eagle))

    def worth(
        self, first: int, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        if self.keeps_all(alignment, eagle, retention):
            return None
        size = self.block_size
        need = self.needed(eagle)
        kept: list[tuple[int, int]] = []
        segment = alignment if retention is None else retention
        if segment:
            period = segment // size
            # Segment k ends at block (k + 1) * period, one later where the dropped block counts too.
            begin = max(1, (first - eagle) // period + 1) * period + eagle
            kept += [(end - need, end) for end in range(begin, last + need, period)]
        if retention is not None:
            for boundary in boundaries:
                end = boundary // alignment * alignment // size + eagle
                kept.append((end - need, end))
        return clip(kept, first, last)


def _rule(spec: GroupSpec) -> Rule:
    assert spec.window is not None
    return WindowRule(spec.block_size, spec.window)


def _check(spec: GroupSpec, where: str) -> None:
    if spec.window is None or spec.window < 1:
        raise ConfigError(f"{where}: a {spec.kind} group needs a window of at least 1 token, got {spec.window}")


SLIDING_WINDOW = Attention(wire="sliding_window", is_window=True, fields=("window",), rule=_rule, check=_check)
SLIDING_WINDOW_MLA = Attention(wire="sliding_window_mla", is_window=True, fields=("window",), rule=_rule, check=_check)
