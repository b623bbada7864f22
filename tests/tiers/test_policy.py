"""Policies that wait: for the second use, or for the last moment."""

from __future__ import annotations

import pytest
from tests.tiers.support import Worker, tiers

from kvyard.blocks import Request
from kvyard.blocks.spec import ConfigError
from kvyard.clock import SECOND
from kvyard.events.types import Tier
from kvyard.tiers import LoadStep, Timeline

# -- after hits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", [2, 3])
def test_a_block_is_stored_by_its_nth_user(uses: int) -> None:
    worker = Worker(tiers(policy="after_hits", min_uses=uses))
    for user in range(1, uses + 1):
        # Twenty tokens in common, the rest each one's own.
        worker.finish(worker.run(f"r{user}", [*range(20), *[user] * 21], now=1_000 * user), 1_000 * user)
        worker.settle()
        assert worker.held(Tier.G2) == (5 if user == uses else 0)


def test_a_use_counts_once_however_many_passes_it_takes() -> None:
    worker = Worker(tiers(policy="after_hits"))
    request = worker.make("a", range(41))
    for now in range(4):
        worker.compute(request, now, 10)
    worker.settle()
    assert worker.held(Tier.G2) == 0


def test_old_uses_are_forgotten() -> None:
    worker = Worker(tiers(host=3, policy="after_hits"))  # remembers the uses of twelve blocks
    worker.finish(worker.run("a", range(9), now=0), 0)
    worker.finish(worker.run("b", range(100, 149), now=1), 1)  # twelve others
    worker.evict_all()
    worker.finish(worker.run("c", range(9), now=2), 2)
    assert worker.offload.earliest_deadline() is None
    worker.finish(worker.run("d", range(9), now=3), 3)
    worker.settle()
    assert worker.held(Tier.G2) == 2


# -- on eviction ------------------------------------------------------------------------------------------------------


def idle(ahead: int, *, on_unclean: str | None = None, host: int = 100) -> tuple[Worker, Request]:
    """Fifteen blocks, ten of them cached and free, and a request that wants nine."""
    worker = Worker(tiers(host, policy="on_eviction", offload_ahead=ahead, on_unclean=on_unclean), num_blocks=16)
    worker.finish(worker.run("a", range(41), now=0), 0)
    return worker, worker.make("b", range(100, 136))


def line(worker: Worker) -> list[int]:
    return list(worker.manager.pool.line())


def test_nothing_is_copied_before_it_nears_the_head() -> None:
    worker, _ = idle(5)
    worker.tick(1)  # five unnamed blocks stand in front: the first five of the line are clean
    assert worker.offload.earliest_deadline() is None and worker.offload.counters.tiers[0].stores.submitted == 0


def test_the_head_is_copied_ahead_and_goes_back_to_the_head() -> None:
    worker, _ = idle(8)
    before = line(worker)
    worker.tick(1)
    assert (
        worker.offload.counters.tiers[0].stores.submitted == 1 and worker.manager.pool.free == 12
    )  # three are out of the line
    assert line(worker) == before[:5] + before[8:]
    worker.tick(3_000)
    assert worker.manager.pool.free == 12
    worker.tick(3_001)
    assert line(worker) == before and worker.held(Tier.G2) == 3
    again = worker.make("again", range(41))
    assert worker.manager.lookup(again).tokens == 40  # all of it can still be hit
    assert worker.offload.make_clean(8, 4_000) is None
    assert worker.offload.counters.dropped_blocks == 0


def test_a_request_that_reaches_an_unclean_head_waits_for_it() -> None:
    worker, request = idle(1)
    deadline = worker.offload.make_clean(9, 1_000)
    assert deadline == 1_000 + 5_000  # four that are needed, and one ahead
    assert worker.offload.counters.unclean_waits == 1
    worker.check()
    assert worker.offload.make_clean(9, 2_000) == deadline or worker.manager.pool.free < 9
    worker.tick(6_000)
    assert worker.offload.make_clean(9, 6_000) is None
    worker.compute(request, 6_000)
    assert worker.offload.counters.dropped_blocks == 0 and worker.held(Tier.G2) >= 4
    again = worker.make("again", range(41))
    assert worker.manager.lookup(again).tokens == 24
    assert (
        worker.offload.tiers[0].store.resident(0, again.chain.keys, 10)[-1][1] == 10
    )  # what was given up is in the host


