"""What recording traffic and sharing load cost a gateway, by CPU time.

The figures are in benchmarks/RESULTS.md. Recording: the conversation trace of Mooncake, with
blocks of 16 tokens, as if its requests came and went here. Sharing: two gateways on a redis-server of their own, which must be
installed.

    .venv/bin/python benchmarks/gateway_extras.py
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from redis_index import start

from kvyard.clock import SECOND, VirtualClock, WallClock
from kvyard.index import Identity, Indexer
from kvyard.replay.traces import open_trace
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.server.gateway.recording import ArrivedRequest, TrafficRecorder
from kvyard.server.gateway.sharing import LoadSharing

TRACE = Path(__file__).parents[1] / "examples" / "data" / "mooncake_conversation.jsonl.xz"
KEY_TOKENS = 16
PER_ID = 512 // KEY_TOKENS


def keys_of(ids: list[int], tokens: int) -> list[int]:
    """Chained names for blocks of 16 tokens, made up so that equal ids give equal names."""
    names = [
        (one * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % (1 << 64) for one in ids for index in range(PER_ID)
    ]
    return names[: tokens // KEY_TOKENS]


def recording(folder: str) -> None:
    requests = [
        (
            request.arrival,
            keys_of(list(request.ids or ()), request.input_length),
            request.input_length,
            request.output_length,
        )
        for request in open_trace(str(TRACE))
    ]
    blocks = sum(len(keys) for _, keys, _, _ in requests)
    print(f"{len(requests)} requests of {blocks / len(requests):.0f} blocks")
    for size in (16, 64, 512):
        for suffix in ("jsonl", "jsonl.gz"):
            clock = VirtualClock()
            recorder = TrafficRecorder(f"{folder}/{size}.{suffix}", clock=clock, block_size=size, limit=1 << 40)
            flushed, began = 0, time.process_time()
            for number, (arrival, keys, tokens, output) in enumerate(requests):
                clock.advance(arrival)
                recorder.arrived(ArrivedRequest(id=number, keys=keys, num_tokens=tokens, key_tokens=KEY_TOKENS))
                recorder.ended(number, output)
                if arrival - flushed >= SECOND:
                    recorder.flush()
                    flushed = arrival
            recorder.close()
            took = (time.process_time() - began) / len(requests)
            print(
                f"  {size:3} tokens per id, {suffix:8}: {took * 1e6:5.0f} µs a request, "
                f"{recorder.counters.bytes / 1e6:6.1f} MB, "
                f"{len(recorder.ids) / 1e6:.2f} million prefixes known, {recorder.ids.forgotten} forgotten"
            )


async def sharing(url: str) -> None:
    rng = random.Random(0)

    def gateway(name: str) -> tuple[Router, LoadSharing, WallClock]:
        clock = WallClock()
        router = Router(RouterConfig(policy="kv"), [f"w{index}" for index in range(8)], Indexer(Identity(KEY_TOKENS)))
        return router, LoadSharing(url, router, clock=clock, identity="bench", gateway=name, lease_s=60), clock

    (router, tells, clock), (_, hears, _) = gateway("tells"), gateway("hears")
    for _ in range(3):
        await tells.beat()
        await hears.beat()
    began, wall = time.process_time(), time.perf_counter()
    for _ in range(300):
        await tells.beat()
    cpu, wall = time.process_time() - began, time.perf_counter() - wall
    print(f"an empty beat: {cpu / 300 * 1e6:.0f} µs CPU, {wall / 300 * 1e6:.0f} µs")
    count = 200
    for blocks in (64, 512, 4096):
        spent = {"told": 0.0, "heard": 0.0, "ended": 0.0}
        for number in range(count):
            request = RouteRequest(
                f"{blocks}-{number}", [rng.getrandbits(64) for _ in range(blocks)], blocks * KEY_TOKENS
            )
            decision = router.route(request, clock.now())
            began = time.process_time()
            tells.routed(request, decision.worker, decision.new_tokens)
            spent["told"] += time.process_time() - began
        for what, who, true in (
            ("told", tells, lambda: not tells._outbox),
            ("heard", hears, lambda: hears.peers["tells"] == count),
        ):
            began = time.process_time()
            while not true():
                await who.beat()
            spent[what] += time.process_time() - began
        began = time.process_time()
        for number in range(count):
            router.finished(f"{blocks}-{number}", clock.now())
            tells.finished(f"{blocks}-{number}")
        while hears.peers["tells"]:
            await tells.beat()
            await hears.beat()
        spent["ended"] = time.process_time() - began
        costs = ", ".join(f"{what} {seconds / count * 1e6:.0f} µs" for what, seconds in spent.items())
        print(f"a request of {blocks} blocks, CPU: {costs}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        recording(folder)
        server, url = start(folder)
        try:
            asyncio.run(sharing(url))
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
