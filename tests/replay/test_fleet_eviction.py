"""Eviction policies in replays and sweeps, what a trace tells them, and the oracle: never fewer hits than LRU in one cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvyard
from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.use import RequestFacts
from kvyard.errors import KvyardError
from kvyard.hashing import TraceChain
from kvyard.lab.sweep import sweep
from kvyard.replay.facts import TraceFacts, next_uses
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.bounds import Accesses, belady, lru


def trace(seed: int, count: int, longest: int = 8) -> list[TraceRequest]:
    """Prompts of blocks of 16 that go on from earlier ones; the last block may be partial."""
    rng = random.Random(seed)
    made: list[TraceRequest] = []
    names = 0
    for number in range(count):
        ids: list[int] = []
        if made and rng.random() < 0.7:
            base = rng.choice(made[-15:]).ids
            ids = list(base or ())[: rng.randint(1, longest)]
        for _ in range(rng.randint(0 if ids else 1, 3)):
            names += 1
            ids.append(names)
        length = len(ids) * 16 - (rng.randint(0, 15) if rng.random() < 0.3 else 0)
        made.append(TraceRequest(f"r{number}", number * 10**8, length, rng.randint(1, 9), ids=ids, id_block_size=16))
    return made


def hits(rows: list[TraceRequest], order: str, capacity: int) -> int:
    """Blocks found in one cache, prompts one after the other; with a token more, so that the last block can be found too."""
    manager = BlockManager(capacity + 2, [GroupSpec(block_size=16)], eviction=order)
    facts = TraceFacts()
    facts.foresee(rows, 16)
    found = 0
    for number, row in enumerate(rows):
        chain = TraceChain(row.ids or (), 16, len(row.ids or ()) * 16, 16, number + 1)
        chain.grow(1)
        request = Request(row.id, chain, facts=facts.of(row))
        hit = manager.lookup(request)
        assert manager.allocate(request, request.num_tokens - hit.tokens, hit) is not None
        found += hit.tokens // 16
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
    manager.check_integrity()
    return found


@given(st.integers(0, 10**6), st.integers(12, 60))
@settings(max_examples=25)
def test_the_oracle_finds_no_less_than_lru_and_no_more_than_there_is(seed: int, capacity: int) -> None:
    rows = trace(seed, 80)
    accesses = Accesses()
    for row in rows:
        accesses.add(row.ids or ())
    best = hits(rows, "belady", capacity)
    assert hits(rows, "lru", capacity) <= best <= belady(accesses, [capacity + 1])[0]
    # The cache has one block more, for what follows a prompt, and LRU here touches a prompt's head last.
    assert abs(hits(rows, "lru", 10_000) - lru(accesses, [10_000])[0].blocks) == 0


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_the_future_is_what_a_search_finds(seed: int) -> None:
    rows = trace(seed, 40)
    future = next_uses(rows, 16)
    for number, row in enumerate(rows):
        for at, name in enumerate(row.ids or ()):
            token = at * 16
            found = next((after for tokens, after in future[row.id] if token < tokens), None)
            expected = next((later for later in range(number + 1, len(rows)) if name in (rows[later].ids or ())), None)
            assert found == expected


def test_the_future_of_answers_and_of_other_spaces() -> None:
    first = TraceRequest("a", 0, 4, 4, tokens=[1, 2, 3, 4], output_tokens=[5, 6, 7, 8])
    other = TraceRequest("b", 0, 8, 1, tokens=[1, 2, 3, 4, 5, 6, 7, 8], salt="x")
    again = TraceRequest("c", 0, 9, 1, tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert next_uses([first, other, again], 4) == {"a": ((8, 2),), "b": (), "c": ()}


def test_facts_of_a_request_come_from_the_trace() -> None:
    facts = TraceFacts()
    row = TraceRequest("a", 0, 4, 4, session="s", model="m", lora="l", priority=2)
    assert facts.of(row) == RequestFacts("m/l/2", 1)
    assert facts.of(row).turn == 2
    assert facts.of(TraceRequest("b", 0, 4, 4)) == RequestFacts()


SETTINGS = {"workers": 2, "block_size": 16, "num_gpu_blocks": 40, "router": "round-robin"}


@pytest.mark.parametrize("name", ORDERS.ours)
def test_every_order_replays(name: str) -> None:
    run = kvyard.replay(trace(1, 60), eviction=name, **SETTINGS)
    assert all(record.status == "finished" for record in run.records)
    for worker in run.fleet.workers:
        for core in worker.cores:
            core.check_integrity()


def test_orders_differ_in_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": row.arrival // 10**6, "input_length": row.input_length, "output_length": 1, "hash_ids": row.ids}
        for row in trace(2, 80)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    base = {**SETTINGS, "workers": 1, "num_gpu_blocks": 30}
    vary = {"eviction": ["lru", "lfu", "belady"]}
    result = sweep(path, vary, folder=tmp_path / "out", config=base, trace_block_size=16)
    least_recent, least_frequent, ideal = [report.reuse["all"].value for _, report in result.done]
    assert ideal > least_recent != least_frequent


def test_options_reach_the_order() -> None:
    fleet = kvyard.replay(
        trace(1, 9),
        eviction="slru",
        eviction_options="uses=3",
        host_blocks=50,
        host_eviction="t-lru",
        host_eviction_options={"threshold": 32},
        **SETTINGS,
    ).fleet
    core = fleet.workers[0].cores[0]
    learner = core.scheduler.manager.pool.learner
    assert learner is not None and learner.options == {"uses": 3, "protected": 0.8}
    assert core.offload is not None
    below = core.offload.tiers[0].store.pool.learner
    assert below is not None and below.options == {"threshold": 32, "next_prompt": 512}


def test_bad_options_are_refused() -> None:
    with pytest.raises(
        KvyardError, match=r"unknown option 'x' of the eviction policy slru: choose one of uses, protected"
    ):
        kvyard.replay(trace(1, 2), eviction="slru", eviction_options="x=3", **SETTINGS)
    with pytest.raises(KvyardError, match="eviction_options is 'x': it must be a number"):
        kvyard.replay(trace(1, 2), eviction="slru", eviction_options="uses=x", **SETTINGS)


@pytest.mark.parametrize(
    ("order", "options", "words"),
    [
        ("marconi", "window_s=0", "window_s of the eviction policy marconi must be more than 0"),
        ("marconi", "full_credit=0", "full_credit of the eviction policy marconi must be more than 0"),
        ("s3-fifo", "small=5", "small of the eviction policy s3-fifo must be from 0 to 1, got 5"),
        ("slru", "protected=2", "protected of the eviction policy slru must be from 0 to 1, got 2"),
        ("workload-aware", "window_s=0", "window_s of the eviction policy workload-aware must be more than 0"),
    ],
)
def test_figures_that_no_order_can_have_are_refused(order, options, words):
    with pytest.raises(KvyardError, match=words):
        make_config({"eviction": order, "eviction_options": options})
