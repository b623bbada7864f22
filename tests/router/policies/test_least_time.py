"""Least time: against a slow model of the rule, in scenes where each term decides, and through the router."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from tests.router.policies.scene import SIZE, Scene, Steady, pick, policy

from kvyard.clock import MS
from kvyard.engine.config import EngineConfig
from kvyard.index import Holder
from kvyard.router import Choice, Router, RouterConfig, RouteRequest
from kvyard.router.pace import PEAK_TOKENS_PER_S, LearntPace, Pace, PaceBook, RelativePace, engine_pace, pairs_of
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.links.config import LaneConfig, LinkConfig


def slow(scene: Scene, interference: float = 0.2, stickiness: float = 1.0, blocking: float = 0.02) -> set[int]:
    """The rule of the module's first lines, written out for a router that has routed nothing yet; all workers it allows."""
    routing, tokens = scene.routing, scene.routing.num_tokens
    workers = routing.workers
    usual = max(1.0, sum(worker.requests for worker in workers) / len(workers))
    cached, room, beyond = {}, {}, {}
    for slot, worker in enumerate(workers):
        cached[slot], room[slot], beyond[slot] = min(sum(routing.tiers(slot)) * SIZE, tokens - 1), 0.0, 0
        others = worker.blocks - scene.shared[slot]
        capacity = worker.pace.capacity
        if worker.requests and capacity is not None and others + routing.blocks > capacity:
            cached[slot] = max(0, min(cached[slot], (capacity - others) * SIZE))
            room[slot] = routing.mean_age_ms(worker)
            beyond[slot] = min(tokens, (others + routing.blocks - capacity) * SIZE)
    kept = max((cached[slot] for slot in cached if not beyond[slot]), default=0)
    used = min(kept, max(scene.shared) * SIZE)
    costs = {}
    for slot, worker in enumerate(workers):
        waiting, pace, requests = worker.prefill_tokens, worker.pace, worker.requests

        def alone(have: int, pace: Pace = pace) -> float:
            return pace.prefill(tokens - have) + pace.past(tokens - have, have)

        own = alone(cached[slot])
        elapsed = (routing.now - worker.computing_since) / MS if waiting else 0.0
        wait = max(0.0, pace.prefill(waiting) + worker.past_ms - elapsed)  # a steady pace: no cost of a pass itself
        wait += pace.passes(waiting + tokens - cached[slot]) * pace.step(requests, worker.blocks * SIZE)
        wait = max(wait, pace.load(routing.tiers(slot)[1:]))
        lost = max(0.0, alone(max(cached[slot], used)) - alone(kept)) if cached[slot] < kept else 0.0
        lost += alone(tokens - beyond[slot])
        costs[slot] = wait + room[slot] + own + interference * own * requests / usual + stickiness * lost
        costs[slot] += blocking * own * (own / 1000) * requests
    return {slot for slot in costs if costs[slot] == pytest.approx(min(costs.values()), abs=1e-6)}


def test_it_is_the_rule_over_random_scenes() -> None:
    rng = Random(4)
    for _ in range(600):
        count = 3
        scene = Scene(
            prefill=[rng.choice((0, rng.randrange(4000))) for _ in range(count)],
            requests=[rng.randrange(6) for _ in range(count)],
            held=[rng.randrange(1000) for _ in range(count)],
            cached=[rng.choice((0, rng.randrange(120))) for _ in range(count)],
            host=rng.choice((None, [rng.randrange(300) for _ in range(count)])),
            shared=rng.choice((None, [rng.choice((0, rng.randrange(60))) for _ in range(count)])),
            ages=[rng.randrange(1, 5000) for _ in range(count)],
            tokens=rng.randrange(1, 3000),
            now=6000 * MS,
            since=rng.randrange(4000, 6000) * MS,
            paces=[Steady(rng.choice((0.5, 1.0, 3.0)), per_pair=rng.choice((0.0, 1e-4))) for _ in range(count)],
            seed=rng.randrange(99),
        )
        assert scene.choice(policy("least-time")).slot in slow(scene)


def test_a_second_long_prompt_goes_behind_the_first_and_leaves_the_rest_of_the_fleet_to_others() -> None:
    """Worker 0 computes a prompt that takes 40 s and has no other request; 10 decode on each of the others."""
    burst = {"prefill": (40_000, 0, 0), "requests": (1, 10, 10), "tokens": 40_000}
    assert pick("least-time", **burst) == 0
    assert pick("least-time", options={"blocking": 0.0}, **burst) != 0
    assert pick("least-time", **{**burst, "tokens": 400}) != 0


