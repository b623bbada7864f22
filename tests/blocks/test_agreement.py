"""How long a prefix groups can use together, by examples and against the block manager's own lookup."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.blocks.support import cache, make, spans_of

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.blocks.agreement import Agreement, equal_groups

FULL = GroupSpec(block_size=4)
WINDOW = GroupSpec(kind="sliding_window", window=10, block_size=4)
STATE = GroupSpec(kind="mamba", mode="all", block_size=4)


def agreement(*specs: GroupSpec, drops: bool = False) -> Agreement:
    return Agreement(specs, [drops] * len(specs), 4)


def test_full_attention_stops_at_the_first_miss() -> None:
    assert agreement(FULL).longest([[(0, 3), (4, 9)]], 100, 100) == 12
    assert agreement(FULL).longest([[(1, 9)]], 100, 100) == 0
    assert agreement(FULL).longest([[(0, 9)]], 35, 100) == 32


def test_a_window_needs_its_trailing_interval_only() -> None:
    # Ten tokens see nine before them: three blocks of four.
    assert agreement(FULL, WINDOW).longest([[(0, 9)], [(4, 7)]], 100, 100) == 28
    assert agreement(FULL, WINDOW).longest([[(0, 9)], [(5, 7)]], 100, 100) == 0
    assert agreement(FULL, WINDOW).longest([[(0, 9)], [(0, 2), (5, 7)]], 100, 100) == 8


def test_a_state_needs_its_boundary_point_only() -> None:
    assert agreement(FULL, STATE).longest([[(0, 9)], [(2, 3), (6, 7)]], 100, 100) == 28
    assert agreement(FULL, STATE).longest([[(0, 5)], [(2, 3), (6, 7)]], 100, 100) == 12


def test_groups_shrink_each_other_to_a_fixed_point() -> None:
    # The state allows 8 or 7 blocks; the window has 7 but not 8; the state's point at 7 is there.
    assert agreement(FULL, WINDOW, STATE).longest([[(0, 9)], [(4, 7)], [(6, 8)]], 100, 100) == 28
    # Without it, it is the next one that both have.
    assert agreement(FULL, WINDOW, STATE).longest([[(0, 9)], [(1, 7)], [(3, 4), (7, 8)]], 100, 100) == 16


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize(
    "specs",
    [
        [FULL],
        [WINDOW],
        [FULL, WINDOW],
        [FULL, STATE],
        [FULL, WINDOW, GroupSpec(kind="sliding_window", window=5, block_size=4)],
        [GroupSpec(block_size=8), GroupSpec(kind="sliding_window", window=7, block_size=2)],
        [FULL, WINDOW, STATE],
    ],
    ids=lambda specs: "+".join(spec.kind for spec in specs),
)
def test_the_manager_is_the_oracle(specs: list[GroupSpec], eagle: bool) -> None:
    """Given the manager's own intervals, the agreement is the manager's hit."""
    rng = random.Random(7)
    different = 0
    for _ in range(60):
        manager = BlockManager(200, specs, use_eagle=eagle)
        tokens = [rng.randint(1, 9) for _ in range(80)]
        for name in "ab":
            manager.begin_step()
            cache(manager, name, [*tokens[: rng.randint(4, 80)], 0, 0, 0])
        held = [block for _, _, block in manager.pool.cached_blocks()]
        manager.evict(rng.sample(held, rng.randint(0, min(5, len(held)))))
        manager.begin_step()
        request = make(manager, "c", tokens[: rng.randint(8, 80)])
        alignment = manager.geometry.scheduler_block_size if len(specs) > 1 else specs[0].block_size
        rule = Agreement(specs, [group.eagle for group in manager.groups], alignment)
        limit = request.num_tokens - 1
        seen: list[Any] = []
        for group in manager.groups:
            end = len(request.chain.keys) * request.chain.block_size
            nodes, at = group.map.walk(group.chain_of(request).keys, end // group.block_size)
            seen.append(spans_of({p for n in nodes if n.copies for p in range(n.start, min(n.stop, at))}))
        longest = rule.longest(seen, limit, len(request.chain.keys) * request.chain.block_size)
        expected = manager.lookup(request).tokens
        assert longest == expected
        different += expected > 0
    assert different > 10


def test_full_attention_is_asked_first() -> None:
    window, full = GroupSpec(kind="sliding_window", window=32), GroupSpec()
    assert equal_groups([window, full, window, full]) == [[1, 3], [0, 2]]
