"""Matches: cached prefixes of one prompt, as groups of workers with equal prefixes.

In a large fleet most workers have equal prefixes of a prompt, or none, so a policy reads few groups. A set of workers is an
integer, as everywhere in the index: slots are bits.
"""

from collections.abc import Sequence
from typing import TypeAlias

from kvyard.router.pace import Pace
from kvyard.router.ranking import Levels, of_slot

Groups: TypeAlias = list[tuple[tuple[int, ...], int]]
"""Blocks by tier, and the slots, as bits, of the workers that have exactly these; no slot twice."""


class CachedPrefixes:
    """Cached prefix of one prompt at each worker."""

    __slots__ = ("announced", "groups", "tiers", "trust")

    def __init__(
        self, groups: Groups, tiers: int = 1, announced: Levels | None = None, trust: Sequence[tuple[float, int]] = ()
    ) -> None:
        """``groups`` has all workers with a cached prefix, on ``tiers`` tiers."""
        self.groups = groups
        self.tiers = tiers
        self.announced = announced
        """Blocks in device memory that events announced, where ``groups`` has predictions too."""
        self.trust = trust
        """Confidence in partly trusted streams, with their workers as bits."""

    def of(self, slot: int) -> tuple[int, ...]:
        """Return one worker's blocks, by tier."""
        for tiers, slots in self.groups:
            if slots >> slot & 1:
                return tiers
        return (0,) * self.tiers

    def predicted(self, slot: int) -> int:
        """Return one worker's blocks in device memory that no event announced yet."""
        if self.announced is None:
            return 0
        return self.of(slot)[0] - of_slot(self.announced, slot)

    def longest(self, among: int) -> tuple[int, int]:
        """Return the most blocks that a worker of the set ``among`` has, and the workers with that many; (0, 0) for none."""
        best = holders = 0
        for tiers, slots in self.groups:
            blocks = sum(tiers) if len(tiers) > 1 else tiers[0]
            if blocks >= best and slots & among:
                holders = slots & among if blocks > best else holders | slots & among
                best = blocks
        return (best, holders) if best else (0, 0)


class Match:
    """Cached prefix of the prompt, equal for a group of workers."""

    __slots__ = ("cached_tokens", "confidence", "new_tokens", "pace", "shared_blocks", "slots", "tiers")

    def __init__(self, slots: int, tiers: tuple[int, ...], cached_tokens: int, num_tokens: int) -> None:
        self.slots = slots
        """The workers, as bits by slot."""
        self.tiers = tiers
        """Cached blocks of the prompt: in device memory, predictions included, and what each lower tier adds. Empty where no
        worker has any."""
        self.cached_tokens = cached_tokens
        """Tokens that needn't be computed, whichever tier has them; never the prompt's last."""
        self.new_tokens = num_tokens - cached_tokens
        """Tokens left to compute."""
        self.confidence = 1.0
        """Trust in the stream that reported ``tiers``; included in ``cached_tokens``."""
        self.shared_blocks = 0
        """Blocks of the prompt that requests in flight hold there; for policies with ``needs_shared``."""
        self.pace: Pace | None = None
        """Speed of each of the workers; for policies with ``needs_pace``."""


def matches_of(
    prefixes: CachedPrefixes | None,
    among: int,
    num_tokens: int,
    block_size: int,
    shared: Levels,
    speeds: Sequence[tuple[Pace, int]],
) -> list[Match]:
    """Group the workers of the set ``among`` by their cached prefix; if given, also by the blocks that are ``shared`` with
    requests in flight there, and by ``speeds``. No match is empty.
    """
    if prefixes is None:
        matches = [Match(among, (), 0, num_tokens)]
    else:
        matches = []
        usable = num_tokens - 1
        for tiers, slots in prefixes.groups:
            slots &= among
            if slots:
                among ^= slots
                tokens = (sum(tiers) if len(tiers) > 1 else tiers[0]) * block_size
                matches.append(Match(slots, tiers, tokens if tokens < usable else usable, num_tokens))
        if among:
            matches.append(Match(among, (0,) * prefixes.tiers, min(0, usable), num_tokens))
        if prefixes.trust:
            matches = _by_trust(matches, prefixes.trust, num_tokens, block_size)
    if shared:
        matches = _by_shared(matches, shared, num_tokens)
    if len(speeds) == 1:
        for match in matches:
            match.pace = speeds[0][0]
    elif speeds:
        matches = _by_pace(matches, speeds, num_tokens)
    return matches


def _part(match: Match, slots: int, num_tokens: int) -> Match:
    part = Match(slots, match.tiers, match.cached_tokens, num_tokens)
    part.confidence, part.shared_blocks = match.confidence, match.shared_blocks
    return part


def _by_trust(
    matches: list[Match], trust: Sequence[tuple[float, int]], num_tokens: int, block_size: int
) -> list[Match]:
    out: list[Match] = []
    for match in matches:
        left = match.slots
        for confidence, members in trust:
            slots = left & members
            if slots:
                tokens = min(int(confidence * (sum(match.tiers) * block_size)), num_tokens - 1)
                part = Match(slots, match.tiers, tokens, num_tokens)
                part.confidence = confidence
                out.append(part)
                left ^= slots
        if left:
            out.append(_part(match, left, num_tokens))
    return out


def _by_shared(matches: list[Match], shared: Levels, num_tokens: int) -> list[Match]:
    out: list[Match] = []
    for match in matches:
        for blocks, members in shared:
            slots = match.slots & members
            if slots:
                if slots == match.slots:
                    match.shared_blocks = blocks
                    break
                part = _part(match, slots, num_tokens)
                part.shared_blocks = blocks
                out.append(part)
                match.slots ^= slots
        out.append(match)
    return out


def _by_pace(matches: list[Match], speeds: Sequence[tuple[Pace, int]], num_tokens: int) -> list[Match]:
    out: list[Match] = []
    for match in matches:
        for pace, members in speeds:
            slots = match.slots & members
            if slots:
                part = _part(match, slots, num_tokens)
                part.pace = pace
                out.append(part)
    return out


def longest_of(matches: Sequence[Match]) -> list[Match]:
    """Return the ``matches`` with the most cached tokens."""
    most = max([match.cached_tokens for match in matches])
    return [match for match in matches if match.cached_tokens == most]
