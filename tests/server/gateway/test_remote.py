"""An index elsewhere."""

from __future__ import annotations

import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated, plain
from tests.server.gateway.support import Gated, cached, fleet, worker_of
from tests.server.support import Served as Indexing

pytestmark = pytest.mark.zmq
PROMPT = list(range(600))


def test_an_index_elsewhere() -> None:
    """A remote index is asked, its word counts; without it requests are routed by load, and nothing else changes."""
    with Indexing(block_size=16) as indexing, fleet(workers=2) as served:
        for state in served.get("/admin/workers"):
            stream = state["streams"][0]
            indexing.register(
                model_name="mock",
                instance_id=state["name"],
                endpoint=stream["endpoint"],
                replay_endpoint=stream["replay_endpoint"],
            )
        with Gated(fleets=[served.url], index_url=indexing.url, router={"predicted_ttl_s": 0}) as gated:
            gated.ready(2)
            first = gated.complete(PROMPT)
            assert cached(first) == 0

            def hit() -> int:
                return int(gated.post("/explain", body={"prompt": PROMPT}).json()["hit_blocks"])

            eventually(lambda: hit() == 37)
            again = gated.complete(PROMPT)
            assert worker_of(again) == worker_of(first) and cached(again) == 592
            assert not gated.gateway.index.models
            indexing._running.stop()
            eventually(lambda: hit() == 0)
            assert gated.complete(PROMPT).status_code == 200
            assert gated.metrics()['kvyard_gateway_index_failures_total{model="mock"}'] > 0
            assert any("index" in note for note in gated.client.get("/dashboard/view").json()["notes"])
            gated.idle()


def test_an_index_elsewhere_counts_in_other_blocks() -> None:
    with Indexing(block_size=64) as indexing, fleet() as served:
        indexing.register(model_name="mock", instance_id="x", endpoint="tcp://127.0.0.1:1")
        with Gated(fleets=[served.url], index_url=indexing.url) as gated:
            gated.ready(1)
            gated.complete(PROMPT)
            remote = gated.gateway.members.pools["mock"].remote
            assert remote is not None and "set block_size" in remote.error


def test_an_index_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer is JSON of the right shape without a result in it."""
    with ScriptedEngine(lambda head, body: [answer("200 OK", b'{"block_size": 16, "results": []}')]) as index:
        with ScriptedEngine(plain) as engine, gated(engine, index_url=index.url) as gate:
            gate.ready(1)
            assert gate.complete("x" * 40).status_code == 200
            remote = gate.gateway.members.pools["odd"].remote
            assert remote is not None and remote.failures == 1 and "without a result" in remote.error
            gate.complete("x" * 40)
        assert caplog.text.count("routed by load: it answered without a result") == 1
