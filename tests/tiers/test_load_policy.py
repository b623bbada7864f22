"""Load or compute: what policies choose, what a forecast says, and that what is left leaves no trace behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.blocks import BlockManager, ConfigError, GroupSpec, Request
from kvyard.hashing import TokenChain, algorithm
from kvyard.tiers import LoadStep, Offload, OffloadConfig, TierConfig
from kvyard.tiers.links import Direction, LaneConfig, LinkConfig, make_link
from kvyard.tiers.load_policy import LOADS, LeastTimeLoads, LoadOffer, LoadPolicy, LoadQuestion, ThresholdLoads

XXH3 = algorithm("xxh3", "tests")
MS = 10**6


def asked(
    *offers: tuple[int, int], hit: int = 0, prompt: int = 4096, in_flight: int = 0, backlog: int = 0
) -> LoadQuestion:
    """Offers as (tokens, milliseconds)."""
    made = [LoadOffer(at, tokens, lambda ms=ms: ms * MS) for at, (tokens, ms) in enumerate(offers, 1)]
    return LoadQuestion(made, hit, prompt, in_flight, backlog)


def test_always_loads_everything() -> None:
    assert LoadPolicy({}).choose(asked((16, 10**6), (32, 10**9))) == (1, "")


@pytest.mark.parametrize(
    ("tokens", "in_flight", "options", "choice"),
    [
        (1023, 0, {}, (-1, "small")),
        (1024, 7, {}, (0, "")),
        (1024, 8, {}, (-1, "busy")),
        (100, 8, {"tokens": 100, "in_flight": 9}, (0, "")),
    ],
)
def test_threshold(tokens: int, in_flight: int, options: dict[str, float], choice: tuple[int, str]) -> None:
    assert ThresholdLoads(options).choose(asked((tokens, 1), in_flight=in_flight)) == choice


@pytest.mark.parametrize(
    ("offers", "hit", "backlog", "taken"),
    [
        ([(4000, 300)], 0, 0, 0),  # 300 + 10 ms against 410
        ([(4000, 401)], 0, 0, -1),
        ([(4000, 401)], 0, 100, 0),  # computing has to wait for 10 ms
        ([(2000, 50), (4000, 100)], 0, 0, 1),
        ([(2000, 50), (4000, 400)], 0, 0, 0),  # the deeper tier is too slow
        ([(2000, 250), (4000, 350)], 0, 0, 1),
        ([(1000, 90)], 3000, 0, 0),
        ([(1000, 110)], 3000, 0, -1),
    ],
)
def test_least_time(offers: Any, hit: int, backlog: int, taken: int) -> None:
    policy = LeastTimeLoads({}, lambda tokens, past: tokens * MS // 10)
    assert policy.choose(asked(*offers, hit=hit, prompt=4100, backlog=backlog)) == (taken, "slower")


# -- the forecast -----------------------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from(["fair", "fifo"]))
@settings(max_examples=20)
def test_a_link_foresees_what_it_will_do(data: st.DataObject, discipline: str) -> None:
    lane = LaneConfig(bandwidth=10**9, first_byte_ns=data.draw(st.sampled_from([0, 50_000])))
    link = make_link(LinkConfig(discipline=discipline, outward=lane, inward=lane))
    now = 0
    in_flight = []
    for _ in range(data.draw(st.integers(0, 6))):
        now += data.draw(st.integers(0, 3 * MS))
        direction = data.draw(st.sampled_from(list(Direction)))
        in_flight.append(link.submit(now, direction, data.draw(st.integers(1, 10**7)), "a"))
    expected = link.foresee(now, Direction.IN, 4_000_000, "b", 3)
    landings = {transfer: link.foresee_landing(transfer) for transfer in in_flight if transfer.ended is None}
    link.check_integrity()
    assert {transfer: link.foresee_landing(transfer) for transfer in landings} == landings, "asking changes nothing"
    if data.draw(st.booleans()):
        mine = link.submit(now, Direction.IN, 4_000_000, "b", 3)
        link.advance(now + 10**12)
        assert mine.ended == expected
    else:
        link.advance(now + 10**12)
        assert {transfer: transfer.ended for transfer in landings} == landings


# -- a worker ---------------------------------------------------------------------------------------------------------


def worker(policy: str = "always", gbps: float = 1.0, storage: bool = False, **options: Any) -> Offload:
    """Blocks of 16 tokens and a megabyte, 40 on the device; computing takes 0.1 ms a token."""
    lane = LaneConfig(bandwidth=int(gbps * 10**9))
    slow = LaneConfig(bandwidth=int(gbps * 10**8))
    tiers = [TierConfig(num_blocks=60 if storage else 200, link=LinkConfig(outward=lane, inward=lane))]
    if storage:
        tiers.append(TierConfig(num_blocks=400, link=LinkConfig(outward=lane, inward=slow)))
    config = OffloadConfig(tiers=tuple(tiers), load_policy=policy, load_options=options)
    manager = BlockManager(41, [GroupSpec(block_size=16)])
    return Offload(manager, config, block_bytes=10**6, prefill_ns=lambda tokens, past: tokens * MS // 10)


def prompt(name: str, family: int) -> Request:
    return Request(name, TokenChain([family * 1000 + at for at in range(513)], 16, XXH3))


def compute(offload: Offload, request: Request, now: int) -> None:
    """Compute all of it at once and let it go."""
    manager = offload.manager
    hit = manager.lookup(request)
    assert manager.allocate(request, request.num_tokens - hit.tokens, hit) is not None
    request.num_computed_tokens = request.num_tokens
    offload.offload(request, now)
    offload.forget(request, now)
    manager.free(request)


def with_prompts(offload: Offload, *families: int) -> int:
    """Have ``families`` computed and stored; returns the time."""
    now = 0
    for family in families:
        compute(offload, prompt(f"p{family}", family), now)
        now += 2000 * MS
        offload.tick(now)
    return now


def ask(offload: Offload, request: Request, now: int, backlog: int = 0) -> tuple[LoadStep, int]:
    answer = offload.onboard(request, offload.manager.lookup(request), now, backlog=backlog)
    offload.check_integrity()
    return answer.step, answer.left


def test_unloaded_tokens_are_computed_and_counted_at_the_start() -> None:
    offload = worker("threshold", tokens=1000)
    now = with_prompts(offload, 1, 2)
    offload.manager.reset()
    request = prompt("again", 1)
    assert ask(offload, request, now) == (LoadStep.NOTHING, 512)
    assert ask(offload, request, now) == (LoadStep.NOTHING, 512), "asked again, the answer is the same"
    counters = offload.counters
    assert counters.left_requests == counters.hits == 0
    assert offload.admitted(request) == 512
    assert offload.admitted(request) == 0
    compute(offload, request, now)
    assert (counters.left_requests, counters.left_tokens, counters.hits) == (1, {"small": 512}, 0)
    assert not offload.state.requests
    offload.check_integrity()


def test_too_many_at_a_time() -> None:
    offload = worker("threshold", tokens=100, in_flight=1)
    now = with_prompts(offload, 1, 2, 3)
    offload.manager.reset()
    assert ask(offload, prompt("a", 1), now) == (LoadStep.STARTED, 0)
    late = prompt("b", 2)
    assert ask(offload, late, now) == (LoadStep.NOTHING, 512)
    done = now + 100 * MS
    (first,) = offload.tick(done)
    assert first.num_computed_tokens == 512
    offload.forget(first, done)
    offload.manager.free(first)
    assert ask(offload, late, done) == (LoadStep.STARTED, 0), "now there is room for another"


def test_a_crowded_link_is_left_alone() -> None:
    """A load takes 32 ms, computing 51: the second of two at a time would take 64."""
    offload = worker("least-time")
    now = with_prompts(offload, 1, 2)
    offload.manager.reset()
    assert ask(offload, prompt("a", 1), now) == (LoadStep.STARTED, 0)
    assert ask(offload, prompt("b", 2), now) == (LoadStep.NOTHING, 512)
    assert ask(offload, prompt("c", 2), now, backlog=200) == (LoadStep.NO_ROOM, 0), "it would load, but for the device"


def test_of_a_slow_storage_only_what_the_host_has_is_loaded() -> None:
    """The host has lost the tail of a prompt. From storage it would take longer than computing it."""
    offload = worker("least-time", storage=True)
    now = with_prompts(offload, 1, 2)
    offload.manager.reset()
    keys = prompt("x", 1).view(16).keys
    assert offload.tiers[0].store.resident(0, keys, 32) == [(0, 28)]
    assert offload.tiers[1].store.resident(0, keys, 32) == [(0, 32)]
    request = prompt("again", 1)
    assert ask(offload, request, now) == (LoadStep.STARTED, 64)
    offload.tick(now + 100 * MS)
    assert request.num_computed_tokens == 448
    assert offload.admitted(request) == 64 and offload.counters.left_tokens == {"slower": 64}


def test_a_fetch_that_comes_too_late_is_left() -> None:
    """It waits for storage; then the engine is idle, and computing is quicker than what is left of the wait."""
    offload = worker("least-time", storage=True)
    now = with_prompts(offload, 1, 2, 3)
    offload.manager.reset()
    request = prompt("again", 1)
    assert ask(offload, request, now, backlog=100_000) == (LoadStep.WAITING, 0)
    record = offload.state.requests[request]
    assert record.fetch is not None
    compute(offload, prompt("other", 9), now)  # something lands in between
    later = now + 40 * MS
    offload.tick(later)
    assert record.fetch is not None, "still on its way"
    assert ask(offload, request, later) == (LoadStep.NOTHING, 512)
    assert record.fetch is None and not record.keep
    compute(offload, request, later)
    offload.tick(later + 5000 * MS)
    offload.check_integrity()
    assert not any(tier.store.pool.holds.tables for tier in offload.tiers)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    tiers = (TierConfig(num_blocks=9),)
    with pytest.raises(ConfigError, match="unknown load policy 'x': choose one of always, least-time, threshold"):
        OffloadConfig(tiers=tiers, load_policy="x")
    with pytest.raises(
        ConfigError, match="unknown option 'x' of the load policy threshold: choose one of tokens, in_flight"
    ):
        OffloadConfig(tiers=tiers, load_policy="threshold", load_options={"x": 1})
    with pytest.raises(ConfigError, match="unknown option 'x' of the load policy always: it has none"):
        OffloadConfig(tiers=tiers, load_options={"x": 1})
    with pytest.raises(ConfigError, match="tokens of the load policy threshold must be at least 0, got -1"):
        OffloadConfig(tiers=tiers, load_policy="threshold", load_options={"tokens": -1})
    with pytest.raises(ConfigError, match="load_policy least-time weighs loading against computing: pass prefill_ns"):
        Offload(BlockManager(9), OffloadConfig(tiers=tiers, load_policy="least-time"), block_bytes=1)
    assert LOADS.names() == ["always", "threshold", "least-time"]