def test_prefill_done_meanwhile_counts() -> None:
    assert pick("least-time", prefill=(900, 1000, 2000)) == 0
    scene = Scene(prefill=(900, 1000, 2000), now=500 * MS)
    scene.routing.workers[0].computing_since = 450 * MS
    assert scene.choice(policy("least-time")).slot == 1


def test_a_copy_stays_in_one_place_unless_that_takes_too_long() -> None:
    holder = {"cached": (70, 0, 0)}  # 1120 tokens: computing them again takes 1120 ms
    assert pick("least-time", **holder, prefill=(2240, 0, 0)) == 0
    assert pick("least-time", **holder, prefill=(2241, 0, 0)) != 0
    assert pick("least-time", {"stickiness": 0.0}, **holder, prefill=(1121, 0, 0)) != 0


def test_blocks_in_use_by_others_may_have_a_second_copy() -> None:
    holder = {"cached": (70, 0, 0), "prefill": (1400, 0, 0)}
    assert pick("least-time", **holder) == 0
    assert pick("least-time", **holder, shared=(60, 0, 0)) != 0


def test_a_prompt_that_does_not_fit_waits_as_long_as_those_there_have_been_there() -> None:
    # Worker 0 has all but the last 16 of 1600 tokens; computing them takes 1584 ms.
    full = {"cached": (99, 0, 0), "requests": (1, 0, 0), "held": (950, 0, 0), "now": 9000 * MS}
    assert pick("least-time", **full | {"held": (900, 0, 0)}, ages=(5000,)) == 0  # it fits
    # Half of what is cached gives way to the other one, so 800 tokens are computed here and 1600 elsewhere, with a fifth of
    # them for the other's sake. There is no copy to keep; but half of the prompt would be computed once more next time.
    assert pick("least-time", {"stickiness": 0.0}, **full, ages=(600,)) == 0
    assert pick("least-time", {"stickiness": 0.0}, **full, ages=(700,)) != 0
    assert pick("least-time", **full, ages=(1,)) != 0


def test_attention_to_what_is_cached_takes_its_time() -> None:
    paces = [Steady(per_pair=0.002)] * 3
    scene = Scene(cached=(50, 0, 0), prefill=(0, 0, 0), paces=paces)  # 800 of 1600: 800 ms, and 1280 for their past
    costs = scene.costs(policy("least-time"))
    assert costs[0] == pytest.approx(800 + 1280)
    scene.routing.workers[0].prefill_tokens, scene.routing.workers[0].past_ms = 10, 500.0
    assert scene.costs(policy("least-time"))[0] == pytest.approx(800 + 1280 + 10 + 500)


def test_of_equals_the_one_with_less_new_content_is_taken() -> None:
    one = policy("least-time")
    chosen = [Scene(seed=number, now=number).choice(one).slot for number in range(9)]
    assert all(chosen.count(slot) == 3 for slot in range(3))
    one.gone(2)
    assert Scene(now=10).choice(one).slot == 2  # another worker's number now
    later = [
        Scene(now=(10 + number) * 40_000_000 * MS).choice(one).slot for number in range(6)
    ]  # all is long ago each time
    assert len(later) == 6


def test_the_guard_may_choose_before_it_did() -> None:
    one, scene = policy("least-time"), Scene()
    one.routed(scene.routing, Choice(2, 0.0, 1, "guard"))
    assert scene.choice(one).slot != 2


def test_a_load_that_takes_longer_than_computing_is_what_counts() -> None:
    # All of it is in a lower tier, and comes in at a millisecond a block; 99 blocks, or 1600 tokens.
    assert pick("least-time", cached=(0, 0, 0), host=(99, 0, 0)) == 0
    # The same with workers that compute a token in 0.05 ms: 80 ms, which is sooner than 99. The copy's worth is 0.05 * 1584.
    fast = [Steady(0.05)] * 3
    assert pick("least-time", {"stickiness": 0.1}, host=(99, 0, 0), paces=fast) != 0


def test_slower_workers_get_less() -> None:
    assert pick("least-time", prefill=(400, 0, 3000), paces=[Steady(1.0), Steady(2.0), Steady(1.0)]) == 0


def test_a_router_that_knows_nothing_learns_who_is_slow() -> None:
    config = RouterConfig(policy="least-time", block_size=SIZE)
    from kvyard.hashing import algorithm
    from kvyard.index import Identity

    router = Router(config, ["slow", "fast"], Identity(SIZE, algorithm("xxh3", "test", {}), direct=True), seed=3)
    now, chosen = 0, []
    for number in range(300):
        tokens = 500 + 37 * (number % 20)
        decision = router.route(RouteRequest(number, [], tokens), now, known={})
        took = tokens * (4 * MS if decision.worker.name == "slow" else MS)
        router.prefill_done(number, now + took)
        router.finished(number, now + took)
        now += took
        chosen.append(decision.worker.name)
    assert {*chosen[:40]} == {"slow", "fast"} and chosen[-200:].count("slow") < 10  # tried again now and then
    fast = router.pace(Holder("fast"))
    assert fast.prefill(1000) == pytest.approx(1000, rel=0.1)


