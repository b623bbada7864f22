"""Invariant I3: all groups pin their hits before any group takes a block, once per request, re-armed by preemption.

The first tests are those of vLLM #44409, by name. Each also runs against a coordinator that interleaves the phases as vLLM
did before; there it must fail, or it would prove nothing.
"""

from __future__ import annotations

import pytest
from tests.blocks.support import FULL, WINDOW, Interleaved, cache, make, run, snapshot

from kvyard.blocks import BlockManager, GroupSpec, Hit, Request, RequestError
from kvyard.blocks.coordinator import Coordinator
from kvyard.blocks.extent import Extent
from kvyard.blocks.integrity import reference_counts

TEXT = list(range(20))
"""Five blocks of four tokens that every group has cached."""
LONGER = [*TEXT, *range(100, 124)]
TWO = [FULL, WINDOW]
THREE = [FULL, WINDOW, GroupSpec(kind="sliding_window", window=2000, block_size=4)]

FAILS = pytest.mark.xfail(strict=True, raises=AssertionError)
"""Only a failed assertion will do: a crash on the way to the interesting part would prove nothing."""
BOTH = pytest.mark.parametrize(
    "coordinator",
    [
        pytest.param(Coordinator, id="two-phase"),
        pytest.param(
            Interleaved,
            id="interleaved",
            marks=[pytest.mark.source, pytest.mark.xfail(strict=True, raises=AssertionError)],
        ),
    ],
)


def contended(coordinator: type[Coordinator], groups: list[GroupSpec]) -> tuple[BlockManager, list[list[int]]]:
    """A manager in which ``TEXT`` is cached, held by nobody, and made of the very blocks that are handed out next."""
    manager = BlockManager(1 + 15 * len(groups), groups, coordinator=coordinator)
    hits = cache(manager, "first", TEXT)
    assert manager.pool.free == 15 * len(groups)
    cache(manager, "filler", range(1000, 1040))
    head = list(manager.pool.line())[: 5 * len(groups)]
    assert sorted(head) == sorted(block for table in hits for block in table)
    return manager, hits


def admit(manager: BlockManager, request: Request, external: int = 8, new: int = 4) -> Hit:
    hit = manager.lookup(request)
    assert manager.allocate(request, new, hit, external=external) is not None
    request.num_computed_tokens = hit.tokens + external + new
    request.running = True
    return hit


def check_sound(manager: BlockManager, request: Request, hits: list[list[int]], length: int, free: int) -> None:
    """Every block has one place and one live reference, the hits are where they were, and the free count is exact."""
    tables = manager.block_ids(request)
    assert [len(table) for table in tables] == [length] * len(tables)
    blocks = [block for table in tables for block in table]
    assert len(blocks) == len(set(blocks)), f"a block is in two places: {tables}"
    assert 0 not in blocks, f"a block is missing: {tables}"
    assert [table[: len(hit)] for table, hit in zip(tables, hits, strict=True)] == hits
    counts = reference_counts(manager.pool, manager.requests.values())
    assert {block: counts[block] for block in blocks} == dict.fromkeys(blocks, 1)
    assert manager.pool.free == free
    manager.check_integrity()


# -- the tests of the pull request ------------------------------------------------------------------------------------


@BOTH
def test_cache_hit_local_and_external(coordinator: type[Coordinator]) -> None:
    manager, hits = contended(coordinator, TWO)
    request = make(manager, "second", LONGER)
    assert admit(manager, request).tokens == 20
    check_sound(manager, request, hits, length=8, free=30 - 16)


@BOTH
def test_cache_hit_local_and_external_three_groups(coordinator: type[Coordinator]) -> None:
    manager, hits = contended(coordinator, THREE)
    request = make(manager, "second", LONGER)
    assert admit(manager, request).tokens == 20
    check_sound(manager, request, hits, length=8, free=45 - 24)


