"""The offload engine on a private host tier: out at the end of a pass, back in before it would be computed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiers.support import BLOCK, Worker, link, tiers

from kvyard.blocks import GroupSpec
from kvyard.blocks.rule import ENDLESS
from kvyard.events.types import Tier
from kvyard.tiers import LoadStep


def test_out_and_back_in() -> None:
    worker = Worker(tiers())
    first = worker.run("a", range(41), now=0)
    assert worker.held(Tier.G1) == 10 and worker.held(Tier.G2) == 0
    assert worker.offload.earliest_deadline() == 10_000  # ten blocks of a microsecond each
    assert worker.tick(9_999) == [] and worker.held(Tier.G2) == 0
    assert worker.tick(10_000) == [] and worker.held(Tier.G2) == 10
    worker.finish(first, 10_000)
    worker.evict_all()
    worker.check()
    assert worker.held(Tier.G1) == 0

    again = worker.make("b", range(41))
    outcome = worker.onboard(again, 20_000)
    assert (outcome.step, outcome.tokens, outcome.deadline) == (LoadStep.STARTED, 40, 30_000)
    assert worker.held(Tier.G1) == 0 and again.num_computed_tokens == 0
    assert worker.tick(29_999) == []
    assert worker.tick(30_000) == [again]
    assert again.num_computed_tokens == 40 and worker.held(Tier.G1) == 10
    worker.compute(again, 31_000)
    worker.finish(again, 32_000)
    counters = worker.offload.counters
    assert (counters.tiers[0].stores.blocks, counters.tiers[0].loads.blocks, counters.hits, counters.hit_tokens) == (
        10,
        10,
        1,
        40,
    )
    assert worker.offload.earliest_deadline() is None


def test_only_what_is_missing_is_stored() -> None:
    worker = Worker(tiers())
    worker.run("a", range(41), now=0)
    worker.settle()
    worker.run("b", [*range(20), *range(100, 121)], now=20_000)  # shares five blocks, has five of its own
    assert worker.offload.counters.tiers[0].stores.submitted == 2
    worker.settle()
    assert worker.offload.counters.tiers[0].stores.blocks == 15
    worker.run("c", range(41), now=60_000)
    assert worker.offload.counters.tiers[0].stores.submitted == 2


def test_a_prompt_in_chunks_is_stored_chunk_by_chunk_and_once() -> None:
    worker = Worker(tiers())
    request = worker.make("a", range(60))
    for now, new in ((0, 18), (1_000, 10), (2_000, 32)):
        worker.compute(request, now, new)
    assert [worker.offload.counters.tiers[0].stores.submitted, worker.settle()] == [3, 15_000]
    assert worker.held(Tier.G2) == 15 == worker.offload.counters.tiers[0].stores.blocks
    assert worker.offload.quiet_until(request) == ENDLESS


def test_generated_blocks_are_stored_only_if_asked_for() -> None:
    for policy, expected in (("write_through", 2), ("write_through_generated", 4)):
        worker = Worker(tiers(policy=policy))
        request = worker.run("a", range(9), now=0)
        for now in range(1, 8):
            assert worker.offload.quiet_until(request) > 0
            request.append([now])
            worker.compute(request, 1_000 * now, 1)
        worker.settle()
        assert worker.held(Tier.G2) == expected


# -- what the seed's reviewers asked for ------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", ["fifo", "fair"])
def test_contention_changes_when_copies_land(discipline: str) -> None:
    """Two cohorts of ten blocks on one link land later than one, whichever way the link is shared."""
    alone = Worker(tiers(host_keys={"link": link(discipline=discipline)}))
    alone.run("a", range(41), now=0)
    assert alone.settle() == 10_000
    both = Worker(tiers(host_keys={"link": link(discipline=discipline)}), num_blocks=100)
    both.run("a", range(41), now=0)
    both.run("b", range(100, 141), now=0)
    first = both.offload.earliest_deadline()
    assert (first, both.settle()) == ((10_000, 20_000) if discipline == "fifo" else (20_000, 20_000))
    assert both.offload.counters.tiers[0].stores.queued_ns == (10_000 if discipline == "fifo" else 20_000)


def test_slots_stay_out_of_the_pool_until_the_copy_ends() -> None:
    worker = Worker(tiers(), num_blocks=16)
    request = worker.run("a", range(41), now=0)  # ten full blocks are copied, the eleventh is not
    worker.finish(request, 100)
    assert worker.manager.pool.free == 5
    big = worker.make("b", range(100, 140))
    assert worker.manager.allocate(big, 40) is None
    worker.tick(9_999)
    assert worker.manager.pool.free == 5
    worker.tick(10_000)
    assert worker.manager.pool.free == 15 and worker.manager.allocate(big, 40) is not None


def test_a_source_can_be_hit_while_it_is_copied() -> None:
    worker = Worker(tiers())
    worker.finish(worker.run("a", range(41), now=0), 100)
    again = worker.make("b", range(41))
    assert worker.manager.lookup(again).tokens == 40
    assert worker.onboard(again, 200).step is LoadStep.NOTHING  # the device has all of it
    worker.compute(again, 300)
    worker.settle()
    worker.finish(again, 20_000)
    assert worker.offload.counters.tiers[0].stores.blocks == 10


@pytest.mark.parametrize(
    ("size", "ends"), [(None, [10_500]), (4, [4_500, 9_000, 11_500]), (1, [1_500 * n for n in range(1, 11)])]
)
def test_batch_size_matters(size: int | None, ends: list[int]) -> None:
    """Each batch pays the first byte anew, and what has landed is there before the rest."""
    worker = Worker(tiers(offload_batch_size=size, host_keys={"link": link(latency=500)}))
    request = worker.run("a", range(41), now=0)
    worker.finish(request, 0)
    landed: list[int] = []
    free: list[int] = []
    while (at := worker.offload.earliest_deadline()) is not None:
        worker.tick(at)
        landed.append(at)
        free.append(worker.manager.pool.free)
    assert landed == ends and worker.held(Tier.G2) == 10
    assert free == sorted(free) and free[-1] == 49 and len(set(free)) == len(ends)


def test_batches_go_on_though_nobody_ticks_in_between() -> None:
    worker = Worker(tiers(offload_batch_size=2))
    worker.run("a", range(41), now=0)
    worker.tick(10_000)
    assert worker.held(Tier.G2) == 10 and worker.offload.earliest_deadline() is None


# -- loads ------------------------------------------------------------------------------------------------------------


def prepared(length: int = 41, **keys: Any) -> Worker:
    """A worker whose host has a prompt that its device has not."""
    worker = Worker(tiers(**keys), num_blocks=keys.pop("num_blocks", 50))
    worker.finish(worker.run("old", range(length), now=0), 1)
    worker.settle()
    worker.evict_all()
    return worker


def test_a_block_that_is_being_loaded_is_not_loaded_twice() -> None:
    worker = prepared()
    one, two = worker.make("one", range(41)), worker.make("two", [*range(24), *range(70, 91)])
    assert worker.onboard(one, 20_000).step is LoadStep.STARTED
    waiting = worker.onboard(two, 21_000)
    assert (waiting.step, waiting.deadline) == (LoadStep.WAITING, 30_000)
    assert worker.manager.block_ids(two) == [[]]
    assert worker.onboard(two, 22_000).step is LoadStep.WAITING
    assert worker.offload.counters.pending_waits == 1  # asked again before anything happened: the same answer, for free
    assert worker.tick(30_000) == [one]
    assert worker.onboard(two, 30_000).step is LoadStep.NOTHING
    assert worker.manager.lookup(two).tokens == 24
    assert worker.offload.counters.tiers[0].loads.blocks == 10


def test_a_load_goes_on_after_what_the_device_has() -> None:
    worker = prepared(81)
    worker.finish(worker.run("part", range(21), now=200_000), 200_001)
    again = worker.make("again", range(81))
    assert worker.manager.lookup(again).tokens == 20
    outcome = worker.onboard(again, 300_000)
    assert (outcome.step, outcome.tokens) == (LoadStep.STARTED, 60)
    worker.settle()
    assert again.num_computed_tokens == 80
    assert worker.offload.counters.tiers[0].loads.bytes == 15 * BLOCK


def test_no_room_on_the_device_is_a_failed_allocation() -> None:
    worker = prepared(81)
    other = worker.run("other", range(500, 660), now=200_000)  # forty blocks of forty-nine
    again = worker.make("again", range(81))
    before = worker.manager.pool.free
    assert worker.onboard(again, 300_000).step is LoadStep.NO_ROOM
    assert worker.manager.pool.free == before and worker.manager.block_ids(again) == [[]]
    worker.settle()
    worker.finish(other, 400_000)
    assert worker.onboard(again, 400_000).step is LoadStep.STARTED


def test_terms_of_admission_hold_for_loads_too() -> None:
    worker = prepared(81)
    again = worker.make("again", range(250))
    assert worker.onboard(again, 300_000, must_fit=True).step is LoadStep.NO_ROOM  # 63 blocks never fit into 49
    small = worker.make("small", range(81))
    assert worker.onboard(small, 300_000, must_fit=True).step is LoadStep.STARTED


@pytest.mark.parametrize("how", ["finish", "preempt"])
def test_a_request_that_goes_while_it_loads_leaks_nothing(how: str) -> None:
    worker = prepared()
    request = worker.make("again", range(41))
    assert worker.onboard(request, 20_000).step is LoadStep.STARTED
    worker.offload.forget(request, 25_000)
    getattr(worker.manager, "free" if how == "finish" else "preempt")(request)
    worker.check()
    # The copy can't be called back: its blocks are written until it has landed.
    assert worker.manager.pool.free == 49 - 10
    assert worker.onboard(worker.make("other", range(41)), 25_000).step is LoadStep.STARTED
    assert worker.tick(30_000) == []
    assert worker.manager.pool.free == 49 - 10  # the other's
    assert worker.offload.counters.wasted_loads == 1
    if how == "preempt":
        assert worker.onboard(request, 30_000).step is LoadStep.WAITING  # its blocks are on the way for the other
    assert [ready.id for ready in worker.tick(50_000)] == ["other"]
    worker.finish(worker.manager.requests["other"], 50_000)
    worker.offload.forget(request, 50_000)
    worker.check()
    assert worker.manager.pool.free == 49 and worker.offload.tiers[0].store.pool.free == 100


def test_a_request_that_goes_while_it_is_stored_leaks_nothing() -> None:
    worker = Worker(tiers(offload_batch_size=3))
    request = worker.make("a", range(41))
    worker.compute(request, 0, 30)
    worker.offload.forget(request, 1_000)
    worker.manager.preempt(request)
    worker.check()
    worker.compute(request, 2_000)  # back again, with its own prefix hit
    worker.finish(request, 3_000)
    worker.settle()
    assert worker.held(Tier.G2) == 10 and worker.offload.counters.tiers[0].stores.blocks == 10
    assert worker.manager.pool.free == 49


# -- room in the host -------------------------------------------------------------------------------------------------


def test_a_cohort_that_finds_no_room_is_asked_again_when_something_lands() -> None:
    worker = Worker(tiers(host=12))
    worker.run("a", range(41), now=0)
    second = worker.run("b", range(100, 141), now=100)  # ten more, while ten of twelve are on their way
    assert worker.offload.counters.tiers[0].stores.submitted == 1 and worker.offload.counters.tiers[0].no_room == 1
    worker.tick(5_000)
    assert worker.offload.counters.tiers[0].no_room == 1  # nobody asks again before something has landed
    worker.tick(10_000)
    assert worker.offload.counters.tiers[0].stores.submitted == 2
    worker.settle()
    assert worker.held(Tier.G2) == 12 and worker.offload.tiers[0].store.evicted == 8
    assert worker.offload.quiet_until(second) == ENDLESS


def test_a_cohort_that_waits_for_room_is_forgotten_with_its_request() -> None:
    worker = Worker(tiers(host=12))
    worker.run("a", range(41), now=0)
    worker.finish(worker.run("b", range(100, 141), now=100), 200)
    worker.settle()
    assert worker.offload.counters.tiers[0].stores.submitted == 1


def test_stores_that_can_never_fit_are_refused_once() -> None:
    worker = Worker(tiers(host=9))
    request = worker.run("a", range(41), now=0)
    assert worker.offload.counters.refused == 1 and worker.offload.earliest_deadline() is None
    request.append([1])
    worker.compute(request, 1_000, 1)
    assert worker.offload.counters.refused == 1 and worker.offload.counters.tiers[0].no_room == 0


def test_sources_of_a_load_are_not_evicted() -> None:
    worker = prepared(41, host=12)
    again = worker.make("again", range(41))
    assert worker.onboard(again, 20_000).step is LoadStep.STARTED
    worker.run("b", range(100, 141), now=20_000)
    assert worker.offload.counters.tiers[0].no_room == 1 and worker.held(Tier.G2) == 10
    assert worker.tick(30_000) == [again]
    worker.settle()
    assert worker.held(Tier.G2) == 12


def test_a_match_makes_all_of_it_recent_also_what_the_device_has_itself() -> None:
    """Only the second half is loaded, but the first half was just as useful: what nobody matched goes first."""
    worker = Worker(tiers(host=20))
    for number, name in enumerate("ab"):
        worker.finish(
            worker.run(name, range(100 * number, 100 * number + 41), now=20_000 * number), 20_000 * number + 1
        )
        worker.settle()
    pool = worker.manager.pool
    pool.holds.end(pool.holds.take(pool.free - 15, 0))  # of the first one its five last blocks are gone
    again = worker.make("again", range(41))
    outcome = worker.onboard(again, 60_000)
    assert (outcome.step, outcome.tokens) == (LoadStep.STARTED, 20)
    worker.settle()
    worker.compute(again, 80_000)
    worker.finish(again, 80_001)
    worker.finish(worker.run("c", range(200, 241), now=90_000), 90_001)
    worker.settle()
    worker.evict_all()
    assert worker.onboard(worker.make("b", range(100, 141)), 120_000).step is LoadStep.NOTHING
    assert worker.onboard(worker.make("a", range(41)), 120_000).tokens == 40


def test_copied_blocks_are_released_in_reverse() -> None:
    """As a request lets go of its blocks: what it took last is the first to be evicted, here the second group's."""
    worker = Worker(
        tiers(), groups=[GroupSpec(block_size=4), GroupSpec(block_size=4, kind="sliding_window", window=64)]
    )
    worker.finish(worker.run("a", range(41), now=0), 1)
    worker.settle()  # only now the copy lets go
    pool = worker.manager.pool
    pool.holds.end(pool.holds.take(pool.free - 12, 0))
    worker.check()
    assert (worker.held(Tier.G1, 0), worker.held(Tier.G1, 1)) == (10, 2)


