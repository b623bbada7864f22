"""Agreement of an index with the engines, copy by copy: every place of every rank, whatever tier and group."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvyard.clock import MS, SECOND
from kvyard.engine.core import EngineCore
from kvyard.events.transport import Limits, Subscriber
from kvyard.events.types import Tier
from kvyard.hashing import wire_hash
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.index.feed import Feed

Place = tuple[Tier, int]
LIMITS = Limits(reply=5 * SECOND, cooldown=300 * MS, probe=200 * MS, probe_most=SECOND)
PATIENCE = 40.0


class FollowedRank(NamedTuple):
    """A rank, and where it publishes."""

    holder: Holder
    endpoint: str
    replay: str | None
    clear_scope: str = "device"


class Listening:
    """An index that hears ranks, on a loop in a thread of its own. Hold ``lock`` to look at it."""

    def __init__(self, block_size: int, ranks: Sequence[FollowedRank]) -> None:
        self.indexer = Indexer(Identity(block_size))
        self.lock = threading.Lock()
        self._ranks = ranks
        for rank in ranks:
            name, number = rank.holder.name, rank.holder.rank
            self.indexer.register(Source(stream=rank.endpoint, worker=name, rank=number, clear_scope=rank.clear_scope))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._following: list[asyncio.Task[None]] = []

    def __enter__(self) -> Listening:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _begin(self) -> None:
        self._following = [asyncio.create_task(self._follow(rank)) for rank in self._ranks]

    async def _end(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)

    async def _follow(self, rank: FollowedRank) -> None:
        async with Subscriber(
            rank.endpoint, replay=rank.replay, stream=rank.endpoint, limits=LIMITS, hwm=100_000
        ) as subscriber:
            async for update in subscriber:
                with self.lock:
                    self.indexer.apply(update)


def pool_of(core: EngineCore) -> dict[Place, Counter[int]]:
    """Return the contents of a rank by its own books, as the wire names them."""
    held: dict[Place, Counter[int]] = {}
    for group, tier, runs in core.snapshot():
        held.setdefault((tier, group), Counter()).update(wire_hash(key) for run in runs for key in run.hashes)
    return {place: hashes for place, hashes in held.items() if hashes}


def differences(indexer: Indexer, holder: Holder, pool: dict[Place, Counter[int]]) -> list[str]:
    """Where the index is wrong about ``holder``, in words; none where it is equal to the rank's pool. Ours and the engine's
    blocks must be of one size.
    """
    feeds = [stream.feeds[holder] for stream in indexer.streams.values() if holder in stream.feeds]
    if len(feeds) != 1:
        return [f"{holder} has {len(feeds)} feeds"]
    (feed,) = feeds
    said = {(tier, group or 0): number for (tier, group), number in feed.places.items()}
    found: list[str] = []
    for place in pool.keys() | said.keys():
        held = {key for run in indexer.backend.held(said[place]) for key in run} if place in said else set()
        hashes = pool.get(place, Counter())
        wanted = {_key_of(feed, one) for one in hashes}
        if held != wanted:
            found.append(f"{holder} {place}: {len(wanted - held)} not known of, {len(held - wanted)} that aren't there")
            continue
        beyond = dict(indexer.dedup.snapshot(said[place])) if place in said else {}
        repeated = {_key_of(feed, one): count - 1 for one, count in hashes.items() if count > 1}
        if beyond != repeated:
            found.append(f"{holder} {place}: {len(beyond)} counted as repeated, and {len(repeated)} are")
    return found


def _key_of(feed: Feed, engine_hash: int) -> int | None:
    """Return the index's name of a block that an engine calls ``engine_hash``; ``None`` if it is unknown."""
    loc = feed.bridge.find(engine_hash)
    if loc is None:
        return None
    span, at = loc
    block = span.begin // span.size + at
    return feed.bridge.keys_between(span, block, block + 1)[0]
