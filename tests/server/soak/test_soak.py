"""The whole way under load for long: client, gateway, mock workers, each in a process of its own.

``KVYARD_SOAK_SECONDS`` says for how long; it is ten minutes unless said. ``KVYARD_SOAK_STEP_MS`` is the time between two
tokens of a stream: with 500 instead of 50 it takes a tenth of the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import GatewayProcess
from tests.server.mock.support import PATIENCE, Process
from tests.server.soak.load import Load, Memory

SECONDS = float(os.environ.get("KVYARD_SOAK_SECONDS", "600"))
STEP_MS = float(os.environ.get("KVYARD_SOAK_STEP_MS", "50"))
WARM = min(900.0, SECONDS / 4)
"""Caches fill, pools of connections and threads grow, before memory has to be flat."""
STREAMS = 200
HOSTILE = 0.01
"""Share of clients that send what they mustn't."""
BRIEF = 12_000 if SECONDS >= 600 else 0
"""Requests with short answers at the start: a gateway remembers 10,000 sessions, which would fill for half an hour."""
MOST_GROWTH = 0.05 if SECONDS >= 3600 else 2.8
"""MiB a minute in the rest, by the line of best fit; in a few minutes what is kept on purpose still grows."""


@pytest.mark.slow
@pytest.mark.zmq
@pytest.mark.timeout(SECONDS + 300)
def test_200_streams_through_the_gateway() -> None:
    """Up to 4,000 chunks a second: no request is lost, doubled, or given another's answer, and memory stays flat."""
    # Little is kept for replay, so that what is meant to grow has grown when memory has to be flat.
    events = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "buffer_steps": 500,
    }
    mock = (
        "--workers",
        "2",
        "--kv-events-config",
        json.dumps(events),
        "--timing",
        f"fixed:5,{STEP_MS:g}",
        "--num-gpu-blocks",
        "2048",
    )
    with Process(*mock) as first, Process(*mock) as second:
        fleets = [process.urls(2)[0] for process in (first, second)]
        arguments = [part for name, url in zip("ab", fleets, strict=False) for part in engines(name, url)]
        with GatewayProcess(*arguments, "--tokenizer", "bytes", "--router", "kv") as gateway:
            url = gateway.url
            eventually(lambda: get(url, "/health")["engines"].get("ready") == 4, lambda: gateway.text)
            load = Load(url, STREAMS, HOSTILE, BRIEF)
            pids = {"gateway": gateway.process.pid, "mock": first.process.pid, "other mock": second.process.pid}
            memory = {name: Memory(pid) for name, pid in pids.items()}
            asyncio.run(watched(load, memory))
            growth = {name: one.growth(WARM) for name, one in memory.items()}
            print(f"\n{len(load.errors)} failed; MiB a minute: {growth}", flush=True)
            assert load.errors == []
            assert load.sent == load.answered and len(load.sent) > STREAMS
            eventually(lambda: get(url, "/dashboard/view")["totals"]["under_way"] == 0)
            totals = get(url, "/dashboard/view")["totals"]
            mocks = [eventually(lambda url=url: done(url)) for url in fleets]
        # Nobody answered what nobody asked, and nothing was done twice.
        assert totals["finished"] + totals["cancelled"] == len(load.sent) + load.hung_up
        assert totals["failed"] == totals["retried"] == totals["refused"] == 0
        assert sum(one["requests"] for one in mocks) == totals["requests"] == len(load.sent) + load.hung_up
        sizes = ", ".join(f"{name} {one.last:.0f} MiB ({growth[name]:+.3f} a minute)" for name, one in memory.items())
        print(
            f"\nsoak: {SECONDS:.0f} s, {STREAMS} streams, {len(load.sent)} requests answered and {load.hung_up} hung up, "
            f"{load.attacks} attacks, "
            f"{load.chunks / SECONDS:.0f} chunks/s, {load.tokens} tokens, reused "
            f"{reused(totals['prompts']):.0%}; {sizes}"
        )
        for process in (first, second, gateway):
            assert "Traceback" not in process.text
        assert all(more < MOST_GROWTH for more in growth.values()), growth


async def watched(load: Load, memory: dict[str, Memory]) -> None:
    """Run ``load`` and look at memory every second."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    running = asyncio.ensure_future(load.run(SECONDS))
    while not running.done():
        for one in memory.values():
            one.look(loop.time() - began)
        if len(one.seen) % 300 == 0:
            sizes = ", ".join(f"{name} {one.last:.1f} MiB" for name, one in memory.items())
            print(
                f"{loop.time() - began:.0f} s: {len(load.answered)} answers, {load.attacks} attacks, {sizes}",
                flush=True,
            )
        await asyncio.wait((running,), timeout=1.0)
    await running


def engines(name: str, url: str) -> list[str]:
    """A fleet's workers as the gateway takes them; both fleets call theirs the same."""
    found: list[str] = []
    for state in get(url, "/admin/workers"):
        stream = state["streams"][0]
        events = f"events={stream['endpoint']},replay={stream['replay_endpoint']}"
        found += ["--engine", f"{state['url']},{events},block_size={state['block_size']},name={name}-{state['name']}"]
    return found


def get(url: str, path: str) -> Any:
    reply = httpx.get(f"{url}{path}", timeout=PATIENCE, trust_env=False)
    return reply.json() if reply.status_code == 200 else {"engines": {}}


def done(url: str) -> Any:
    """A fleet's totals, once it has nothing to do."""
    totals = get(url, "/dashboard/view")["totals"]
    return totals if totals["under_way"] == 0 else None


def reused(prompts: dict[str, int]) -> float:
    return (prompts["device"] + prompts["host"] + prompts["storage"]) / max(1, sum(prompts.values()))
