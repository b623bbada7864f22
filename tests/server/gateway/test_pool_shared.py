"""A store that engines share, live: one stream of its own, credited to all its members."""

from __future__ import annotations

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

import httpx
from tests.server.gateway.support import front
from tests.server.wire import Wire

pytestmark = [pytest.mark.zmq, pytest.mark.slow]
PROMPT = list(range(500, 600))


def test_what_a_shared_store_announces_counts_for_its_members() -> None:
    members = [{"instance_id": "worker0"}, {"instance_id": "worker1"}]
    with Wire() as store:
        pool = {"model_name": "mock", "pool": "fs", "endpoint": store.endpoint, "tier": "disk", "members": members}
        with front(3, router={"policy": "kv"}, subscriptions=[pool]) as (gated, served):
            # What an engine's groups are is known from its first event on, and nothing counts before.
            for url in served.urls:
                httpx.post(f"{url}/v1/completions", json={"prompt": [7] * 40, "max_tokens": 1}, trust_env=False)

            def held() -> dict[str, int]:
                store.stored([81, 82, 83], PROMPT[:48], 16)  # again and again: nobody answers for what was missed
                said = gated.post("/explain", body={"prompt": PROMPT}).json()["candidates"]
                return {one["worker"]: one["tiers"].get("storage", 0) for one in said}

            eventually(lambda: held() == {"worker0@0": 3, "worker1@0": 3, "worker2@0": 0}, held)