def test_or_drops_it() -> None:
    worker, request = idle(1, on_unclean="drop")
    assert worker.offload.make_clean(9, 1_000) is None
    assert worker.offload.counters.dropped_blocks == 0  # not before they are taken
    worker.compute(request, 1_000)
    worker.settle()
    assert worker.offload.counters.dropped_blocks == 4
    assert worker.held(Tier.G2) == 1  # the one ahead of it


def test_a_host_that_is_too_small_lets_blocks_go() -> None:
    worker, request = idle(1, host=2)
    assert worker.offload.make_clean(9, 1_000) is None
    worker.compute(request, 1_000)
    worker.tick(1_000)
    assert worker.offload.counters.dropped_blocks == 4


def test_cleaning_one_block_does_not_soil_another() -> None:
    """The host has room for all that is needed, but only if it doesn't give up what is clean already."""
    worker = Worker(tiers(12, policy="on_eviction", offload_ahead=1), num_blocks=31)
    for text in range(3):
        worker.finish(worker.run(f"r{text}", range(100 * text, 100 * text + 40), now=text), text)
    now = 10
    for needed in (6, 12):
        waits = 0
        while (wait := worker.offload.make_clean(needed, now)) is not None:
            now, waits = wait, waits + 1
            worker.tick(now)
            assert waits < 4, "no end to copying"
    assert worker.offload.counters.dropped_blocks == 0 and worker.held(Tier.G2) == 12


def test_a_copied_block_that_is_hit_stays_where_it_is_used() -> None:
    worker, _ = idle(15)
    worker.tick(1)
    again = worker.run("again", range(41), now=2)  # hit while all ten are being copied
    worker.settle()
    worker.finish(again, 50_000)
    assert worker.held(Tier.G2) == 10 and worker.manager.pool.free == 15


def test_an_allocation_that_needs_what_is_being_copied_waits_for_it() -> None:
    worker, _ = idle(15)
    worker.tick(1)
    assert worker.manager.pool.free == 5
    assert worker.offload.make_clean(9, 2) == 10_001
    assert worker.offload.make_clean(16, 2) is None  # more than there is: that allocation fails by itself


def test_two_copies_of_a_block_are_copied_once() -> None:
    worker = Worker(tiers(policy="on_eviction", offload_ahead=30), num_blocks=31)
    one, two = worker.make("one", range(17)), worker.make("two", range(17))
    for request in (one, two):  # both compute it, side by side
        assert worker.manager.allocate(request, 17) is not None
        request.num_computed_tokens, request.running = 17, True
    for request in (one, two):
        worker.finish(request, 1)
    worker.tick(2)
    worker.settle()
    assert worker.offload.counters.tiers[0].stores.blocks == 4 and worker.manager.pool.free == 30


def test_the_prefix_of_a_block_is_known_though_its_request_has_gone() -> None:
    """What stays cached keeps only its own stretch of a long chain. Its way to the root gives the rest back."""
    worker = Worker(tiers(400, policy="on_eviction", offload_ahead=300), num_blocks=301)
    text = list(range(1000))
    worker.finish(worker.run("long", text, now=0), 0)
    for name, common in (("x", 900), ("y", 904), ("z", 996)):
        worker.finish(worker.run(name, [*text[:common], *[ord(name)] * 30], now=1), 1)
    chains = [node.chain for node in worker.manager.pool.maps[0].nodes()]
    assert not all(chain.reaches(0) for chain in chains), "no chain was cut: the test tests nothing"
    worker.tick(2)
    worker.settle()
    assert worker.held(Tier.G2) == worker.held(Tier.G1)
    worker.evict_all()
    again = worker.make("again", [*text[:904], *[ord("y")] * 30])
    outcome = worker.onboard(again, 10**9)
    assert (outcome.step, outcome.tokens) == (LoadStep.STARTED, 932)


