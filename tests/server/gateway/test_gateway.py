"""The gateway with a journal, a recording, other gateways, and publishers that restart."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.index.redis.server import PROGRAM, RedisServer
from tests.server.gateway.support import Gated, fleet, front, worker_of

from kvyard.engine.timing import FixedTiming
from kvyard.index import Holder
from kvyard.lab.validate.reading import read_run
from kvyard.replay.traces import open_trace
from kvyard.router.journal import Applied, Began, Ended, FirstToken, Routed, read_journal

pytestmark = pytest.mark.zmq
PROMPT = list(range(600))


def test_a_journal_has_all_that_was_decided(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with front(2, journal=str(path)) as (gated, _):
        workers = [worker_of(gated.complete([at] * 100, headers={"x-request-id": f"r{at}"})) for at in range(6)]
        with gated.stream("x", headers={"x-request-id": "s"}) as reply:
            reply.read()
        gated.idle()
    entries = list(read_journal(path))
    assert [at for at, one in enumerate(entries) if isinstance(one, Began)] == [0]
    routed = {one.id: one.decision.worker.name for one in entries if isinstance(one, Routed)}
    assert [routed[f"r{at}"] for at in range(6)] == workers
    assert {one.id for one in entries if isinstance(one, Ended)} == set(routed)
    assert "s" in {one.id for one in entries if isinstance(one, FirstToken)}
    assert any(isinstance(one, Applied) and one.seq >= 0 for one in entries)


def test_traffic_becomes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with front(1, record=str(path), record_block_size=16) as (gated, _):
        for length in (40, 100, 160):
            gated.complete(list(range(length)), max_tokens=7)
        with gated.stream(list(range(200)), max_tokens=9, stream_options={"include_usage": True}) as reply:
            reply.read()
        gated.complete("x", 400, max_tokens=-1)
        gated.idle()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["input_length"], row["output_length"]) for row in rows] == [(40, 7), (100, 7), (160, 7), (200, 9)]
    assert rows[3]["hash_ids"][:10] == rows[2]["hash_ids"], "the longer prompt begins as the shorter one does"
    assert ["ttft" in row for row in rows] == [False, False, False, True], "only a stream shows its first token"
    assert 0 < rows[3]["ttft"] < rows[3]["e2e"] and rows[3]["cached"] == 160 - 160 % 16
    assert len(list(open_trace(path))) == 4
    assert [one.cached for one in read_run(path).requests][3] == rows[3]["cached"]


@pytest.mark.redis
@pytest.mark.skipif(PROGRAM is None, reason="needs redis-server: scripts/setup-test-deps.sh")
def test_two_gateways_know_of_each_others_load(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    slow = {"timing": FixedTiming(prefill_ms=5, decode_ms=20)}
    with contextlib.closing(redis), fleet(workers=2, engine=slow) as served:
        shared = {"fleets": [served.url], "share": redis.url, "router": {"policy": "least-loaded"}}
        with Gated(**shared) as one, Gated(**shared) as other:
            one.ready(2)
            other.ready(2)
            eventually(lambda: one.gateway.members.pools["mock"].sharing.peers)  # type: ignore[union-attr]
            with one.stream("x", max_tokens=1900, ignore_eos=True) as held:
                parts = held.iter_raw()
                next(parts)
                busy = held.headers["x-mock-worker"]
                pool = other.gateway.members.pools["mock"]
                for at in range(4):
                    eventually(lambda: pool.router.load(Holder(busy)).requests == 1)
                    went = worker_of(other.complete([at] * 10))
                    # On a machine that stands still for seconds the other gateway's word may run out meanwhile.
                    assert went != busy or pool.sharing.counters.expired  # type: ignore[union-attr]
                assert set(pool.router.workers) == {Holder("worker0"), Holder("worker1")}
            for gated in (one, other):  # what others have ended is heard of with the next beat
                eventually(lambda gated=gated: not gated.gateway.members.pools["mock"].router.loads.active)
            one.idle()


def test_a_publisher_that_restarts() -> None:
    """A worker's process of its own is the whole engine: here only its events begin anew, as after an engine's crash."""
    with front(2, router={"predicted_ttl_s": 0}) as (gated, served):
        first = worker_of(gated.complete(PROMPT))
        number = int(first.removeprefix("worker"))

        def hit() -> int:
            return int(gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"])

        eventually(lambda: hit() == 37)
        httpx.post(f"{served.urls[1 - number]}/admin/kill", json={"worker": number, "seconds": 0.1}, trust_env=False)
        eventually(lambda: hit() == 0)
        gated.ready(2, 2)
        eventually(lambda: any(one["state"] == "fresh" for one in gated.engines()[first]["streams"]))
        seen = {worker_of(gated.complete(PROMPT)) for _ in range(2)}
        assert seen
        eventually(lambda: hit() == 37)
        gated.idle()
