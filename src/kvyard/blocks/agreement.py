"""Longest prefix that all groups can reuse: the one rule of prefix hits, for the device, for lower tiers and for the index.

Each group reports where its copies are, as intervals of its own blocks, on any tier. Full attention stops at the
first miss, a window needs its trailing interval, a state its boundary point; the answer is the longest length on which all
of them agree. What each kind needs is in the rules of ``kvyard.blocks.attention``.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from kvyard.blocks.rule import NO_MATCH, RuleMatch
from kvyard.blocks.spans import Spans, intersect
from kvyard.blocks.spec import GroupSpec
from kvyard.hashing import Keys


@mypyc_attr(allow_interpreted_subclasses=True)
class EqualGroups:
    """Groups of equal kind and size: they are looked up together and hit only where all of them do."""

    def __init__(self, spec: GroupSpec, members: Sequence[int], drops: bool, alignment: int) -> None:
        """``members`` are indices of groups. ``drops``: the last block found is given up, for a draft head."""
        self.members = members
        self.rule = spec.rule()
        self.is_full = spec.is_full
        self.drops = drops
        self.alignment = alignment
        self.beyond = 0 if spec.is_state else min(spec.block_size, alignment)
        """Distance past a candidate at which the block may lie that is found and then discarded."""

    def common(self, spans: Sequence[Spans]) -> Spans:
        """Return the intervals that every member has, given those of all groups."""
        both = spans[self.members[0]]
        for member in self.members[1:]:
            both = intersect(both, spans[member])
        return both

    def match(self, spans: Spans, limit: int, drop: bool, keys: Keys | None) -> RuleMatch:
        """Return the longest prefix of at most ``limit`` tokens that every member can use; ``spans`` are what all of them have.

        ``keys`` are the prompt's hashes, for groups that can be hit inside a block.
        """
        return self.rule.match(spans, limit, self.alignment, drop)


class Agreed(NamedTuple):
    """Agreement of all groups."""

    tokens: int
    matches: list[RuleMatch]
    """Match of each of the ``EqualGroups`` at the time of agreement; full attention may have matched more than ``tokens``."""
    longest: int
    """The longest prefix that any of them offered on the way."""


def equal_groups(specs: Sequence[GroupSpec]) -> list[list[int]]:
    """Return the indices of equal groups; full attention first, since its answer bounds the others at little cost."""
    members_of: dict[GroupSpec, list[int]] = {}
    for group, spec in enumerate(specs):
        members_of.setdefault(replace(spec, eagle=False), []).append(group)
    return sorted(members_of.values(), key=lambda members: not specs[members[0]].is_full)


def agree(parts: Sequence[EqualGroups], spans: Sequence[Spans], limit: int, end: int, keys: Keys | None) -> Agreed:
    """Return the longest prefix of at most ``limit`` tokens that all of ``parts`` can use, given the ``spans`` of each.

    A candidate length shrinks until every part accepts it. ``end`` is how many tokens the prompt's full blocks have: a block
    that will be dropped may lie past ``limit``.
    """
    if len(parts) == 1 and len(parts[0].members) == 1:
        match = parts[0].match(spans[0], limit, parts[0].drops, keys)
        return Agreed(match.tokens, [match], 0)
    matches = [NO_MATCH] * len(parts)
    first_round = True
    dropped: set[int] = set()
    hit, longest = limit, 0
    # Full attention accepts any shorter prefix, so one other part has the last word.
    one_round = len(parts) == 2 and parts[0].is_full
    while True:
        candidate = hit
        for index, part in enumerate(parts):
            if part.is_full and not first_round:
                candidate = min(candidate, matches[index].tokens)
                continue
            # A block is dropped once per candidate; otherwise the drop would repeat until nothing is left.
            drop = part.drops and index not in dropped
            match = part.match(spans[index], min(candidate + part.beyond, end) if drop else candidate, drop, keys)
            if drop:
                dropped.add(index)
            elif match.tokens < candidate:
                dropped.clear()
            candidate = match.tokens
            longest = max(longest, candidate)
            matches[index] = match
        if candidate >= hit or one_round:
            return Agreed(min(candidate, hit), matches, longest)
        hit = candidate
        first_round = False


class Agreement:
    """Agreement of a set of groups, computed from intervals only."""

    def __init__(self, specs: Sequence[GroupSpec], drops: Sequence[bool], alignment: int) -> None:
        """``drops``: which groups give up the last block found, for a draft head. A hit ends on ``alignment`` tokens."""
        self.parts = [
            EqualGroups(specs[members[0]], members, any(drops[group] for group in members), alignment)
            for members in equal_groups(specs)
        ]

    def longest(self, spans: Sequence[Spans], limit: int, end: int) -> int:
        """Return the longest prefix of at most ``limit`` tokens that every group can use, given the intervals of each.

        ``end`` is how many tokens the prompt's full blocks have.
        """
        return agree(self.parts, [part.common(spans) for part in self.parts], limit, end, None).tokens
