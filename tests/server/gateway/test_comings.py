"""Clients hang up, engines drain, leave and come back, all at once: every request ends once, and nothing is held after."""

from __future__ import annotations

import random
import threading

import httpx
import msgspec
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("starlette", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import PATIENCE, eventually, front

from kvyard.engine.timing import FixedTiming

pytestmark = pytest.mark.zmq

PACE = {"timing": FixedTiming(prefill_ms=5, decode_ms=5)}


def test_comings_and_goings() -> None:
    with front(3, mock={"engine": PACE}, engine_requests=2, queue=20) as (gated, served):
        stop = threading.Event()
        answered: list[int] = []
        failed: list[object] = []

        def ask(seed: int) -> None:
            chance = random.Random(seed)
            with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as patient:
                while not stop.is_set():
                    body = {"prompt": [chance.randrange(5)] * 64, "max_tokens": chance.randrange(1, 30)}
                    body |= {"ignore_eos": True, "stream": chance.random() < 0.7}
                    if chance.random() < 0.3:
                        hurry = chance.random() * 0.1
                        try:
                            httpx.post(f"{gated.url}/v1/completions", json=body, timeout=hurry, trust_env=False)
                        except httpx.TimeoutException:
                            pass
                        continue
                    try:
                        answered.append(patient.post("/v1/completions", json=body).status_code)
                    except httpx.HTTPError as error:
                        failed.append(error)

        def manage() -> None:
            config = msgspec.to_builtins(gated.gateway.members.engines["worker0"].config)
            while not stop.wait(0.1):
                gated.post("/admin/drain", engine="worker1")
                gated.post("/admin/remove", engine="worker0")
                stop.wait(0.05)
                gated.post("/admin/engines", 201, **config)
                gated.post("/admin/resume", engine="worker1")

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
        threads.append(threading.Thread(target=manage))
        for thread in threads:
            thread.start()
        counters = gated.gateway.traffic.counters
        eventually(lambda: len(answered) > 100 and counters.cancelled > 20, lambda: (answered, counters))
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        gated.ready(3, 3).idle()
        assert not failed and set(answered) == {200}
        ways = (counters.finished, counters.refused, counters.failed, counters.broken, counters.cancelled)
        assert counters.requests == sum(ways) and not counters.failed and not counters.broken
        assert gated.gateway.traffic.held == 0
        # Whoever hung up has ended the engine's work too.
        eventually(lambda: all(one["running"] + one["waiting"] == 0 for one in served.get("/admin/workers")))
