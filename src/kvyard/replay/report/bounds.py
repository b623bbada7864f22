"""Upper bounds of reuse on the requests of a run.

They need a second pass over the trace with all its ids in memory, so they are computed only on request (``--bounds``). Bounds
are in tokens: the cache may keep any tokens that fit, and prompts are computed the instant they arrive. A real cache keeps
whole blocks, and running requests take room in it, so it stays below each bound.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvyard.replay.report.numbers import Share, share
from kvyard.replay.report.plain_cache import PlainCache, absent_levels, plainly_lru
from kvyard.replay.traces.bounds import Accesses, belady, infinite
from kvyard.replay.traces.identity import prefix_ids, token_ids
from kvyard.replay.traces.request import TraceRequest

if TYPE_CHECKING:
    from kvyard.engine.core import EngineCore
    from kvyard.replay.fleet import Fleet

BOUNDS = {
    "infinite": "Endless cache, shared by all",
    "belady": "Ideal eviction, one cache as large as all together",
    "routed_infinite": "Endless cache per worker, routed as it was",
    "routed_belady": "Ideal eviction per worker, routed as it was",
}
"""Bounds, in words; caches are as large as the tiers of a worker together."""
PLAIN = {
    "pooled": "This eviction, one cache as large as all together",
    "routed": "This eviction per worker, routed as it was",
}
"""Caches of the same kind in which nothing runs. They bound nothing; they distinguish a loss by eviction from one by
routing."""
WORDS = BOUNDS | PLAIN


def make_bounds(fleet: Fleet, requests: Iterable[TraceRequest]) -> dict[str, Share]:
    """Return the ``BOUNDS`` and ``PLAIN`` caches of what ``fleet`` has run, ``requests`` being its trace once more.

    Prompts are looked up in the order of their first admissions. Traces of tokens are cut into blocks of the fleet's
    size, and their answers can be reused too. Bounds without a meaning for this fleet are left
    out (``absent_levels``). Raises ``KvyardError`` for ids that aren't cumulative.
    """
    config = fleet.config
    plainly, absent = plainly_lru(config), absent_levels(config)
    size = min(spec.block_size for spec in config.workers[0].engine.specs)
    rows = []
    admitted = {record.id: record for record in fleet.records.values() if record.admitted >= 0}
    for number, request in enumerate(requests):
        record = admitted.get(request.id)
        if record is not None:
            ids, per_id = prefix_ids(request, size)
            answered = ids
            if request.ids is None and request.tokens is not None and request.output_tokens:
                answered = token_ids([*request.tokens, *request.output_tokens], size)
            row = (record.admitted, number, record.prefilled_by, ids or (), answered or (), per_id or 1, record.input)
            rows.append((*row, None if plainly else request))
    rows.sort(key=lambda row: row[:2])
    whole = sum(row[-2] for row in rows)
    together = _PromptLookups()
    apart: dict[str, _PromptLookups] = {}
    for _, _, worker, ids, answered, per_id, length, _ in rows:
        together.add(ids, answered, per_id, length)
        apart.setdefault(worker, _PromptLookups()).add(ids, answered, per_id, length)
    rooms = {
        (worker.name if len(worker.cores) == 1 else f"{worker.name}@{rank}"): _rooms(core)
        for worker in fleet.used
        if worker.role != "decode" or worker.recorders[0].computed
        for rank, core in enumerate(worker.cores)
    }
    every = [pool for room in rooms.values() for pool in room]
    room = sum(dict(every).values())
    bounds = {"infinite": together.endless}
    if "belady" not in absent:
        bounds["belady"] = together.ideal(room)
    apart_rooms = {name: sum(tokens for _, tokens in rooms[name]) for name in apart}
    if plainly:
        bounds["pooled"] = together.lru(room)
    if len(dict(every)) == len(every):
        bounds["routed_infinite"] = sum(prompts.endless for prompts in apart.values())
        if "belady" not in absent:
            bounds["routed_belady"] = sum(prompts.ideal(apart_rooms[name]) for name, prompts in apart.items())
        if plainly:
            bounds["routed"] = sum(prompts.lru(apart_rooms[name]) for name, prompts in apart.items())
    if not plainly:
        bounds |= _managed(fleet, [(instant, worker, request) for instant, _, worker, *_, request in rows], absent)
    return {
        name: share(
            bounds[name], whole, f"prompt tokens reused ({WORDS[name].lower()}) / prompt tokens of admitted requests"
        )
        for name in bounds
    }


def _managed(
    fleet: Fleet, rows: Sequence[tuple[int, str, TraceRequest | None]], absent: Mapping[str, str]
) -> dict[str, int]:
    """Return the ``PLAIN`` caches by simulation, as far as they aren't ``absent``."""
    pools = {
        (worker.name if len(worker.cores) == 1 else f"{worker.name}@{rank}"): (kind.engine, core)
        for worker, kind in zip(
            fleet.workers,
            (kind for kind in fleet.config.workers for _ in range(fleet.config.made_of(kind))),
            strict=False,
        )
        for rank, core in enumerate(worker.cores)
    }
    blocks = {name: core.scheduler.manager.pool.num_blocks - 1 for name, (_, core) in pools.items()}
    caches: dict[str, list[PlainCache]] = {}
    if "pooled" not in absent:
        pooled = PlainCache(fleet.config.workers[0].engine, sum(blocks.values()))
        for instant, _, request in rows:
            assert request is not None
            pooled.add(request, instant)
        caches["pooled"] = [pooled]
    if "routed" not in absent:
        apart = {name: PlainCache(engine, blocks[name]) for name, (engine, _) in pools.items()}
        for instant, worker, request in rows:
            assert request is not None
            apart[worker].add(request, instant)
        caches["routed"] = list(apart.values())
    return {name: sum(cache.found for cache in listed) for name, listed in caches.items()}


