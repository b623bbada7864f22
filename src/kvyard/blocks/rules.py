"""The rules of each kind of attention, as pure functions of positions.

Everything that differs between full, windowed, chunked and state groups is here and nowhere else: what is *stale* once n
tokens are computed, what a *hit* needs, how much admission must *reserve*, and what is *worth* registering. Copies are
seen as intervals of block positions on one chain, so the same rules serve the manager's lookup, onboarding from lower
tiers, and the fleet's index. A rule holds no state and knows no pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvyard.blocks.limits import ENDLESS
from kvyard.blocks.spans import Spans, clip
from kvyard.blocks.spec import GroupSpec

if TYPE_CHECKING:
    from kvyard.blocks.extent import Extent


class Match(NamedTuple):
    """What a rule found: ``tokens`` can be skipped, and blocks ``low`` to ceil(tokens / block size) must be kept."""

    tokens: int
    low: int
    tails: list[Extent] | None = None
    """Per group looked up the last block, where the match ends inside it."""


NO_MATCH = Match(0, 0)


class Rule:
    """Full attention, and what all kinds share: nothing goes stale, a hit is an unbroken prefix, all is worth keeping."""

    forgets = False
    """Whether anything ever goes stale."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size

    def stale(self, computed: int) -> int:
        """How many leading tokens nobody will read again once ``computed`` tokens are computed."""
        return 0

    def fresh_until(self, position: int) -> int:
        """The largest number of computed tokens that leaves the block at ``position`` in use."""
        return ENDLESS

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> Match:
        """The longest usable prefix of at most ``limit`` tokens, a multiple of ``alignment`` tokens.

        With ``drop`` the last block found is given up (a draft head needs it computed again).
        """
        size = self.block_size
        if not spans or spans[0][0]:
            return NO_MATCH
        tokens = min(spans[0][1], limit // size) * size
        if drop and tokens:
            tokens -= min(alignment, size)
        return Match(tokens - tokens % alignment, 0)

    def cap(self, in_flight: int, max_tokens: int) -> int | None:
        """The most blocks a request ever holds at once, where the kind gives blocks back as it goes."""
        return None

    def keeps_all(self, alignment: int, eagle: bool, retention: int | None) -> bool:
        """Whether ``worth`` says all, whatever it is asked about."""
        return True

    def worth(
        self, first: int, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Which of the blocks ``first`` to ``last`` can ever serve a hit; ``None`` means all of them.

        ``retention`` and the token ``boundaries`` where a later request can resume matter to sparse kinds only.
        """
        return None


class WindowRule(Rule):
    """Sliding window: a hit needs the trailing window only, and blocks before it go stale."""

    forgets = True

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        assert spec.window is not None
        self.window = spec.window

    def stale(self, computed: int) -> int:
        return max(0, computed - self.window + 1)

    def fresh_until(self, position: int) -> int:
        return (position + 1) * self.block_size + self.window - 2

    def needed(self, drop: bool) -> int:
        """How many consecutive blocks a hit rests on, the one to be dropped included."""
        return -((1 - self.window) // self.block_size) + drop

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> Match:
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
                return Match((end - drop) * size, end - need)
            if low == 0:
                # A prefix shorter than the window is complete by itself.
                end -= end % period
                if drop and end:
                    end -= 1
                    end -= end % period
                return Match(end * size, 0)
        return NO_MATCH

    def cap(self, in_flight: int, max_tokens: int) -> int | None:
        # One more, since a window need not start at a block's edge.
        return -(-min(self.window - 1 + in_flight, max_tokens) // self.block_size) + 1

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


class ChunkRule(Rule):
    """Chunked-local attention: nothing before the current chunk is ever read."""

    forgets = True

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        assert spec.chunk is not None
        self.chunk = spec.chunk

    def stale(self, computed: int) -> int:
        return computed // self.chunk * self.chunk

    def fresh_until(self, position: int) -> int:
        return -(-(position + 1) * self.block_size // self.chunk) * self.chunk - 1

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> Match:
        size = self.block_size
        blocks = limit // size
        low = self.stale(limit) // size
        at = bisect_right(spans, low, key=lambda span: span[0]) - 1
        high = min(blocks, spans[at][1]) if at >= 0 else low
        return Match(max(low, high) * size, low)

    def cap(self, in_flight: int, max_tokens: int) -> int | None:
        return -(-min(self.chunk + in_flight, max_tokens) // self.block_size)


class StateRule(Rule):
    """State (Mamba) groups: one state at the boundary is all a hit needs, and all earlier ones are stale."""

    forgets = True

    def stale(self, computed: int) -> int:
        return max(0, computed - 1)

    def fresh_until(self, position: int) -> int:
        return (position + 1) * self.block_size

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> Match:
        # No drop: draft heads have no state layers.
        size = self.block_size
        blocks = limit // size
        period = max(1, alignment // size)
        for low, high in reversed(spans):
            end = min(high, blocks)
            end -= end % period
            if end > low:
                return Match(end * size, end - 1)
        return NO_MATCH

    def keeps_all(self, alignment: int, eagle: bool, retention: int | None) -> bool:
        return retention is None or 0 < retention < 2 * self.block_size

    def worth(
        self, first: int, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        if self.keeps_all(alignment, eagle, retention):
            return None
        size = self.block_size
        kept: list[tuple[int, int]] = []
        if retention:
            period = retention // size
            kept += [(end - 1, end) for end in range((first // period + 1) * period, last + 1, period)]
        for boundary in boundaries:
            end = boundary // alignment * alignment // size
            kept.append((end - 1, end))
        return clip(kept, first, last)


def rule_for(spec: GroupSpec) -> Rule:
    """The rule of a (checked) spec."""
    if spec.is_window:
        return WindowRule(spec)
    if spec.is_state:
        return StateRule(spec)
    return ChunkRule(spec) if spec.kind == "chunked_local" else Rule(spec)
