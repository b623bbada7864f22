"""A roster: the answers of the scorer about given workers, by position."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.levels import by_slot

from kvyard.blocks import GroupSpec
from kvyard.events.types import Tier
from kvyard.hashing import Run, TraceChain
from kvyard.index import Holder
from kvyard.index.bits import bits
from kvyard.index.runs import RunIndexer

GROUPS = {
    "full": (GroupSpec(block_size=4),),
    "two full": (GroupSpec(block_size=4), GroupSpec(block_size=4)),
    "larger blocks": (GroupSpec(block_size=8),),
    "hybrid": (GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=9, block_size=4)),
    "windows alone": (GroupSpec(kind="sliding_window", window=9, block_size=4),) * 2,
}
TEXT = TraceChain(range(40), 4, 160, 4, 1)


def test_bits_are_those_that_are_set() -> None:
    for members in (0, 1, 0b1011, 1 << 255, (1 << 300) - 1):
        assert list(bits(members)) == [bit for bit in range(300) if members >> bit & 1]


@given(seed=st.integers(0, 1 << 32), workers=st.integers(1, 20), tokens=st.integers(1, 200))
@settings(max_examples=40)
def test_the_roster_agrees_with_the_scorer(seed: int, workers: int, tokens: int) -> None:
    rng = random.Random(seed)
    index = RunIndexer(4)
    for number in range(workers):
        groups = GROUPS[rng.choice(list(GROUPS))]
        feed = index.attach(Holder("w", number), groups, [Tier.G1, Tier.G2])
        for group, spec in enumerate(groups):
            for tier in (Tier.G1, Tier.G2):
                stop = rng.choice((0, 20, 20, rng.randrange(41))) * 4 // spec.block_size
                start = rng.randrange(stop + 1) if group and rng.random() < 0.3 else 0
                feed.entered(Run(TEXT.coarser(spec.block_size), start, stop), group, tier, True)
        feed.end_iteration(0)
    index.flush(0)
    order = [Holder("w", number) for number in range(workers)] + [Holder("", -1)]
    rng.shuffle(order)
    roster = index.roster(order)
    reaches = index.reaches(roster, TEXT.keys, tokens)  # type: ignore[arg-type]
    levels = [by_slot(level, len(order)) for level in reaches]
    scores = index.scorer.score(TEXT.keys, tokens, order).workers  # type: ignore[arg-type]
    assert (levels[-1] if levels else [0] * len(order)) == [scores[worker].blocks for worker in order]
    if levels:
        device = [scores[worker].tiers[Tier.G1].blocks if Tier.G1 in scores[worker].tiers else 0 for worker in order]
        assert levels[roster.tiers.index(Tier.G1)] == device
    assert not roster.trust
    for reach, lengths in zip(levels, reaches, strict=True):
        assert [blocks for blocks, _ in lengths] == sorted({blocks for blocks in reach if blocks}, reverse=True)


def test_an_end_without_its_start_counts_for_windows() -> None:
    index = RunIndexer(4)
    order = [Holder("w", number) for number in range(3)]
    for holder, start in zip(order, (10, 15, 19), strict=True):
        feed = index.attach(holder, GROUPS["windows alone"], [Tier.G1])
        for group in (0, 1):
            feed.entered(Run(TEXT, start, 20), group, Tier.G1, True)
        feed.end_iteration(0)
    index.flush(0)
    roster = index.roster(order)
    assert index.reaches(roster, TEXT.keys, 160) == [[(20, 0b011)]]  # type: ignore[arg-type]