def test_whole_answers_teach_nothing_about_first_tokens() -> None:
    from kvyard.hashing import algorithm
    from kvyard.index import Identity

    identity = Identity(SIZE, algorithm("xxh3", "test", {}), direct=True)
    router = Router(RouterConfig(policy="least-time", block_size=SIZE), ["a"], identity)
    for number in range(50):
        router.route(RouteRequest(number, [], 1000), 0, known={})
        router.prefill_done(number, 8000 * MS, seen=False)
        router.finished(number, 8000 * MS)
    assert router.pace(Holder("a")).prefill(15_928) == pytest.approx(1000.0)


class TestLearntPace:
    def test_it_starts_as_llm_d_does(self) -> None:
        assert LearntPace().prefill(15_928) == pytest.approx(1000.0)
        assert LearntPace(2000).prefill(1000) == pytest.approx(500.0)
        assert PEAK_TOKENS_PER_S == 15_928

    def test_it_finds_the_line_and_follows_a_change(self) -> None:
        rng = Random(1)
        pace = LearntPace()
        for fixed, per_token in ((40.0, 0.1), (10.0, 0.3)):
            for _ in range(600):
                tokens = rng.randrange(100, 9000)
                pace.observe(tokens, (fixed + per_token * tokens) * rng.uniform(0.95, 1.05))
            assert pace.prefill(4000) == pytest.approx(fixed + per_token * 4000, rel=0.05)

    def test_it_finds_what_attention_takes(self) -> None:
        rng = Random(2)
        pace = LearntPace()
        for _ in range(600):
            tokens, cached = rng.randrange(100, 9000), rng.choice((0, 5000, 60_000))
            pairs = pairs_of(tokens, cached)
            pace.observe(tokens, (20 + 0.03 * tokens + 4e-7 * pairs) * rng.uniform(0.95, 1.05), pairs)
        for tokens, cached in ((500, 0), (500, 60_000), (8000, 0), (8000, 60_000)):
            taken = 20 + 0.03 * tokens + 4e-7 * pairs_of(tokens, cached)
            assert pace.prefill(tokens) + pace.past(tokens, cached) == pytest.approx(taken, rel=0.15), (tokens, cached)

    def test_a_stall_does_not_spoil_it(self) -> None:
        pace = LearntPace()
        for number in range(300):
            pace.observe(1000 + number, 0.1 * (1000 + number))
        pace.observe(1000, 500_000.0)
        assert pace.prefill(1000) < 250

    def test_nonsense_is_left_out(self) -> None:
        pace = LearntPace()
        for tokens, ms in ((0, 5.0), (-1, 5.0), (10, -1.0), (10, float("inf")), (10, float("nan"))):
            pace.observe(tokens, ms)
        assert pace.prefill(15_928) == pytest.approx(1000.0)

    def test_one_length_alone_gives_its_own_time(self) -> None:
        pace = LearntPace()
        for _ in range(2000):
            pace.observe(1000, 300.0)
        assert pace.prefill(1000) == pytest.approx(300, rel=0.02) and pace.prefill(2000) > pace.prefill(1000)