def test_more_ahead_than_the_host_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="offload_ahead 9 asks for more clean blocks than the host holds, 8"):
        Worker(tiers(8, policy="on_eviction", offload_ahead=9))
    Worker(tiers(8, policy="on_eviction"))  # what nobody asked for is kept to what there is


@pytest.mark.parametrize("host", [1, 3, 40, 63, 64, 100])
def test_cleaning_comes_to_an_end(host: int) -> None:
    """The line has more than the host can hold: copies of it must not push each other out for ever (I8)."""
    worker = Worker(tiers(host, policy="on_eviction"), num_blocks=83)
    for text in range(2):
        worker.finish(worker.run(f"r{text}", range(1000 * text, 1000 * text + 164), now=text), text)
    now = 2
    worker.tick(now)
    for _ in range(50):
        if (at := worker.offload.earliest_deadline()) is None:
            break
        now = at
        worker.tick(now)
    assert worker.offload.earliest_deadline() is None, "no end to copying"
    assert worker.held(Tier.G2) == worker.offload.counters.tiers[0].stores.blocks == min(host, 64)


@pytest.mark.parametrize("on_unclean", ["wait", "drop"])
@pytest.mark.parametrize("needed", [5, 30, 80])
@pytest.mark.parametrize("host", [2, 20, 100])
def test_so_does_cleaning_for_a_taker(host: int, needed: int, on_unclean: str) -> None:
    worker = Worker(tiers(host, policy="on_eviction", on_unclean=on_unclean), num_blocks=83)
    for text in range(8):
        worker.finish(worker.run(f"r{text}", range(1000 * text, 1000 * text + 40), now=text), text)
    now = 10
    for _ in range(20):
        worker.tick(now)
        wait = worker.offload.make_clean(needed, now)
        again = worker.offload.make_clean(needed, now)
        assert (wait is None) == (again is None), "asking twice changes the answer"
        if wait is None:
            break
        now = wait
    else:
        raise AssertionError("waits for ever")


def test_blocks_to_be_adopted_need_no_copy() -> None:
    """Ten blocks are cached and the host has none of them; a prompt that hits them takes the five without a name."""
    worker, _ = idle(1)
    again = worker.make("again", range(61))
    hit = worker.manager.lookup(again)
    assert hit.tokens == 40 and worker.offload.layout.demand(again, hit, 21) == 6
    other = worker.make("other", range(57))
    hit = worker.manager.lookup(other)
    assert worker.offload.layout.demand(other, hit, 17) == 5
    assert worker.offload.make_clean(5, 1_000, hit) is None
    assert worker.offload.counters.unclean_waits == 0
    worker.manager.allocate(other, 17, hit)
    worker.tick(1_001)
    assert worker.offload.counters.dropped_blocks == 0


def test_members_of_a_shared_host_clean_no_more_than_their_part() -> None:
    config = tiers(10, policy="on_eviction", host_keys={"scope": "shared"})
    timeline = Timeline()
    workers = [Worker(config, 31, name=f"w{at}", timeline=timeline) for at in range(2)]
    for at, worker in enumerate(workers):
        worker.finish(worker.run(f"r{at}", range(1000 * at, 1000 * at + 120), now=0), 0)
    now = 0
    for worker in workers:
        worker.tick(now)
    for _ in range(50):
        times = [at for worker in workers if (at := worker.offload.earliest_deadline()) is not None]
        if not times:
            break
        now = min(times)
        for worker in workers:
            worker.tick(now)
    else:
        raise AssertionError("no end to copying")
    assert [worker.offload.counters.tiers[0].stores.blocks for worker in workers] == [5, 5]


# -- lazy, exclusive, write-back --------------------------------------------------------------------------------------