def preempt_and_reallocate(coordinator: type[Coordinator], groups: list[GroupSpec]) -> None:
    """The first round has loose blocks to take and goes well either way; the second finds its own hits at the head."""
    count = len(groups)
    manager = BlockManager(1 + 30 * count, groups, coordinator=coordinator)
    last = make(manager, "last", range(2000, 2040))
    assert run(manager, last)
    hits = cache(manager, "first", TEXT)
    request = make(manager, "second", LONGER)
    admit(manager, request)
    try:
        check_sound(manager, request, hits, length=8, free=(30 - 10 - 8) * count)
    except AssertionError as early:
        pytest.fail(f"the first round should be sound with either coordinator: {early}")
    before = manager.block_ids(request)

    manager.preempt(request)
    assert manager.block_ids(request) == [[] for _ in groups]
    assert request.num_computed_tokens == 0
    assert manager.pool.free == (30 - 10) * count
    taker = make(manager, "taker", range(3000, 3048))
    assert run(manager, taker)
    manager.free(last)
    head = list(manager.pool.line())[: 8 * count]
    assert sorted(head) == sorted(block for table in before for block in table)

    assert admit(manager, request).tokens == 32
    check_sound(manager, request, before, length=11, free=(30 - 12 - 11) * count)
    manager.free(request)
    manager.free(taker)
    assert manager.pool.free == 30 * count
    manager.check_integrity()


@BOTH
def test_cache_hit_local_and_external_two_groups_preempt_and_reallocate(coordinator: type[Coordinator]) -> None:
    preempt_and_reallocate(coordinator, TWO)


@BOTH
def test_cache_hit_local_and_external_three_groups_preempt_and_reallocate(coordinator: type[Coordinator]) -> None:
    preempt_and_reallocate(coordinator, THREE)


def test_evictable_cached_blocks_not_double_allocated() -> None:
    """A free hit is used up by pinning it, so it counts; it isn't taken as well.

    Only for our coordinator: there is one group, hence nothing to interleave.
    """
    manager = BlockManager(3, [FULL])
    hits = cache(manager, "first", range(4))
    request = make(manager, "second", range(8))
    assert manager.allocate(request, 4, manager.lookup(request), reserved=1) is None
    assert run(manager, request)
    assert manager.block_ids(request)[0][:1] == hits[0]
    check_sound(manager, request, hits, length=2, free=0)


# -- the worked figures -----------------------------------------------------------------------------------------------


def laid_out(coordinator: type[Coordinator]) -> tuple[BlockManager, Request]:
    """30 free blocks in the order of their ids; 1 to 5 are ``TEXT`` in group 1, 6 to 10 in group 0, the others nothing."""
    manager = BlockManager(31, TWO, coordinator=coordinator)
    text = make(manager, "text", TEXT).chain
    for block in manager.pool.take(30):
        group, position = (1, block - 1) if block <= 5 else (0, block - 6)
        chain = text if block <= 10 else make(manager, "other", range(500 + 4 * block, 504 + 4 * block)).chain
        extent = Extent([block], position if block <= 10 else 0)
        manager.pool.maps[group].enter(chain, extent)
        manager.pool.release([extent])
    manager.evict(range(11, 31))
    assert list(manager.pool.line()) == list(range(1, 31))
    manager.check_integrity()
    request = make(manager, "second", LONGER)
    assert admit(manager, request).tokens == 20
    return manager, request


def test_the_figures_of_the_two_phase_fix() -> None:
    manager, request = laid_out(Coordinator)
    assert manager.block_ids(request) == [[6, 7, 8, 9, 10, 11, 12, 15], [1, 2, 3, 4, 5, 13, 14, 16]]
    assert set(reference_counts(manager.pool, manager.requests.values()).values()) == {1}
    assert manager.pool.free == 14
    manager.check_integrity()


@pytest.mark.source
def test_the_figures_before_the_fix_and_that_the_integrity_check_sees_them() -> None:
    """Our stand-in for the old coordinator does what the old one did, so what fails with it would have failed then."""
    manager, request = laid_out(Interleaved)
    assert manager.block_ids(request) == [[6, 7, 8, 9, 10, 1, 2, 13], [1, 2, 3, 4, 5, 11, 12, 14]]
    assert manager.pool.free == 16
    with pytest.raises(AssertionError, match=r"I2: 16 held \+ 16 free|I3: blocks \[1, 2\] are in two places"):
        manager.check_integrity()


# -- once per request -------------------------------------------------------------------------------------------------


def test_a_later_chunk_never_adopts_again() -> None:
    manager, _ = contended(Coordinator, TWO)
    request = make(manager, "second", LONGER)
    assert run(manager, request, 4)
    before = snapshot(manager, request)
    with pytest.raises(RequestError, match=r"request second runs already and can't adopt hits again"):
        manager.allocate(request, 4, manager.lookup(request))
    assert snapshot(manager, request) == before
    assert run(manager, request, 8)
    tables = manager.block_ids(request)
    assert [len(table) for table in tables] == [8, 8]
    assert [table[:6] for table in tables] == before["requests"][0][1]
    manager.check_integrity()