class _PromptLookups:
    """Look-ups of prompts in one cache, in order."""

    def __init__(self) -> None:
        self._accesses = Accesses()
        self._answers = 0
        """Tokens found again only because a prompt is touched once more with its answer."""
        self._answered: set[int] = set()
        """Look-ups that were touches of that kind."""
        self._per_id = 1

    def add(self, ids: Sequence[int], answered: Sequence[int], per_id: int, length: int) -> None:
        """Add a prompt, and what later prompts can reuse of it once it is answered."""
        self._accesses.add(ids, length, per_id)
        self._per_id = per_id
        if answered is not ids:
            self._answered.add(self._accesses.prompts)
            self._answers += self._accesses.add(answered, None, per_id) * per_id

    @property
    def endless(self) -> int:
        """Tokens that a cache with room for everything reuses."""
        return infinite(self._accesses).tokens - self._answers

    def lru(self, tokens: int) -> int:
        """Return the tokens that a cache of ``tokens`` tokens reuses which evicts the least recently used first."""
        accesses, room = self._accesses, tokens // self._per_id
        return sum(
            length
            for length, distance, prompt in zip(accesses.length_tokens, accesses.distance, accesses.prompt, strict=True)
            if distance < room and prompt not in self._answered
        )

    def ideal(self, tokens: int) -> int:
        """Return the most tokens that a cache of ``tokens`` tokens could reuse: Belady's bound with tokens for blocks."""
        view = copy.copy(self._accesses)
        view.length = view.length_tokens
        return belady(view, [tokens])[0] - self._answers


def _rooms(core: EngineCore) -> list[tuple[int, int]]:
    """Return the pools of all tiers of a rank, each with the tokens it holds; a shared one has the same name everywhere."""
    size = max(group.block_size for group in core.scheduler.manager.groups)
    pool = core.scheduler.manager.pool
    rooms = [(id(pool), (pool.num_blocks - 1) * size)]
    if core.offload is not None:
        chunk = core.offload.layout.chunk * size
        rooms += [(id(store), pages * chunk) for store, pages in core.offload.rooms()]
    return rooms