@pytest.mark.source  # reads figures of a class that is compiled
class TestPaceBook:
    def test_one_that_was_slow_once_gets_another_chance(self) -> None:
        book = PaceBook()
        for slot in range(3):
            book.put(slot, None)
        for number in range(60):
            book.observe(number % 3, 1000, 50.0 if number % 3 else 400.0, 500_000)  # a cold start, say
        assert book.all[0].prefill(1000) > 2 * book.all[1].prefill(1000)
        for number in range(RelativePace.TRIAL + 3):
            book.observe(1 + number % 2, 1000, 50.0, 500_000)
        for _ in range(5):
            assert book.all[0].prefill(1000) == pytest.approx(book.all[1].prefill(1000), rel=0.1)
            book.observe(0, 1000, 50.0, 500_000)

    def test_one_that_is_still_slow_is_tried_ever_less(self) -> None:
        """One first token is enough to see it, and in the end it is one in two hundred."""
        book = PaceBook()
        for slot in range(3):
            book.put(slot, None)
        for number in range(60):
            book.observe(number % 3, 1000, 50.0 if number % 3 else 400.0, 500_000)
        tried: list[int] = []
        for number in range(1200):
            slow = book.all[0].prefill(1000) > 2 * book.all[1].prefill(1000)
            if not slow:
                tried.append(number)
            book.observe(1 + number % 2 if slow else 0, 1000, 50.0 if slow else 400.0, 500_000)
        waits = [after - before for before, after in pairwise(tried)]
        assert waits[0] < 25 and waits == sorted(waits)
        assert RelativePace.FORGOTTEN < waits[-1] < RelativePace.FORGOTTEN + 5

    def test_differences_within_chance_count_for_nothing(self) -> None:
        """On a busy machine times to first token are anything between a third and three times the usual."""
        rng, book, worst = Random(4), PaceBook(), 1.0
        for slot in range(4):
            book.put(slot, None)
        for number in range(2000):
            book.observe(number % 4, 1000, 50.0 * rng.lognormvariate(0, 0.7), 500_000)
            if number > 100:
                times = [pace.prefill(1000) for pace in book.all]
                worst = max(worst, max(times) / min(times))
        assert worst < 1.5

    @pytest.mark.parametrize("slower", [0.5, 2.0, 3.0])
    def test_a_difference_is_learnt_through_noise(self, slower: float) -> None:
        rng, book = Random(5), PaceBook()
        for slot in range(4):
            book.put(slot, None)
        for number in range(400):
            ms = 50.0 * rng.lognormvariate(0, 0.3)
            book.observe(number % 4, 1000, ms * slower if number % 4 == 2 else ms, 500_000)
        others = sum(book.all[slot].prefill(1000) for slot in (0, 1, 3)) / 3
        assert book.all[2].prefill(1000) / others == pytest.approx(slower, rel=0.3)

    def test_who_joins_starts_as_the_usual_one_and_a_given_pace_stays(self) -> None:
        book, given = PaceBook(), Steady()
        book.put(0, None)
        for _ in range(300):
            book.observe(0, 1000, 50.0, 500_000)
        book.put(1, None)
        assert book.all[1] is not book.all[0]
        assert book.all[1].prefill(1000) + book.all[1].past(1000, 0) == pytest.approx(50, rel=0.2)
        book.put(1, given)
        for _ in range(2 * RelativePace.FORGOTTEN):
            book.observe(0, 1000, 50.0, 500_000)
        assert book.all[1] is given


class TestModelPace:
    def test_it_is_the_sum_of_the_engine_s_own_passes(self) -> None:
        from kvyard.engine.timing import make_timing

        config = EngineConfig(max_num_batched_tokens=2048)
        timing, pace = make_timing(config.timing, config.capacity_tokens), engine_pace(config)
        for tokens in (1, 100, 256, 700, 2047, 2048, 2049, 10_000):
            full, rest = divmod(tokens, 2048)
            ns = full * timing.pass_ns([(2048, 0)], 0, 0, 0) + (timing.pass_ns([(rest, 0)], 0, 0, 0) if rest else 0)
            assert pace.prefill(tokens) == pytest.approx(ns / MS, rel=0.005), tokens
            assert pace.passes(tokens) == full + bool(rest)
        assert pace.prefill(0) == 0 and pace.capacity == config.num_gpu_blocks
        assert pace.step(4, 4000) == timing.pass_ns((), 4, 4000, 1000) / MS

    def test_cached_tokens_add_the_time_of_the_engines_passes(self) -> None:
        from kvyard.engine.timing import make_timing
        from kvyard.engine.timing.profile import ProfileTiming

        config = EngineConfig(max_num_batched_tokens=2048, timing=ProfileTiming(name="h200-llama3-8b"))
        timing, pace = make_timing(config.timing, config.capacity_tokens), engine_pace(config)
        for tokens, cached in ((256, 0), (1024, 4096), (2048, 65_536), (10_240, 1024)):
            ns = done = 0
            while done < tokens:
                part = min(2048, tokens - done)
                ns += timing.pass_ns([(part, cached + done)], 0, 0, 0)
                done += part
            assert pace.prefill(tokens) + pace.past(tokens, cached) == pytest.approx(ns / MS, rel=0.01), tokens
        assert engine_pace(EngineConfig()).past(4096, 65_536) == 0  # the polynomial doesn't know of it

    def test_loads_go_by_their_links(self) -> None:
        lane = LaneConfig(bandwidth=10**9, first_byte_ns=5 * MS)
        host = TierConfig(num_blocks=100, link=LinkConfig(inward=lane, duplex_bandwidth=5 * 10**8))
        disk = TierConfig(num_blocks=100)
        config = EngineConfig(bytes_per_block=10**6, tiers=OffloadConfig(tiers=(host, disk)))
        pace = engine_pace(config)
        assert pace.load((3, 0)) == pytest.approx(5 + 3 * 2)  # 2 ms each at half a gigabyte a second
        assert pace.load((0, 0)) == 0 and pace.load((0, 7)) == 0
