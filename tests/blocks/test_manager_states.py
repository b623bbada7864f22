"""States that a chunk leaves inside, states at shared prefixes, and groups of which nothing is cached, in one manager."""

from __future__ import annotations

import pytest
from tests.blocks.support import cache, make, run

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.blocks.attention.state import AlignedStateGroup

FULL = GroupSpec(block_size=4)
STATES = GroupSpec(kind="mamba", block_size=8)
INSIDE = GroupSpec(kind="mamba", block_size=8, checkpoint_unit=4)
PROMPT = range(100, 131)


def tokens_found(manager: BlockManager, name: str = "later") -> int:
    """Tokens that a resend of ``PROMPT`` finds."""
    manager.begin_step()
    return manager.lookup(make(manager, name, PROMPT)).tokens


@pytest.mark.parametrize(("states", "tokens"), [(STATES, 24), (INSIDE, 28)])
def test_a_resend_continues_at_the_state_that_the_chunk_left_inside(states: GroupSpec, tokens: int) -> None:
    """31 tokens in one chunk: without a state inside, the last one to find is the one that a chunk ended with at 24."""
    manager = BlockManager(40, [FULL, states])
    first = make(manager, "first", PROMPT)
    if states is STATES:
        assert run(manager, first, 24)
    assert run(manager, first)
    assert tokens_found(manager) == tokens
    again = make(manager, "again", PROMPT)
    assert run(manager, again)
    manager.check_integrity()
    assert len(manager.take_copies()) == (1 if tokens % 8 else 0)
    manager.free(first)
    manager.free(again)
    assert tokens_found(manager) == tokens
    manager.check_integrity()


def test_a_state_inside_is_found_while_its_writer_still_holds_it() -> None:
    """The writer has it at the position before its own last one; whoever hits it continues at the next."""
    manager = BlockManager(40, [FULL, INSIDE])
    first = make(manager, "first", PROMPT)
    assert run(manager, first)
    written = manager.block_ids(first)[1]
    assert [bool(block) for block in written] == [False, False, True, True]
    second = make(manager, "second", PROMPT)
    assert run(manager, second)
    assert [(source, target) for source, target in manager.take_copies() if source == written[2]]
    assert manager.block_ids(first)[1] == written
    assert manager.block_ids(second)[1][:3] == [0, 0, 0]
    manager.check_integrity()


def test_a_state_is_no_hit_in_the_step_that_writes_it() -> None:
    manager = BlockManager(40, [FULL, INSIDE])
    first, second = make(manager, "first", PROMPT), make(manager, "second", PROMPT)
    assert run(manager, first)
    hit = manager.lookup(second)
    assert hit.tokens == 28
    assert manager.allocate(second, 3, hit) is None
    manager.begin_step()
    assert manager.allocate(second, 3, manager.lookup(second)) is not None


def test_states_are_listed_for_connectors_until_their_request_is_gone() -> None:
    manager = BlockManager(40, [FULL, INSIDE])
    group = manager.groups[1]
    assert isinstance(group, AlignedStateGroup)
    group.report_kept_states()
    request = make(manager, "first", PROMPT)
    assert run(manager, request, 16)
    assert [(kept.request_id, kept.tokens) for kept in group.take_kept_states()] == [("first", 16)]
    assert run(manager, request)
    manager.free(request)
    assert group.take_kept_states() == []


def test_a_ring_takes_one_block_and_shares_none() -> None:
    manager = BlockManager(40, [FULL, GroupSpec(kind="ring", block_size=3)])
    first = make(manager, "first", PROMPT)
    assert run(manager, first, 10)
    ring = manager.block_ids(first)[1]
    assert len(ring) == 1
    assert run(manager, first)
    assert manager.block_ids(first)[1] == ring
    assert manager.lookup(make(manager, "second", PROMPT)).tokens == 28
    second = make(manager, "second", PROMPT)
    assert run(manager, second)
    assert manager.block_ids(second)[1] not in ([], ring)
    manager.free(first)
    manager.free(second)
    manager.check_integrity()
    assert manager.pool.free == 39


def test_windows_that_are_computed_again_leave_the_hit_to_the_others() -> None:
    window = GroupSpec(kind="sliding_window", window=8, block_size=4, cached=False)
    manager = BlockManager(60, [FULL, window])
    cache(manager, "first", PROMPT)
    assert {group for group, _, _ in manager.pool.cached_blocks()} == {0}
    second = make(manager, "second", PROMPT)
    assert manager.lookup(second).tokens == 28
    assert run(manager, second)
    assert manager.block_ids(second)[1][:5] == [0] * 5
    manager.check_integrity()


def test_ends_of_a_copy_stay_held_until_it_has_run() -> None:
    manager = BlockManager(40, [FULL, INSIDE])
    cache(manager, "first", PROMPT)
    second = make(manager, "second", PROMPT)
    assert run(manager, second)
    (pair,) = [pair for group in manager.groups for pair in group.take_copies() if pair[0].marks is not None]
    free = manager.pool.free
    manager.free(second)
    assert not {pair[0].ids[0], pair[1].ids[0]} & set(manager.pool.line())
    manager.pool.holds.end_copies(pair)
    assert {pair[0].ids[0], pair[1].ids[0]} <= set(manager.pool.line())
    assert manager.pool.free > free
    manager.check_integrity()
