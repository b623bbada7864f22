"""The stream, end to end: 10,000 requests through mock engines, their events over ZeroMQ, and an index that is then equal to
their pools, copy by copy; at quiet points on the way too.

Requests come over HTTP, 32 at a time, and evict, preempt, offload, load, hang up and reset. ``KVYARD_MIRROR_SEED`` is another
seed, ``KVYARD_MIRROR_REQUESTS`` another number for each kind of engine.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

import aiohttp
import httpx
from tests.server.mirror import FollowedRank, Listening, differences, pool_of
from tests.server.mock.support import LOOPBACK, Served

from kvyard.blocks import GroupSpec
from kvyard.engine.timing import FixedTiming
from kvyard.events.types import Tier
from kvyard.index import Holder, Indexer
from kvyard.tiers import OffloadConfig, TierConfig
from kvyard.tiers.links import LaneConfig, LinkConfig

pytestmark = pytest.mark.zmq
SEED = int(os.environ.get("KVYARD_MIRROR_SEED", "17"))
REQUESTS = int(os.environ.get("KVYARD_MIRROR_REQUESTS", "2500"))
AT_A_TIME = 32
QUIET_EVERY = 500

LANE = LaneConfig(bandwidth=2_000_000_000, first_byte_ns=20_000)
LINK = LinkConfig(outward=LANE, inward=LANE, duplex_bandwidth=3_000_000_000)
FULL = GroupSpec(block_size=16)
WINDOW = GroupSpec(kind="sliding_window", block_size=16, window=128)
STATE = GroupSpec(kind="mamba", mode="align", block_size=16)
FIVE_TIERS = OffloadConfig(tiers=tuple(TierConfig(num_blocks=size, link=LINK) for size in (700, 800, 1000, 1500)))
KINDS: dict[str, dict[str, Any]] = {
    "crowded": {"groups": (FULL,), "num_gpu_blocks": 260, "scheduler_reserve_full_isl": False},
    "tiers": {"groups": (FULL, WINDOW), "num_gpu_blocks": 500, "bytes_per_block": 1 << 18, "tiers": FIVE_TIERS},
    "state": {"groups": (FULL, STATE), "num_gpu_blocks": 500},
    "window": {"groups": (FULL, WINDOW), "num_gpu_blocks": 400, "scheduler_reserve_full_isl": False},
}


class Clients:
    """Requests over HTTP, some of which hang up."""

    def __init__(self, urls: list[str], seed: int) -> None:
        self._urls = urls
        self._rng = random.Random(seed)
        self._serial = 0
        self.answered = 0
        self.hung_up = 0

    def ask(self, count: int) -> None:
        asyncio.run(self._ask(count))

    async def _ask(self, count: int) -> None:
        room = asyncio.Semaphore(AT_A_TIME)
        # A connection each: one that waits for its next request may be closed by the server just then.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(count):
                await room.acquire()
                task = group.create_task(self._one(session, *self._next()))
                task.add_done_callback(lambda _: room.release())

    def _next(self) -> tuple[str, dict[str, Any], int | None]:
        """Prompts of up to 2,600 tokens from a few families: most of a pool is for two or three of them."""
        rng, self._serial = self._rng, self._serial + 1
        family, cut = rng.randrange(6), rng.randint(0, 8)
        length = rng.choice((rng.randint(20, 400), rng.randint(20, 400), rng.randint(400, 2600)))
        ids = [1000 * family + at // 16 % 500 for at in range(320 * cut)][:length]
        ids += [100_000 + rng.randrange(1 << 16) for _ in range(length - len(ids))]
        body = {"prompt": ids, "max_tokens": rng.randint(1, 160), "ignore_eos": True, "stream": rng.random() < 0.5}
        leaves = rng.randint(1, 10) if body["stream"] and rng.random() < 0.1 else None
        return rng.choice(self._urls), body, leaves

    async def _one(self, session: Any, url: str, body: dict[str, Any], leaves: int | None) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            if leaves is not None:
                for _ in range(leaves):
                    await reply.content.readany()
                self.hung_up += 1
                return
            await reply.read()
            self.answered += 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_the_index_is_equal_to_the_pools(kind: str) -> None:
    engine = {
        **KINDS[kind],
        "block_size": None,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 4096,
    }
    engine["timing"] = FixedTiming(prefill_ms=2, decode_ms=1)
    events = {"events_endpoint": LOOPBACK, "replay_endpoint": LOOPBACK}
    with Served(workers=2, engine=engine, speed=20.0, **events) as served, Listening(16, ranks(served)) as listening:
        clients = Clients(served.urls, SEED)
        rng = random.Random(SEED)
        compared = 0
        while clients.answered + clients.hung_up < REQUESTS:
            clients.ask(min(QUIET_EVERY, REQUESTS - clients.answered - clients.hung_up))
            served.check()
            eventually(lambda: not wrong(served, listening), lambda: wrong(served, listening))
            compared += sum(sum(held.values()) for core in cores(served).values() for held in pool_of(core).values())
            if rng.random() < 0.3:
                served.client.post("/reset_prefix_cache").raise_for_status()
        found = list(cores(served).values())
        evicted = sum(core.scheduler.manager.pool.evicted for core in found)
        preempted = sum(
            value for name, value in metrics(served).items() if name.startswith("vllm:num_preemptions_total")
        )
        below = sum(
            sum(held.values()) for core in found for (tier, _), held in pool_of(core).items() if tier != Tier.G1
        )
        print(
            f"\n{kind}: {clients.answered} answered and {clients.hung_up} hung up, {evicted} blocks evicted, "
            f"{preempted:.0f} preemptions, {below} copies in lower tiers; {compared} copies compared, none different"
        )
        assert clients.hung_up > REQUESTS // 100 and evicted > 10 * REQUESTS
        assert preempted or kind not in ("crowded", "window")
        assert below or kind != "tiers"
        forget_one(listening.indexer)
        assert len(wrong(served, listening)) == 1, "a comparison that can't fail shows nothing"


def forget_one(indexer: Indexer) -> None:
    """Let the index be wrong about one copy."""
    feed = next(feed for stream in indexer.streams.values() for feed in stream.feeds.values() if feed.places)
    number, run = next((number, run) for number in feed.places.values() for run in indexer.backend.held(number))
    indexer.backend.remove(number, [run[-1]])


def ranks(served: Served) -> list[FollowedRank]:
    return [
        FollowedRank(Holder(worker["name"], stream["rank"]), stream["endpoint"], stream["replay_endpoint"], "all")
        for worker in served.get("/admin/workers")
        for stream in worker["streams"]
    ]


def cores(served: Served) -> dict[Holder, Any]:
    return {
        Holder(worker.name, rank): core for worker in served.fleet.workers for rank, core in enumerate(worker.cores)
    }


def metrics(served: Served) -> dict[str, float]:
    """Of all workers."""
    found: dict[str, float] = {}
    for url in served.urls:
        for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
            if not line.startswith("#"):
                found[f"{line.rpartition(' ')[0]} {url}"] = float(line.rpartition(" ")[2])
    return found


def wrong(served: Served, listening: Listening) -> list[str]:
    """Where index and pools differ just now; nothing is under way."""

    def compare() -> list[str]:
        with listening.lock:
            listening.indexer.check_integrity()
            return [
                one
                for holder, core in cores(served).items()
                for one in differences(listening.indexer, holder, pool_of(core))
            ]

    return list(served.inside(compare))
