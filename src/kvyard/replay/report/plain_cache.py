"""A cache of the fleet's own kind without a clock: what its eviction and its attention groups find of prompts that come one
after the other and are computed at once.

It tells what is lost by eviction from what is lost by routing. A plain LRU over one group of full attention is counted without
any cache (``bounds``); everything else goes through the block manager itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvyard.blocks.coordinator import Hit
from kvyard.engine.build import make_manager
from kvyard.engine.job import Job
from kvyard.engine.policies.chunks import ChunkSizes
from kvyard.hashing import PLAIN, Namespace, TokenChain, TraceChain, algorithm
from kvyard.replay.facts import TraceFacts, heeded, hints_of

if TYPE_CHECKING:
    from kvyard.engine.config import EngineConfig
    from kvyard.replay.config import ReplayConfig
    from kvyard.replay.traces.request import TraceRequest


class PlainCache:
    """One block manager; a prompt holds its blocks only while it is looked up."""

    def __init__(self, engine: EngineConfig, blocks: int) -> None:
        self.found = 0
        """Prompt tokens that were there."""
        self._now = 0
        self._own = 0
        self._step = engine.tokens_per_pass
        self._facts = TraceFacts() if engine.reads_facts else None
        self._size = min(spec.block_size for spec in engine.specs)
        alone = replace(engine, num_gpu_blocks=blocks, watermark=0.0, tiers=None)
        self._manager = make_manager(alone, lambda: self._now)
        self._chunks = ChunkSizes(alone, self._manager.geometry, always=False)

    def add(self, row: TraceRequest, now: int) -> None:
        """Look a prompt up, compute the rest of it in passes of its own, and let it go."""
        self._now = now
        self._own += 1
        manager = self._manager
        hints = heeded(hints_of(row), manager)
        sample = None if row.tokens is None or row.ids is not None else _nothing
        request = Job(row.id, _chain(row, self._size, self._own), 1, hints=hints, sample=sample)
        if self._facts is not None:
            request.facts = self._facts.of(row)
        manager.begin_step()
        hit: Hit | None = manager.lookup(request)
        position = hit.tokens if hit is not None else 0
        self.found += position
        while new := self._chunks.cut(request, position, self._step):
            if manager.allocate(request, new, hit) is None:
                break  # no cache of this size has room for it at once
            hit = None
            position += new
            request.num_computed_tokens = position
            request.running = True
            manager.begin_step()
        if request.id in manager.requests:
            manager.free(request)


def _nothing(start: int, stop: int) -> list[int]:
    """Return tokens of an answer: only its prompt is computed here."""
    return [0] * (stop - start)


def _chain(row: TraceRequest, size: int, own: int) -> TraceChain | TokenChain:
    space = PLAIN if row.lora is None and row.salt is None else Namespace(lora_name=row.lora, salt=row.salt)
    if row.ids is not None:
        return TraceChain(row.ids, row.id_block_size, row.input_length, size, own, space)
    if row.tokens is not None:
        return TokenChain(list(row.tokens), size, algorithm("xxh3"), space)
    chain = TraceChain((), 1, 0, size, own)
    chain.grow(row.input_length)
    return chain


def all_full(config: ReplayConfig) -> bool:
    """Return true if every worker has attention over all earlier tokens alone."""
    return all(spec.attention.is_full for kind in config.workers for spec in kind.engine.specs)


def plainly_lru(config: ReplayConfig) -> bool:
    """Return true if all caches evict the least recently used block of one group: then none need be simulated."""
    engines = [kind.engine for kind in config.workers]
    orders = {engine.eviction for engine in engines}
    orders |= {tier.eviction for engine in engines if engine.tiers is not None for tier in engine.tiers.tiers}
    if any(engine.heed_hints for engine in engines):
        return False
    return orders == {"lru"} and all(len(engine.specs) == 1 for engine in engines) and all_full(config)


def absent_levels(config: ReplayConfig) -> dict[str, str]:
    """Return the levels of the waterfall that this fleet's bounds leave out, and why."""
    absent: dict[str, str] = {}
    engines = [kind.engine for kind in config.workers]
    if not all(any(spec.attention.is_full for spec in engine.specs) for engine in engines):
        absent["belady"] = (
            "without full attention a prefix needs only the last of its blocks, so room in tokens bounds nothing"
        )
    if not plainly_lru(config):
        if any(engine.needs_future is not None for engine in engines):
            why = "the fleet's eviction is ideal itself, as far as one worker can know"
            absent["pooled"] = absent["routed"] = why
        elif any(engine.tiers is not None for engine in engines):
            why = "lower tiers with this eviction or this model's groups can't be put together into one cache"
            absent["pooled"] = absent["routed"] = why
        elif len({(engine.specs, engine.eviction, engine.block_size) for engine in engines}) > 1:
            absent["pooled"] = "workers evict in different orders or have different groups"
    if any(tier.scope == "shared" for engine in engines if engine.tiers is not None for tier in engine.tiers.tiers):
        absent["routed"] = "workers share a tier, so it doesn't matter alone which of them has what"
    return absent