def test_lazy_copies_ahead_by_what_was_taken_lately() -> None:
    """2.5 times the largest allocation, halved every 10 seconds; a taker never waits."""
    worker = Worker(tiers(policy="lazy"), num_blocks=101)
    cleaner = worker.offload._cleaner
    assert cleaner is not None and cleaner.ahead == 0, "nothing was taken yet"
    assert worker.offload.make_clean(8, 0) is None and cleaner.ahead == 20
    assert worker.offload.make_clean(2, 10 * SECOND) is None and cleaner.ahead == 10
    assert worker.offload.make_clean(30, 10 * SECOND) is None and cleaner.ahead == 75


def test_lazy_stores_nothing_while_the_device_has_room() -> None:
    """LMCache's first phase of #5172: an engine without pressure writes nothing, and one whose pool turns over does."""
    worker = Worker(tiers(policy="lazy"), num_blocks=101)
    for at in range(3):
        request = worker.make(f"r{at}", range(100 * at, 100 * at + 21))
        assert worker.offload.make_clean(6, at) is None
        worker.finish(worker.run(f"r{at}", range(100 * at, 100 * at + 21), at), at)
        assert request.num_tokens == 21
    worker.settle()
    assert worker.held(Tier.G2) == 0
    for at in range(3, 20):
        assert worker.offload.make_clean(15, 10_000 * at) is None
        worker.finish(worker.run(f"r{at}", range(100 * at, 100 * at + 57), 10_000 * at), 10_000 * at)
        worker.settle(10_000 * at)
    assert worker.held(Tier.G2) > 30 and worker.offload.counters.unclean_waits == 0


def test_an_exclusive_host_gives_up_what_it_loads() -> None:
    worker = Worker(tiers(policy="exclusive", offload_ahead=20), num_blocks=21)
    worker.finish(worker.run("a", range(41), now=0), 0)
    worker.tick(1)
    now = worker.settle(1)
    assert worker.held(Tier.G2) == 10, "all of it was copied ahead"
    worker.evict_all()
    again = worker.make("again", range(41))
    outcome = worker.onboard(again, now + 1)
    assert (outcome.step, outcome.tokens) == (LoadStep.STARTED, 40)
    assert worker.held(Tier.G2) == 10, "until it has come"
    assert worker.tick(now + 1 + 10_000) == [again]
    assert worker.held(Tier.G2) == 0 and worker.held(Tier.G1) == 10
    assert worker.offload.tiers[0].store.pool.free == 100


def test_an_exclusive_host_keeps_what_nobody_waits_for_any_more() -> None:
    worker = Worker(tiers(policy="exclusive", offload_ahead=20), num_blocks=21)
    worker.finish(worker.run("a", range(41), now=0), 0)
    worker.tick(1)
    now = worker.settle(1)
    worker.evict_all()
    again = worker.make("again", range(41))
    worker.onboard(again, now + 1)
    worker.finish(again, now + 2)
    worker.settle(now + 2)
    assert worker.held(Tier.G2) == 10


def test_write_back_spills_what_is_evicted_next() -> None:
    """Of a host of 20 blocks, 10 taken: a store of 8 has others spilled that 20 more would evict, the oldest first."""
    worker = Worker(tiers(20, 100, spill="on_eviction"), num_blocks=101)
    now = 0
    for at in range(2):
        worker.finish(worker.run(f"r{at}", range(100 * at, 100 * at + 21), now), now)
        now = worker.settle(now) + 1
    assert worker.held(Tier.G2) == 10 and worker.held(Tier.G3) == 3, "2.5 x 5 less the 10 without a name"
    worker.finish(worker.run("r2", range(200, 233), now), now)
    now = worker.settle(now) + 1
    # 2.5 x 8 less the 2 without a name are more than the 10 that were there before: all of these are copied on.
    assert worker.held(Tier.G2) == 18 and worker.held(Tier.G3) == 10
    worker.offload.check_integrity()
