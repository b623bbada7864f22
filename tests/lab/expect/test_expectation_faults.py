"""Faults that are put into an engine or its traffic: each is named first. Healthy engines: none is flagged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest
from msgspec.structs import replace
from tests.lab.expect.support import ONE, conversations, counters, counts, documents, engine, traffic, with_date

from kvyard.lab.expect import difference, expect
from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.owed import Replayed, replay_traffic
from kvyard.lab.expect.traffic import MediaItem, Traffic
from kvyard.replay.traces import TraceRequest

FLEET = {**ONE, "workers": 4, "router": "kv"}
TIGHT = {**ONE, "num_gpu_blocks": 128}
TIERED = {**TIGHT, "host_blocks": 8192}


def named(rows: list[TraceRequest], settings: dict[str, object], counted: Counted | None = None, **more: object) -> str:
    found = expect(traffic(rows), settings, counted, **more)  # type: ignore[arg-type]
    assert found.flagged == bool(found.sentence)
    return found.cause


# -- the ten faults -------------------------------------------------------------------------------------------------------


def test_block_size_configured_wrongly() -> None:
    rows = conversations()
    for told, real in ((16, 64), (16, 256), (64, 16)):
        mine, theirs = {**ONE, "block_size": told}, {**ONE, "block_size": real, "num_gpu_blocks": 2048}
        found = expect(traffic(rows), mine, counts(rows, theirs))
        assert found.cause == "block-size" and f"blocks of {real} tokens" in found.sentence
        assert named(rows, mine, counters(rows, theirs, block_size=real)) == "block-size", "as its metrics report"
    coarse = {**ONE, "block_size": 256, "num_gpu_blocks": 512}
    assert named(rows, ONE, counters(rows, coarse)) == "block-size", "sums alone"


def test_salt_per_request() -> None:
    salted = [replace(row, salt=row.id) for row in conversations()]
    assert named(salted, ONE) == "salts"
    assert named(salted, ONE, counts(salted, ONE)) == "salts", "the engine does as it should"
    plain = conversations()
    unseen = counts(salted, ONE, enable_prefix_caching=True)
    assert named(plain, ONE, unseen) == "never-shared", "the trace doesn't have the salts"


def test_date_in_the_system_prompt() -> None:
    rows = conversations()
    dated = with_date(rows)
    assert named(dated, ONE) == "changing-text"
    found = expect(traffic(dated), ONE, counts(dated, ONE))
    assert found.cause == "changing-text" and not found.fault and "part after 20 tokens" in found.sentence
    late = with_date(rows, at=200)
    unseen = expect(traffic(rows), ONE, counts(late, ONE))
    assert unseen.cause == "changing-text" and unseen.fault and "token 192" in unseen.sentence


def test_date_in_a_recording_shows_by_its_sessions() -> None:
    rows = [
        TraceRequest(
            f"{session}.{turn}",
            (turn * 10 + session) * 10**9,
            1600 + 320 * turn,
            4,
            ids=[1, *(10_000 * session + 1000 * turn + at + 2 for at in range(99 + 20 * turn))],
            id_block_size=16,
            session=f"s{session}",
        )
        for turn in range(4)
        for session in range(8)
    ]
    assert named(rows, ONE) == "changing-text"


def test_events_are_off() -> None:
    rows = documents(120, kinds=21)
    assert named(rows, FLEET, counts(rows, {**FLEET, "router": "round-robin"})) == "events-off"


def test_hash_seed_differs_by_worker() -> None:
    rows = documents(120, kinds=21)
    blind = counts(rows, {**FLEET, "router": "round-robin"})
    assert named(rows, FLEET, blind, evidence={"hash-seed"}) == "hash-seed"
    assert named(rows, FLEET, counts(rows, FLEET), evidence={"hash-seed"}) == "hash-seed", "even where it costs nothing"
    assert named(rows, FLEET, evidence={"hash-seed"}) == "hash-seed", "without counts"


def test_tier_that_stores_and_never_loads() -> None:
    rows = conversations()
    assert engine(rows, TIERED).loaded
    assert named(rows, TIERED, counts(rows, TIGHT)) == "store-only"
    assert named(rows, TIERED, counters(rows, TIGHT)) == "store-only"


def test_pool_that_is_too_small() -> None:
    rows = conversations(user=300)
    assert named(rows, TIGHT) == "pool"
    assert named(rows, TIGHT, counts(rows, TIGHT)) == "pool"
    smaller = expect(traffic(rows), ONE, counts(rows, {**ONE, "num_gpu_blocks": 500}))
    assert smaller.cause == "pool" and smaller.fault
    told = expect(traffic(rows), ONE, counters(rows, TIGHT, num_gpu_blocks=129))
    assert told.cause == "pool" and "128 blocks" in told.sentence


def test_adapter_per_request() -> None:
    rows = [replace(row, lora=f"adapter{at}") for at, row in enumerate(conversations())]
    assert named(rows, ONE) == "adapters"
    assert named(rows, ONE, counts(rows, ONE)) == "adapters"


def pictures(same: bool) -> Traffic:
    """Prompts with an image after 64 tokens."""
    found = traffic([])
    for row in conversations():
        tokens = [*(row.tokens or ())[:64], *[7] * 64, *(row.tokens or ())[64:]]
        key = 10**12 if same else 10**12 + len(found.requests)
        seen = [*tokens[:64], *[key] * 64, *tokens[128:]]
        found.requests.append(replace(row, tokens=seen, input_length=len(seen)))
        found.media[row.id], found.texts[row.id] = (MediaItem(64, 64, "x" if same else row.id),), tokens
    return found


def test_images() -> None:
    assert expect(pictures(same=False), ONE).cause == "media"
    assert expect(pictures(same=True), ONE).cause == ""
    new_keys = counts(pictures(same=False).requests, ONE)
    unseen = expect(pictures(same=True), ONE, new_keys)
    assert unseen.cause == "media" and unseen.fault


def test_several_choices() -> None:
    rows = conversations()
    every = [choice for row in rows for choice in (row, replace(row, id=f"{row.id}#2"), replace(row, id=f"{row.id}#3"))]
    counted = counters(every, ONE)
    assert named(rows, ONE, counted) == "choices"
    assert named(every, ONE, counted) == "", "with n in the trace"


# -- others ---------------------------------------------------------------------------------------------------------------


def test_caching_is_off() -> None:
    rows, off = conversations(), {**ONE, "enable_prefix_caching": False}
    assert named(rows, off) == "caching-off"
    counted = counters(rows, off, enable_prefix_caching=False)
    for queries in (counted.queries, 0):  # vLLM counts no look-ups then
        found = expect(traffic(rows), ONE, replace(counted, queries=queries))
        assert found.cause == "caching-off" and found.fault and "enable_prefix_caching=False" in found.sentence
    agreed = expect(traffic(rows), off, replace(counted, queries=0))
    assert (agreed.cause, agreed.fault) == ("caching-off", False)


def test_blocks_larger_than_what_is_shared() -> None:
    hybrid = [{"kind": "mamba", "block_size": 784}, {"kind": "full", "block_size": 784}]
    rows = documents(document=240)
    settings = {"groups": hybrid, "num_gpu_blocks": 4096}
    found = expect(traffic(rows), settings, counts(rows, settings))
    assert (found.cause, found.owed, found.granularity.smallest) == ("granularity", 0, 784)
    assert "fewer than 784 tokens never hits" in found.sentence and not found.fault


def test_other_traffic_and_sleep() -> None:
    rows = conversations()
    counted = counters(rows, ONE)
    counted.queries = (counted.queries or 0) * 3 // 2
    assert named(rows, ONE, counted) == "other-traffic"
    assert named(rows, ONE, replace(counters(rows, ONE), asleep=True)) == "asleep"


def test_an_unexplained_difference_names_the_first_request() -> None:
    rows = conversations()
    counted = counts(rows, ONE)
    for row in rows[10:30:2]:
        counted.by_request[row.id] = 16
    found = expect(traffic(rows), ONE, counted)
    assert found.cause == "unknown" and rows[10].id in found.sentence
    assert (found.compared, found.equal) == (len(rows), len(rows) - 10)


# -- healthy --------------------------------------------------------------------------------------------------------------

HYBRID = [{"kind": "sliding_window", "block_size": 16, "window": 256}, {"kind": "full", "block_size": 16}]
HEALTHY: dict[str, dict[str, object]] = {
    "blocks of 16": ONE,
    "blocks of 32": {**ONE, "block_size": 32},
    "blocks of 64": {**ONE, "block_size": 64},
    "one token at a time": {**ONE, "block_size": 1, "num_gpu_blocks": 200_000, "backend": "sglang"},
    "sglang": {**ONE, "backend": "sglang", "block_size": 64},
    "trtllm": {**ONE, "backend": "trtllm", "block_size": 32},
    "llama": {"model": "llama-3.1-8b", "gpu": "h200", "timing": "polynomial"},
    "qwen moe": {"model": "qwen3-30b-a3b", "gpu": "h200", "timing": "polynomial"},
    "windows": {"model": "gpt-oss-20b", "gpu": "h200", "timing": "polynomial"},
    "gemma": {"model": "gemma-3-27b", "gpu": "h200", "timing": "polynomial"},
    "mla": {"model": "deepseek-v2-lite", "gpu": "h200", "timing": "polynomial"},
    "own windows": {"groups": HYBRID, "num_gpu_blocks": 16384},
    "drafts": {**ONE, "num_speculative_tokens": 2},
    "host tier": TIERED,
    "fleet": FLEET,
    "fleet of two": {**FLEET, "workers": 2},
    "data parallel": {**ONE, "dp_size": 2, "router": "kv"},
    "fp8 cache": {"model": "llama-3.1-8b", "gpu": "l40s", "kv_cache_dtype": "fp8", "timing": "polynomial"},
    "long chunks": {**ONE, "max_num_batched_tokens": 512},
    "few at a time": {**ONE, "max_num_seqs": 2},
    "priority": {**ONE, "scheduling_policy": "priority"},
    "states": {
        "groups": [{"kind": "mamba", "block_size": 128}, {"kind": "full", "block_size": 128}],
        "num_gpu_blocks": 2048,
    },
    "chunks of attention": {"model": "llama-4-scout", "gpu": "b200", "tensor_parallel_size": 4, "timing": "polynomial"},
    "sglang with a host": {**TIGHT, "backend": "sglang", "host_blocks": 8192},
    "sessions kept together": {**ONE, "workers": 3, "router": "affinity"},
    "ranks by load": {**ONE, "dp_size": 3, "router": "least-loaded"},
    "lazy offload": {**TIERED, "offload_policy": "lazy"},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_flagged_on_healthy_engines(name: str) -> None:
    settings = HEALTHY[name]
    for rows in (conversations(), documents(document=1600)):
        # Its passes take other times than the replay's, as a real engine's do.
        theirs = counts(rows, {**settings, "timing_speedup": 1.7})
        found = expect(traffic(rows), settings, theirs)
        assert (found.cause, found.fault) == ("", False), found.sentence
    sums = expect(traffic(rows), settings, counters(rows, {**settings, "timing_speedup": 0.8}))
    assert sums.cause == "", sums.sentence


def test_a_fleet_that_routes_better_than_its_replay_is_healthy() -> None:
    """Its requests are through at once, so all with one document go to one worker; in the replay they overlap."""
    rows = [replace(row, arrival=at * 10**6) for at, row in enumerate(documents(240, document=800, kinds=21))]
    found = expect(traffic(rows), FLEET, counts(rows, {**FLEET, "timing_speedup": 1000}))
    assert found.counted is not None and found.counted > found.owed
    assert not found.fault and "--speedup" in found.notes[-1], found.sentence


# -- what a search takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counted", "most"), [(counts, 1.5), (counters, 0.1)])
def test_a_search_replays_little_beside_the_whole_traffic(
    counted: Callable[..., Counted], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causes are tried on the first requests; of sums, reuse distances leave a pool alone, which isn't replayed."""
    random = Random(29)
    asked = random.choices(documents(60, document=320, kinds=60), k=4000)
    rows = [replace(row, id=f"{at}", arrival=at * 10**9 // 2) for at, row in enumerate(asked)]
    fleet = {**FLEET, "num_gpu_blocks": 2000}
    small = counted(rows, {**fleet, "num_gpu_blocks": 200})
    replayed: list[int] = []

    def counting(requests: Sequence[TraceRequest], settings: Mapping[str, object]) -> Replayed:
        replayed.append(len(requests))
        return replay_traffic(requests, settings)

    monkeypatch.setattr(difference, "replay_traffic", counting)
    found = expect(traffic(rows), fleet, small)
    assert found.cause == "pool" and found.fault, found.sentence
    assert sum(replayed) < most * len(rows), replayed


def test_a_fault_that_begins_late_is_searched_where_it_shows() -> None:
    """A pool that is large enough for the first requests: the sample reaches to where hits go missing."""
    rows = [*conversations(60, 1, user=200), *(replace(row, id=f"{row.id}b") for row in documents(600, kinds=90))]
    rows = [replace(row, arrival=at * 10**9) for at, row in enumerate(rows)]
    found = expect(traffic(rows), ONE, counts(rows, {**ONE, "num_gpu_blocks": 3000}))
    assert found.cause == "pool" and found.fault, found.sentence