# -- storage ----------------------------------------------------------------------------------------------------------


def test_down_to_storage_and_back_through_the_host() -> None:
    worker = Worker(tiers(host=12, storage=50))
    worker.finish(worker.run("a", range(41), now=0), 1)
    assert worker.settle() == 20_000
    assert (worker.held(Tier.G2), worker.held(Tier.G3)) == (10, 10)
    worker.finish(worker.run("b", range(100, 141), now=20_000), 20_001)
    worker.settle()
    worker.evict_all()
    assert (worker.held(Tier.G2), worker.held(Tier.G3)) == (12, 20)  # two of the first are left in the host

    again = worker.make("again", range(41))
    waiting = worker.onboard(again, 50_000)
    assert (waiting.step, waiting.deadline) == (LoadStep.WAITING, 58_000)
    assert worker.manager.block_ids(again) == [[]]
    assert worker.tick(58_000) == [] and worker.held(Tier.G2) == 12
    started = worker.onboard(again, 58_000)
    assert (started.step, started.tokens, started.by_tier, started.deadline) == (LoadStep.STARTED, 40, (8, 32), 68_000)
    assert worker.tick(68_000) == [again]
    counters = worker.offload.counters
    assert (counters.tiers[1].loads.blocks, counters.tiers[0].loads.blocks, counters.tiers[1].stores.blocks) == (
        8,
        10,
        20,
    )
    worker.finish(again, 70_000)
    assert worker.offload.tiers[0].store.pool.free == 12


