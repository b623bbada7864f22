"""The difference between counted and owed hits, on all requests or on the first ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.owed import Replayed, endless_hits, replay_traffic
from kvyard.lab.expect.reuse import Reuse
from kvyard.lab.expect.traffic import Tokens, Traffic
from kvyard.replay.report.plain_cache import plainly_lru
from kvyard.replay.traces import TraceRequest

SAMPLED = 1 / 16
"""Share of a difference, or of requests where only sums were counted, that a sample has."""
SAMPLED_REQUESTS = 500
"""Requests of the smallest sample."""


class Difference:
    """Counts beside what is owed."""

    def __init__(
        self,
        traffic: Traffic,
        settings: Mapping[str, object],
        replayed: Replayed,
        counted: Counted,
        evidence: set[str],
        tolerance: float,
    ) -> None:
        self.traffic = traffic
        self.settings = settings
        self.replayed = replayed
        self.counted = counted
        self.evidence = evidence
        """Codes of causes that something else has shown."""
        self.tolerance = tolerance
        """Share of prompt tokens by which counts may differ."""
        counts = [counted.by_request.get(request.id, -1) for request in traffic.requests]
        self.all_counts = np.array(counts, dtype=np.int64)
        """By request, -1 for one without a count."""
        if counted.warmed:
            self.all_counts = np.minimum(self.all_counts, replayed.hits)
        self.lengths = np.array([request.input_length for request in traffic.requests], dtype=np.int64)
        self._reuse: dict[str | None, Reuse] = {}
        self._replays: dict[frozenset[tuple[str, object]], Tokens | None] = {}

    @property
    def by_request(self) -> bool:
        """True if counts of requests are compared one by one, and not only their sum."""
        return bool(self.counted.by_request) and bool((self.all_counts >= 0).any())

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """True for requests that are compared."""
        return self.replayed.admitted & (self.all_counts >= 0) if self.by_request else self.replayed.admitted

    @property
    def prompts(self) -> int:
        """Prompt tokens of requests that are compared."""
        return int(self.lengths[self.known].sum())

    @property
    def total(self) -> int:
        """Tokens counted for requests that are compared."""
        return int(self.all_counts[self.known].sum()) if self.by_request else self.counted.total

    @property
    def owed(self) -> int:
        """Tokens owed to requests that are compared."""
        return int(self.replayed.hits[self.known].sum())

    @property
    def missing(self) -> int:
        """Tokens owed less tokens counted."""
        return self.owed - self.total

    @property
    def configured_on(self) -> bool:
        """True if prefix caching is on in the configuration."""
        return self.replayed.run.fleet.config.workers[0].engine.enable_prefix_caching

    @property
    def counts(self) -> Tokens:
        """Counts of requests that are compared one by one."""
        return self.all_counts[self.known]

    @property
    def block_size(self) -> int:
        """Tokens that hits of the configured engine are multiples of."""
        return math.lcm(*(spec.block_size for spec in self.replayed.run.fleet.config.workers[0].engine.specs))

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest request that was admitted."""
        sizes = [
            row.input_length + row.output_length
            for row, hits in zip(self.traffic.requests, self.replayed.hits, strict=True)
            if hits >= 0
        ]
        return ceil_div(max(sizes, default=1), self.block_size)

    @property
    def better_routed(self) -> bool:
        """True if a fleet counted more than its replay, and no more than one worker with room for everything would."""
        config = self.replayed.run.fleet.config
        if self.missing >= 0 or sum(kind.count * kind.dp_size for kind in config.workers) < 2:
            return False
        most = endless_hits(self.traffic.requests, config.workers[0].engine)[self.known]
        return bool((self.counts <= most).all()) if self.by_request else self.total <= int(most.sum())

    def distance(self, hits: Tokens) -> int:
        """Return tokens by which ``hits`` differ from the counts."""
        known = np.maximum(hits[self.known], 0)
        return int(np.abs(known - self.counts).sum()) if self.by_request else abs(int(known.sum()) - self.total)

    def unexplained(self, hits: Tokens) -> float:
        """Return share of the difference that is left if the engine's hits are ``hits``; above 1 if they are farther off."""
        return self.distance(hits) / max(1, self.distance(self.replayed.hits))

    def replay(self, **changed: object) -> Tokens | None:
        """Return hits with other settings, those that are ``None`` left out; ``None`` if they are impossible."""
        key = frozenset(changed.items())
        if key not in self._replays:
            self._replays[key] = self._replay(self.traffic.requests, changed)
        return self._replays[key]

    def replay_sessions_apart(self) -> Tokens | None:
        """Return hits of an engine in which sessions share nothing with each other."""
        requests = [replace(row, salt=f"{row.salt or ''} {row.session}") for row in self.traffic.requests]
        return self._replay(requests, {})

    def replay_from(self, start: int) -> Tokens | None:
        """Return hits of the requests from ``start`` on, in a cache that is empty before them."""
        requests = [replace(row, delay=None, after=()) for row in self.traffic.requests[start:]]
        return self._replay(requests, {})

    def replay_without_answers(self) -> Tokens | None:
        """Return hits of an engine that finds no answer again."""
        return self._replay([replace(request, output_tokens=None) for request in self.traffic.requests], {})

    def _replay(self, requests: Sequence[TraceRequest], changed: Mapping[str, object]) -> Tokens | None:
        settings = {name: value for name, value in {**self.settings, **changed}.items() if value is not None}
        try:
            return replay_traffic(requests, settings).hits
        except KvyardError:
            return None

    def sample(self) -> Difference:
        """Return the difference of the first requests, on which causes are tried: a cache's hits don't depend on what comes
        later.

        With counts per request, a sample has ``SAMPLED`` of the difference. A sum is scaled by what the sample is owed.
        """
        requests = len(self.traffic.requests)
        if self.by_request:
            apart = np.where(self.known, np.abs(np.maximum(self.replayed.hits, 0) - self.all_counts), 0).cumsum()
            enough = int(np.searchsorted(apart, SAMPLED * apart[-1])) + 1
        else:
            enough = round(SAMPLED * requests)
        count = max(enough, SAMPLED_REQUESTS)
        if 2 * count > requests:
            return self
        hits = self.replayed.hits[:count]
        counted = self.counted
        if not self.by_request:
            share = int(np.maximum(hits, 0).sum()) / max(1, self.owed)
            counted = replace(
                counted, hits=round(counted.hits * share), external_hits=round(counted.external_hits * share)
            )
        traffic = replace(self.traffic, requests=self.traffic.requests[:count])
        replayed = replace(self.replayed, hits=hits)
        return Difference(traffic, self.settings, replayed, counted, self.evidence, self.tolerance)

    def reuse(self, policy: str | None = None) -> Reuse:
        """Return reuse of the prompts as they were routed, or about as ``policy`` routes them without looking at caches."""
        if policy not in self._reuse:
            requests = {request.id: request for request in self.traffic.requests}
            records = [record for record in self.replayed.run.records if record.admitted >= 0 and record.id in requests]
            records.sort(key=lambda record: record.admitted)
            places = [record.prefilled_by for record in records]
            if policy is not None:
                names, random = sorted(set(places)), Random(0)
                places = [
                    names[number % len(names)] if policy == "round-robin" else random.choice(names)
                    for number in range(len(records))
                ]
            prompts = [(requests[record.id], place) for record, place in zip(records, places, strict=True)]
            self._reuse[policy] = Reuse(prompts, self.block_size)
        return self._reuse[policy]

    @property
    def reuse_tells(self) -> bool:
        """True if reuse distances say about what other blocks, pools or routers find: caches are plain LRU."""
        config = self.replayed.run.fleet.config
        return plainly_lru(config) and all(kind.engine.tiers is None for kind in config.workers)

    def guess(self, *, block_size: int | None = None, policy: str | None = None) -> int:
        """Return about the tokens counted if blocks were of another size or another policy routed."""
        configured = self.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
        tokens, size = configured * self.block_size, block_size or self.block_size
        owed = max(1, self.reuse().hits(configured, self.block_size))
        return round(self.owed * self.reuse(policy).hits(max(1, tokens // size), size) / owed)

    def pool_guess(self) -> int:
        """Return blocks of a pool with about the counted hits."""
        blocks = self.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
        return self.reuse().blocks(self.total / max(1, self.owed), blocks, self.block_size)
