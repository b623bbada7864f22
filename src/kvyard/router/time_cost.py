"""The cost model of ``least-time``: estimated milliseconds to the first token, per worker. The policy explains each term."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

from kvyard.clock import MS
from kvyard.index.bits import mask_of
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.worker import WorkerLoad

MS_PER_S: Final = 1000
_CERTAIN: Final = 1 - 1e-9
"""A bound is a sum in another order than the cost is: this share of it is certain."""
_ROUNDED: Final = 1e-3
"""Milliseconds by which a worker may be done before that was worked out, by rounding."""


class TimeCost:
    """The cost of one request, worker by worker."""

    def __init__(
        self, routing: RoutingInput, computed: Sequence[float], total: float, options: Mapping[str, float]
    ) -> None:
        """``computed`` is, by slot, the new content of each worker, and ``total`` that of all workers that may be chosen."""
        self._now = routing.now
        self._tokens = routing.num_tokens
        self._size = routing.loads.block_size
        self._computed = computed
        self._interference = options["interference"] / max(1.0, routing.mean_requests)
        self._blocking = options["blocking"] / MS_PER_S
        self._renewal = options["renewal"] * len(routing.workers) / total if total else 0.0
        self._stickiness = options["stickiness"]
        self._crowded = _crowded(routing)
        self._kept = _kept(routing, self._crowded)
        """The most tokens that any worker has and can keep."""
        self._used = min(self._kept, routing.most_shared_blocks * self._size)
        """Part of those that requests in flight share."""
        self._match: Match | None = None
        """The latest that was asked about; the figures below are the same for all its workers."""
        self._pace = routing.workers[0].pace
        self._own = 0.0
        """The prompt's own prefill,"""
        self._past = 0.0
        """the part of it that attention to cached tokens takes,"""
        self._copy = 0.0
        """the cost of a second copy,"""
        self._load = 0.0
        """the load from lower tiers,"""
        self._passes_ms = 0.0
        """and the least time of those who decode in the passes that compute it."""

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return milliseconds."""
        if match is not self._match:
            self._look_at(match)
        if self._crowded:
            without = self._crowded.get(worker.slot)
            if without is not None:
                return self._cost_without_room(worker, without)
        return self._sum(worker, match.new_tokens, self._own, self._past, 0.0) + self._copy

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        """Return milliseconds that no worker with this ``rank`` or more costs less than: all terms that are left out are times,
        and so 0 or more.
        """
        if self._crowded:
            return -inf
        if match is not self._match:
            self._look_at(match)
        own, requests, ahead = self._own, bucket >> 1, 0.0
        if bucket & 1:
            ahead, figure = max(0.0, (figure - self._now) / MS - _ROUNDED), 0.0
        weight = 1.0 + (self._interference + self._blocking * own) * requests + self._renewal * figure
        bound = weight * own + self._copy
        if requests:
            bound += self._passes_ms
        return (bound * _CERTAIN if bound > 0 else bound / _CERTAIN) + ahead

    def _look_at(self, match: Match) -> None:
        pace = match.pace
        assert pace is not None
        self._match, self._pace = match, pace
        new = match.new_tokens
        self._past = pace.past(new, match.cached_tokens)
        self._own = pace.prefill(new) + self._past
        self._copy = self._copy_ms(match.cached_tokens)
        self._load = pace.load(match.tiers[1:]) if len(match.tiers) > 1 else 0.0
        self._passes_ms = pace.passes(new) * pace.least_step

    def _sum(self, worker: WorkerLoad, new: int, own: float, past: float, room: float) -> float:
        """Return the cost without that of a second copy."""
        pace, waiting, requests = self._pace, worker.prefill_tokens, worker.requests
        wait = 0.0
        if waiting:
            behind = pace.prefill(waiting + new) + past - own + worker.past_ms
            wait = max(0.0, behind - (self._now - worker.computing_since) / MS)
        if requests:
            wait += pace.passes(waiting + new) * pace.step(requests, worker.blocks * self._size)
        if self._load > wait:
            wait = self._load
        weight = (
            1.0 + (self._interference + self._blocking * own) * requests + self._renewal * self._computed[worker.slot]
        )
        return wait + room + weight * own

    def _cost_without_room(self, worker: WorkerLoad, without: "WithoutRoom") -> float:
        pace, tokens, has = self._pace, self._tokens, without.cached_tokens
        new = tokens - has
        past = pace.past(new, has)
        cost = self._sum(worker, new, pace.prefill(new) + past, past, without.room_ms) + self._copy_ms(has)
        beyond = without.beyond_tokens
        return cost + self._stickiness * (pace.prefill(beyond) + pace.past(beyond, tokens - beyond))

    def _copy_ms(self, has: int) -> float:
        """Return the cost of computing what a worker with ``has`` tokens lacks and another one keeps."""
        pace, tokens, kept = self._pace, self._tokens, self._kept
        if has >= kept:
            return 0.0
        lacks = tokens - max(has, self._used)
        again = pace.prefill(lacks) + pace.past(lacks, tokens - lacks)
        return self._stickiness * (again - pace.prefill(tokens - kept) - pace.past(tokens - kept, kept))


class WithoutRoom(NamedTuple):
    """A worker at which the prompt doesn't fit beside those in flight."""

    cached_tokens: int
    """Cached part of the prompt for which there is room,"""
    room_ms: float
    """how long until there is room for all of it,"""
    beyond_tokens: int
    """and the tokens that there is none for."""


def _crowded(routing: RoutingInput) -> dict[int, WithoutRoom]:
    """Return workers that may be chosen and have no room for the prompt, by slot."""
    loads, prompt = routing.loads, routing.blocks
    capacities = [pace.capacity for pace, _ in routing.speeds if pace.capacity is not None]
    if not capacities or loads.most_blocks(prompt, min(capacities)) + prompt <= min(capacities):
        return {}
    out: dict[int, WithoutRoom] = {}
    for worker in routing.workers:
        capacity, held = worker.pace.capacity, worker.blocks
        if capacity is None or held + prompt <= capacity or not worker.requests:
            continue
        free = capacity - held + routing.shared_blocks(worker.slot)
        if free < prompt:
            cached = routing.match_of(worker.slot).cached_tokens
            out[worker.slot] = WithoutRoom(
                max(0, min(cached, free * loads.block_size)),
                routing.mean_age_ms(worker),
                min(routing.num_tokens, (prompt - free) * loads.block_size),
            )
    return out


def _kept(routing: RoutingInput, crowded: Mapping[int, WithoutRoom]) -> int:
    """Return the most cached tokens of a worker that has room for the prompt."""
    matches = routing.matches
    if crowded:
        full = mask_of(crowded)
        matches = [match for match in matches if match.slots & ~full]
    return max([match.cached_tokens for match in matches], default=0)


def time_rank(worker: WorkerLoad, computed: float) -> tuple[int, float]:
    """Return the rank of a worker with this much new content: two buckets for each number of requests. The first is for workers
    that compute no prompt, by their new content; the second for those that do, by when they may be done.
    """
    bucket, waiting = 2 * worker.requests, worker.prefill_tokens
    if not waiting:
        return bucket, computed
    least_ms = worker.pace.least_per_token * waiting + worker.past_ms
    return bucket + 1, worker.computing_since + least_ms * MS
