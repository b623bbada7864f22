"""The rule of a kind of attention, as pure functions of positions.

It says what is *stale* once n tokens are computed, what a *hit* needs, how much admission must *reserve*, and what is *worth*
registering. Copies are seen as intervals of block positions on one chain, so the same rules serve the manager's lookup,
onboarding from lower tiers, and the fleet's index. A rule holds no state and knows no pool. Here is that of full attention;
other kinds derive from it, each in its file of ``kvyard.blocks.attention``.
"""

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

from mypy_extensions import mypyc_attr

from kvyard.blocks.extent import Extent
from kvyard.blocks.spans import Spans

ENDLESS: Final = 1 << 60
"""However many tokens come."""
NEVER: Final = -1
"""Not even one token."""


class RuleMatch(NamedTuple):
    """Match of a rule: ``tokens`` can be skipped, and blocks ``low`` to ceil(tokens / block size) must be kept."""

    tokens: int
    low: int
    tails: list[Extent] | None = None
    """Per group looked up the last block, where the match ends inside it."""


NO_MATCH = RuleMatch(0, 0)


@mypyc_attr(allow_interpreted_subclasses=True)  # kinds from outside derive from it
class Rule:
    """Full attention, and what all kinds share: nothing goes stale, a hit is an unbroken prefix, all is worth keeping."""

    forgets: ClassVar[bool] = False
    """True if blocks ever go stale."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def stale(self, computed: int) -> int:
        """Return the number of leading tokens that are never read again once ``computed`` tokens are computed."""
        return 0

    def fresh_until(self, position: int) -> int:
        """Return the largest number of computed tokens that leaves the block at ``position`` in use."""
        return ENDLESS

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> RuleMatch:
        """Return the longest usable prefix of at most ``limit`` tokens, a multiple of ``alignment`` tokens.

        With ``drop`` the last block found is given up (a draft head needs it computed again).
        """
        size = self.block_size
        if not spans or spans[0][0]:
            return NO_MATCH
        tokens = min(spans[0][1], limit // size) * size
        if drop and tokens:
            tokens -= min(alignment, size)
        return RuleMatch(tokens - tokens % alignment, 0)

    def cap(self, in_flight: int, max_tokens: int) -> int | None:
        """Return the most blocks a request ever holds at once, where the kind gives blocks back as it goes."""
        return None

    def keeps_all(self, alignment: int, eagle: bool, retention: int | None) -> bool:
        """Return true if ``worth`` always returns all."""
        return True

    def worth(
        self, first: int, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Return the blocks of ``first`` to ``last`` that can ever serve a hit; ``None`` means all of them.

        ``retention`` and the token ``boundaries`` where a later request can resume matter to sparse kinds only.
        """
        return None
