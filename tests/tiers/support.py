"""Shared parts of the tests of tiers: a worker without a scheduler, whose blocks have contents that can be read back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.blocks.support import make

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.events import Batcher, Mirror
from kvyard.events.types import Tier
from kvyard.tiers import LoadAnswer, Offload, OffloadConfig, TierConfig, Timeline
from kvyard.tiers.links import LaneConfig, LinkConfig

BLOCK = 1000
"""Bytes of a block in these tests."""


def link(bandwidth: int = 10**9, latency: int = 0, discipline: str = "fifo", **keys: Any) -> LinkConfig:
    """By default a byte takes a nanosecond, hence a block a microsecond."""
    lane = LaneConfig(bandwidth=bandwidth, first_byte_ns=latency)
    return LinkConfig(discipline=discipline, outward=lane, inward=lane, **keys)


def tiers(host: int = 100, storage: int | None = None, remote: int | None = None, **keys: Any) -> OffloadConfig:
    """Tiers of so many blocks; ``host_keys``, ``storage_keys`` and ``remote_keys`` say more of each."""
    sizes = {"host": host, "storage": storage, "remote": remote}
    more = {name: keys.pop(f"{name}_keys", {}) for name in sizes}
    found = [
        TierConfig(num_blocks=size, **{"link": link(), **more[name]})
        for name, size in sizes.items()
        if size is not None
    ]
    return OffloadConfig(tiers=tuple(found), **keys)


class Worker:
    """A manager and its offload engine, driven by hand."""

    def __init__(
        self,
        config: OffloadConfig,
        num_blocks: int = 50,
        groups: list[GroupSpec] | None = None,
        *,
        name: str = "w0",
        timeline: Timeline | None = None,
        **options: Any,
    ) -> None:
        groups = groups or [GroupSpec(block_size=4)]
        self.batcher = Batcher([group.meta for group in groups], stream=name)
        self.manager = BlockManager(num_blocks, groups, sink=self.batcher, **options)
        self.offload = Offload(self.manager, config, block_bytes=BLOCK, name=name, sink=self.batcher, timeline=timeline)
        self.mirror = Mirror()
        self.events: list[Any] = []

    def make(self, name: str, tokens: Iterable[int]) -> Request:
        return make(self.manager, name, tokens)

    def compute(self, request: Request, now: int, new: int | None = None) -> None:
        """A pass that computes ``new`` tokens of the request, all that are left by default, and ends at ``now``."""
        self.manager.begin_step()
        hit = None if request.running or request.num_computed_tokens else self.manager.lookup(request)
        found = hit.tokens if hit is not None else 0
        if new is None:
            new = request.num_tokens - request.num_computed_tokens - found
        assert self.manager.allocate(request, new, hit) is not None, "no room"
        request.num_computed_tokens += found + new
        request.running = True
        self.offload.offload(request, now)
        self.check()

    def run(self, name: str, tokens: Iterable[int], now: int) -> Request:
        request = self.make(name, tokens)
        self.compute(request, now)
        return request

    def finish(self, request: Request, now: int) -> None:
        self.offload.forget(request, now)
        if self.manager.requests.get(request.id) is request:
            self.manager.free(request)
        self.check()

    def tick(self, now: int) -> list[Request]:
        ready = self.offload.tick(now)
        self.check()
        return ready

    def settle(self, now: int = 0) -> int:
        """Let everything under way land; returns when the last did."""
        while (at := self.offload.earliest_deadline()) is not None:
            now = at
            self.tick(at)
        return now

    def onboard(self, request: Request, now: int, **terms: Any) -> LoadAnswer:
        self.manager.begin_step()
        outcome = self.offload.onboard(request, self.manager.lookup(request), now, **terms)
        self.check()
        return outcome

    def evict_all(self) -> None:
        """Take every free block of the device and give it back: nothing cached is left there but what is held."""
        pool = self.manager.pool
        held = pool.holds.take(pool.free, 0)
        pool.holds.end(held)

    def check(self) -> None:
        self.offload.check_integrity()
        batch = self.batcher.end_iteration(0)
        if batch is not None:
            self.events += batch.events
            self.mirror.apply(batch.events)
        assert self.mirror.held == held_by(self.manager, self.offload), "I4: the mirror is not the map"

    def held(self, tier: Tier, group: int = 0) -> int:
        """How many blocks a reader of the events believes to be there."""
        return len(self.mirror.held.get((group, tier), ()))


def held_by(manager: BlockManager, offload: Offload) -> dict[Any, set[Any]]:
    """What the maps of the worker's own tiers hold, by (group, tier)."""
    found: dict[Any, set[Any]] = {}
    cached = {Tier.G1: manager.pool.cached_blocks()}
    cached |= {tier.store.tier: tier.store.pool.cached_blocks() for tier in offload.tiers if not tier.shared}
    for tier, blocks in cached.items():
        for group, key, _ in blocks:
            found.setdefault((group, tier), set()).add(key)
    return found