def test_a_later_chunk_with_external_tokens_only_grows_the_tables() -> None:
    """What is taken for external tokens by a request that runs is taken as new blocks: once, and behind what it has."""
    manager, hits = contended(Coordinator, TWO)
    request = make(manager, "second", LONGER)
    assert run(manager, request, 4)
    before = manager.block_ids(request)
    assert run(manager, request, 4, external=8)
    tables = manager.block_ids(request)
    assert [table[:6] for table in tables] == before
    check_sound(manager, request, hits, length=9, free=30 - 18)


@pytest.mark.parametrize("registered", [0, 1])
def test_one_group_that_has_registered_is_enough(registered: int) -> None:
    """Groups with blocks of different size start registering at different times; the request has started for all.

    Asked of the coordinator itself: most geometries have groups register together.
    """
    manager, _ = contended(Coordinator, TWO)
    request = make(manager, "second", LONGER)
    hit = manager.lookup(request)
    assert manager.allocate(request, 4) is not None  # a cold start, by choice
    request.num_computed_tokens = 4
    request.tables[registered].registered, request.tables[1 - registered].registered = 0, None
    before = snapshot(manager, request)
    manager.coordinator.adopt(request, hit.groups, 20, 8)
    assert snapshot(manager, request) == before
    request.tables[registered].registered = None
    assert manager.coordinator.has_adopted(request), "blocks in a table are enough too"
    manager.free(request)
    assert not manager.coordinator.has_adopted(request)


def test_one_small_group_registers_first_and_the_request_has_started() -> None:
    """The same through the front door: hits may end inside the state group's blocks, so nothing waits for the larger."""
    groups = [FULL, GroupSpec(kind="mamba", block_size=16)]
    manager = BlockManager(40, groups)
    assert manager.geometry.fine_hits
    request = make(manager, "a", LONGER)
    assert run(manager, request, 6)
    assert [table.registered for table in request.tables] == [1, None]
    before = manager.block_ids(request)
    free = manager.pool.free
    # 2 more blocks of 4 in the full group, none in the other; a second adoption would set the tables anew.
    assert run(manager, request, 2, external=4)
    tables = manager.block_ids(request)
    assert [table[: len(old)] for table, old in zip(tables, before, strict=True)] == before
    assert [len(table) for table in tables] == [3, 1]
    assert manager.pool.free == free - 1
    manager.check_integrity()


def test_preemption_arms_it_again() -> None:
    manager, hits = contended(Coordinator, TWO)
    request = make(manager, "second", LONGER)
    for _ in range(3):
        assert not manager.coordinator.has_adopted(request)
        hit = manager.lookup(request)
        assert [ids[:5] for ids in hit.block_ids()] == hits
        assert manager.allocate(request, 4, hit, external=4) is not None
        assert manager.coordinator.has_adopted(request)
        request.num_computed_tokens = hit.tokens + 8
        request.running = True
        manager.check_integrity()
        manager.preempt(request)
        assert not request.running
        assert manager.pool.free == 30
        manager.check_integrity()


# -- what is pinned and what is counted -------------------------------------------------------------------------------


def test_window_skipped_blocks_are_never_pinned() -> None:
    """With external tokens the window moves on past most of the hit: those blocks stay free, and stay cached."""
    groups = [FULL, GroupSpec(kind="sliding_window", window=13, block_size=4)]
    manager = BlockManager(60, groups)
    (full, window) = cache(manager, "first", TEXT)
    request = make(manager, "second", LONGER)
    hit = manager.lookup(request)
    assert hit.block_ids() == [full, [0, 0, *window[2:]]]
    assert manager.allocate(request, 4, hit, external=8) is not None
    request.num_computed_tokens, request.running = 32, True
    # 28 tokens are there before the new ones: positions from 28 - 12 = 16 on are seen, which is block 4 onwards.
    full_table, window_table = manager.block_ids(request)
    assert full_table[:5] == full
    assert window_table[:5] == [0, 0, 0, 0, window[4]]
    counts = reference_counts(manager.pool, manager.requests.values())
    assert not counts.keys() & set(window[:4])
    assert set(window[:4]) <= set(manager.pool.line())
    assert manager.pool.free == 59 - 8 - 4
    manager.check_integrity()
    other = make(manager, "third", [*TEXT, 7])
    assert manager.lookup(other).tokens == 20
    manager.free(request)
    assert manager.pool.free == 59
    manager.check_integrity()


