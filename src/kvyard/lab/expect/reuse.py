"""Approximate hits in LRU caches of any size, from reuse distances and without a replay."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.bounds import Accesses
from kvyard.replay.traces.identity import prefix_ids

Numbers = npt.NDArray[np.int64]


class Reuse:
    """Prompts in the order of their look-ups, reduced to what they share and to the blocks touched between."""

    def __init__(self, prompts: Iterable[tuple[TraceRequest, str]], block_size: int) -> None:
        """``prompts`` are requests, each with the name of the cache that it is looked up in."""
        caches: dict[str, Accesses] = {}
        columns: list[list[Numbers]] = [[], [], []]
        lengths: dict[str, list[int]] = {}
        self._unit = block_size
        for request, place in prompts:
            ids, per_id = prefix_ids(request, block_size)
            self._unit = per_id or self._unit
            caches.setdefault(place, Accesses()).add(ids or (), request.input_length, self._unit)
            lengths.setdefault(place, []).append(request.input_length)
        before = 0
        for cache in caches.values():
            prompt, distance, tokens = (
                np.array(column, dtype=np.int64) for column in (cache.prompt, cache.distance, cache.length_tokens)
            )
            for column, values in zip(columns, (prompt + before, distance, tokens), strict=True):
                column.append(values)
            before += cache.prompts
        self._prompt, self._distance, self._tokens = (np.concatenate(column) for column in columns)
        self._lengths = np.array([length for place in caches for length in lengths[place]], dtype=np.int64)

    def hits(self, blocks: int, block_size: int) -> int:
        """Return the tokens found in caches of ``blocks`` blocks each."""
        there = self._distance < blocks * block_size // self._unit
        tokens = np.bincount(self._prompt[there], self._tokens[there], len(self._lengths)).astype(np.int64)
        return int((np.minimum(tokens, self._lengths - 1) // block_size * block_size).sum())

    def blocks(self, share: float, most: int, block_size: int) -> int:
        """Return blocks of caches that find ``share`` of what caches of ``most`` blocks find."""
        order = np.argsort(self._distance)
        reach = self._distance[order] * self._unit // block_size
        cumulated = self._tokens[order].cumsum()
        within = int(np.searchsorted(reach, most))
        if not within:
            return most // 2
        index = min(int(np.searchsorted(cumulated, cumulated[within - 1] * min(1.0, share))), within - 1)
        return min(max(1, int(reach[index])), most - 1)
