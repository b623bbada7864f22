"""Steps of running requests: the limits that let a step end before it begins hide nothing, and each is as wide as can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.blocks.support import make, run, snapshot

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.blocks.rule import NEVER

FULL = GroupSpec(block_size=4)
SETS: dict[str, list[GroupSpec]] = {
    "full": [FULL],
    "window": [FULL, GroupSpec(kind="sliding_window", window=9, block_size=4)],
    "two windows": [
        GroupSpec(kind="sliding_window", window=5, block_size=4),
        GroupSpec(kind="sliding_window", window=14, block_size=4),
    ],
    "sizes": [GroupSpec(block_size=8), GroupSpec(kind="sliding_window", window=6, block_size=4)],
    "chunks": [FULL, GroupSpec(kind="chunked_local", chunk=8, block_size=4)],
    "states": [FULL, GroupSpec(kind="mamba", mode="all", block_size=4, spec_blocks=1)],
    "aligned states": [FULL, GroupSpec(kind="mamba", block_size=4)],
}


def started(manager: BlockManager, tokens: int = 10) -> Request:
    request = make(manager, "a", range(tokens))
    assert run(manager, request)
    return request


def step(manager: BlockManager, request: Request, **options: Any) -> Any:
    request.append([request.num_tokens % 7])
    manager.begin_step()
    taken = manager.allocate(request, 1, **options)
    if taken is not None:
        request.num_computed_tokens += 1
    return taken and [list(ids) for ids in taken]


@pytest.mark.parametrize("name", SETS)
@given(
    options=st.sampled_from([{}, {}, {"caching": False}, {"max_model_len": 40}]),
    steps=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 3), st.sampled_from(["", "", "cache", "drop"])),
        max_size=25,
    ),
    blocks=st.sampled_from([24, 60]),
)
def test_limits_hide_nothing(
    name: str, options: dict[str, Any], steps: list[tuple[int, int, int, str]], blocks: int
) -> None:
    """Two managers get the same steps, and one of them forgets what it knows of limits before each."""
    quick, thorough = (BlockManager(blocks, SETS[name], **options) for _ in range(2))
    requests = [started(manager) for manager in (quick, thorough)]
    for new, lookahead, flying, between in steps:
        found = []
        for manager, request in zip((quick, thorough), requests, strict=True):
            if manager is thorough:
                request.forget_limits()
            request.append([5] * (new - new // 3))  # not all that is computed is known by then
            request.num_in_flight_tokens = min(flying, request.num_computed_tokens)
            manager.begin_step()
            taken = manager.allocate(request, new, lookahead=lookahead)
            if taken is not None:
                request.num_computed_tokens += new
            if between == "drop":
                manager.drop_stale(request, request.num_computed_tokens)
            elif between == "cache":
                manager.rollback(request, new // 2 if taken is not None else 0)
            manager.check_integrity()
            found.append((taken and [list(ids) for ids in taken], manager.block_ids(request), snapshot(manager)))
        assert found[0] == found[1]


def quiet_steps(manager: BlockManager, request: Request) -> list[int]:
    """At how many tokens a step of one was not quiet, over 24 steps."""
    loud = []
    for _ in range(24):
        if request.num_computed_tokens + 1 > request.quiet_until:
            loud.append(request.num_computed_tokens + 1)
        assert step(manager, request) is not None
    return loud


def test_a_step_in_full_attention_is_quiet_unless_it_begins_or_ends_a_block() -> None:
    manager = BlockManager(60, SETS["full"])
    assert quiet_steps(manager, started(manager, 8)) == [9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29, 32]


def test_a_window_adds_the_steps_in_which_it_leaves_a_block() -> None:
    manager = BlockManager(60, [FULL, GroupSpec(kind="sliding_window", window=7, block_size=4)])
    request = started(manager, 8)
    # It sees 6 tokens besides the new one: the block that ends at 8 is out once 14 are computed, so in the step to 15.
    assert quiet_steps(manager, request) == [9, 11, 12, 13, 15, 16, 17, 19, 20, 21, 23, 24, 25, 27, 28, 29, 31, 32]


def test_without_caching_only_new_blocks_are_loud() -> None:
    manager = BlockManager(60, SETS["full"], caching=False)
    assert quiet_steps(manager, started(manager, 8)) == [9, 13, 17, 21, 25, 29]


def test_aligned_states_are_never_quiet() -> None:
    manager = BlockManager(60, SETS["aligned states"])
    request = started(manager)
    assert len(quiet_steps(manager, request)) == 24
    assert request.quiet_until == NEVER


def test_a_request_that_was_freed_is_not_quiet() -> None:
    manager = BlockManager(60)
    request = started(manager)
    step(manager, request)
    assert request.quiet_until > 0
    manager.free(request)
    assert request.quiet_until == NEVER


@pytest.mark.parametrize("name", ["full", "window", "two windows", "sizes", "chunks"])
def test_blocks_are_taken_in_the_order_of_groups(name: str) -> None:
    """One take for all groups: who gets which block is as if each had taken its own."""
    manager = BlockManager(60, SETS[name])
    request = started(manager, 8)
    line = list(manager.pool.line())
    taken = step(manager, request, lookahead=20)
    assert [block for ids in taken for block in ids] == line[: sum(map(len, taken))]
    assert all(ids for ids in taken)
    assert [ids[-len(new) :] for ids, new in zip(manager.block_ids(request), taken, strict=True)] == taken


def test_a_step_that_does_not_fit_releases_only_what_left_the_window() -> None:
    manager = BlockManager(9, SETS["window"])
    request = started(manager, 12)
    assert manager.block_ids(request) == [[1, 2, 3], [4, 5, 6]]
    manager.pool.take(2)  # somebody else's
    assert step(manager, request) is None
    assert manager.block_ids(request) == [[1, 2, 3], [0, 5, 6]]
    assert manager.pool.free == 1
    assert manager.allocate(request, 1) is None, "two are needed"
    assert manager.pool.free == 1