def test_hits_that_all_fall_out_of_the_window_are_not_pinned_either() -> None:
    groups = [FULL, GroupSpec(kind="sliding_window", window=5, block_size=4)]
    manager = BlockManager(60, groups)
    (_, window) = cache(manager, "first", TEXT)
    request = make(manager, "second", LONGER)
    assert run(manager, request, 4, external=16)
    table = manager.block_ids(request)[1]
    assert table[:8] == [0] * 8 and all(table[8:])
    assert not reference_counts(manager.pool, manager.requests.values()).keys() & set(window)
    manager.check_integrity()


def test_external_tokens_that_nobody_will_read_wait_for_the_new_ones() -> None:
    """With a window of one token nothing that is loaded is ever read: such a group takes no part in the second phase.

    10 tokens are loaded, into three blocks each of the outer groups; only then the middle one takes its block.
    """
    groups = [FULL, GroupSpec(kind="sliding_window", window=1, block_size=4), GroupSpec(kind="mla", block_size=4)]
    manager = BlockManager(20, groups)
    request = make(manager, "a", range(20))
    assert run(manager, request, 1, external=10)
    assert manager.block_ids(request) == [[1, 2, 3], [0, 0, 7], [4, 5, 6]]
    manager.check_integrity()


@pytest.mark.parametrize(
    "groups",
    [
        [FULL],
        [WINDOW],
        TWO,
        THREE,
        [FULL, FULL],
        [FULL, GroupSpec(kind="sliding_window", window=9, block_size=4)],
        [FULL, GroupSpec(kind="chunked_local", chunk=8, block_size=4)],
        [FULL, GroupSpec(kind="mamba", mode="all", block_size=4)],
        [FULL, GroupSpec(kind="mamba", block_size=4)],
    ],
    ids=lambda groups: "+".join(group.kind for group in groups),
)
@pytest.mark.parametrize("shared", [0, 2, 5], ids="others-hold-{}".format)
@pytest.mark.parametrize("external", [0, 8], ids="external-{}".format)
def test_evictable_blocks_are_counted_once(groups: list[GroupSpec], shared: int, external: int) -> None:
    """What an allocation needs is exactly what it uses up: with that many free blocks it works, with one less it doesn't."""
    if any(group.is_state and group.mode == "align" for group in groups):
        external = 0  # an aligned state group has no use for blocks of external tokens, and vLLM never asks

    def prepared() -> tuple[BlockManager, Request, int]:
        manager = BlockManager(100, groups)
        cache(manager, "first", TEXT)
        if shared:
            assert run(manager, make(manager, "holder", [*TEXT[: 4 * shared], 800]))
        manager.begin_step()
        return manager, make(manager, "second", LONGER), manager.pool.free

    manager, request, free = prepared()
    assert run(manager, request, 4, external=external)
    needed = free - manager.pool.free
    assert needed > 0

    manager, request, free = prepared()
    hit = manager.lookup(request)
    assert hit.tokens == 20
    before = snapshot(manager, request)
    assert manager.allocate(request, 4, hit, external=external, reserved=free - needed + 1) is None
    assert snapshot(manager, request) == before
    assert manager.allocate(request, 4, hit, external=external, reserved=free - needed) is not None
    assert manager.pool.free == free - needed
    manager.check_integrity()


def test_a_hit_survives_that_others_split_what_it_found() -> None:
    """Between lookup and allocation someone else adopts part of the same blocks. Nothing was evicted: the hit is good."""
    manager = BlockManager(40, TWO)
    hits = cache(manager, "first", TEXT)
    request = make(manager, "second", LONGER)
    hit = manager.lookup(request)
    other = make(manager, "other", [*TEXT[:8], 700])
    assert run(manager, other)
    assert hit.block_ids() == hits
    free = manager.pool.free
    assert manager.allocate(request, 4, hit) is not None
    assert [table[:5] for table in manager.block_ids(request)] == hits
    assert manager.pool.free == free - 2 * (3 + 1)
    manager.check_integrity()