def test_fetched_blocks_are_held_for_their_request() -> None:
    worker = Worker(tiers(host=12, storage=50))
    worker.finish(worker.run("a", range(41), now=0), 1)
    worker.settle()
    worker.finish(worker.run("b", range(100, 141), now=20_000), 20_001)
    worker.settle()
    worker.evict_all()
    again = worker.make("again", range(41))
    assert worker.onboard(again, 50_000).step is LoadStep.WAITING
    worker.tick(58_000)
    # Others want to store while it is kept: they wait, or there would be no end to fetching.
    worker.run("c", range(200, 241), now=58_000)
    assert worker.offload.counters.tiers[0].no_room == 1
    assert worker.onboard(again, 59_000).step is LoadStep.STARTED
    assert worker.settle() > 69_000
    assert worker.offload.counters.tiers[1].loads.submitted == 1


def test_a_request_that_goes_while_it_is_fetched_leaves_a_warm_host() -> None:
    worker = Worker(tiers(host=12, storage=50))
    worker.finish(worker.run("a", range(41), now=0), 1)
    worker.settle()
    worker.finish(worker.run("b", range(100, 141), now=20_000), 20_001)
    worker.settle()
    worker.evict_all()
    again = worker.make("again", range(41))
    assert worker.onboard(again, 50_000).step is LoadStep.WAITING
    worker.finish(again, 55_000)
    worker.settle()
    assert worker.offload.tiers[0].store.pool.free == 12
    assert worker.onboard(worker.make("next", range(41)), 60_000).step is LoadStep.STARTED


# -- hybrid models ----------------------------------------------------------------------------------------------------


def test_each_group_brings_back_what_its_rule_needs() -> None:
    groups = [GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=10, block_size=4)]
    worker = Worker(tiers(), groups=groups)
    worker.finish(worker.run("a", range(81), now=0), 1)
    worker.settle()
    assert (worker.held(Tier.G2, 0), worker.held(Tier.G2, 1)) == (20, 20)
    worker.evict_all()
    again = worker.make("again", range(81))
    outcome = worker.onboard(again, 100_000)
    assert (outcome.step, outcome.tokens) == (LoadStep.STARTED, 80)
    worker.settle()
    assert worker.offload.counters.tiers[0].loads.blocks == 20 + 3  # ten tokens see nine before them: three blocks
    tables = worker.manager.block_ids(again)
    assert [sum(map(bool, table)) for table in tables] == [20, 3]


def test_a_state_comes_back_alone() -> None:
    groups = [GroupSpec(block_size=4), GroupSpec(kind="mamba", block_size=4)]
    worker = Worker(tiers(), groups=groups)
    request = worker.make("a", range(81))
    for now in (0, 1, 2):
        worker.compute(request, now, 40 if now < 2 else 1)
    worker.finish(request, 3)
    worker.settle()
    assert (worker.held(Tier.G2, 0), worker.held(Tier.G2, 1)) == (20, 2)  # a state per step
    worker.evict_all()
    again = worker.make("again", [*range(60), *range(90, 120)])
    outcome = worker.onboard(again, 100_000)
    assert (outcome.step, outcome.tokens) == (
        LoadStep.STARTED,
        40,
    )  # fifteen blocks are the same, but a state is at ten only
    worker.settle()
    assert worker.offload.counters.tiers[0].loads.blocks == 10 + 1
    worker.compute(again, 200_000)
    worker.finish(again, 300_000)


def test_a_full_prefix_is_not_enough_where_a_window_is_missing() -> None:
    groups = [GroupSpec(block_size=4), GroupSpec(kind="sliding_window", window=10, block_size=4)]
    worker = Worker(tiers(), groups=groups)
    worker.finish(worker.run("a", range(81), now=0), 1)
    worker.settle()
    worker.evict_all()
    store = worker.offload.tiers[0].store
    pages = sorted(page for group, _, page in store.pool.cached_blocks() if group == 1)
    store.pool.evict(pages)
    worker.check()
    assert worker.onboard(worker.make("again", range(81)), 100_000).step is LoadStep.NOTHING
