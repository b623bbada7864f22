"""What least time costs at each worker, apart from the policy so that it can be compiled; the policy says what each term is."""

from bisect import bisect_left
from typing import Final

from kvyard.clock import MS
from kvyard.index.places import bits
from kvyard.router.active import COMPUTING
from kvyard.router.inputs import Choice, RoutingInput, least_of
from kvyard.router.pace import ModelPace, Pace
from kvyard.router.ranking import FEW, Levels, classes, lowest, most

MS_PER_S: Final = 1000
_ALMOST: Final = 1 - 1e-9
"""A bound is a sum in another order than the cost is: so much of it is certain."""
_ROUNDED: Final = 1e-3
"""Milliseconds by which a worker may be done before that was worked out, by rounding."""


class TimeCost:
    """The cost of one request, worker by worker."""

    def __init__(
        self,
        at: RoutingInput,
        computed: list[float],
        total: float,
        interference: float,
        blocking: float,
        renewal: float,
        stickiness: float,
    ) -> None:
        """``computed`` is by slot what was computed there lately, and ``total`` that of all that may be chosen."""
        self._at = at
        self._loads = at.loads
        self._tokens = at.request.num_tokens
        self._size = at.loads.block_size
        self._computed = computed
        self._interference = interference
        self._blocking = blocking / MS_PER_S
        self._renewal = renewal * len(at.slots) / total if total else 0.0
        self._stickiness = stickiness
        self._kept = 0
        """The most tokens that any worker has and can keep."""
        self._used = 0
        """Of those, what requests under way share."""
        self._least_step = 0.0
        """No pass takes less that decodes what is under way."""

    def all(self) -> list[float]:
        """Per worker that may be chosen, milliseconds."""
        at, slots = self._at, self._at.slots
        overlaps, paces, requests = at.overlaps, at.paces, self._loads.requests
        cached, rooms, beyond, self._kept = _caches(at)
        shared = at.shared
        self._used = min(self._kept, max([shared[slot] for slot in slots]) * self._size) if shared is not None else 0
        self._interference /= max(1.0, sum([requests[slot] for slot in slots]) / len(slots))
        lower = overlaps is not None and len(overlaps.tiers) > 1
        costs = []
        for place, slot in enumerate(slots):
            pace = paces[slot]
            load = pace.load(overlaps.at(slot)[1:]) if lower and overlaps is not None else 0.0
            costs.append(self._one(pace, slot, cached[place], load, rooms[place], beyond[place]))
        return costs

    def least(self, pace: Pace, why: str) -> Choice:
        """The least of all, each worker being equally fast and having room for the prompt: what ``all`` has least.

        It takes workers by requests and by what was computed there, those that still compute prompts by when these may be
        done, and goes on for as long as another could cost less.
        """
        at, loads, ranking = self._at, self._loads, self._loads.ranking
        assert ranking is not None
        requests = loads.total - sum([loads.requests[slot] for slot in at.closed()])
        self._interference /= max(1.0, requests / len(at.slots))
        levels: Levels = at.prefixes.levels if at.prefixes is not None else []
        self._kept = at.tokens_of(most(levels, at.among)[0])
        self._used = min(self._kept, most(at.shared_levels, at.among)[0] * self._size)
        self._least_step = pace.least_step if isinstance(pace, ModelPace) else 0.0
        ranks, masks = ranking.ranks, ranking.masks
        idle = bisect_left(ranks, (COMPUTING, -1.0))
        best, found = -1.0, 0
        for blocks, holders in classes(levels, at.among):
            has = at.tokens_of(blocks) if blocks else 0
            if holders.bit_count() <= FEW:
                for slot in bits(holders):
                    cost = self._one(pace, slot, has, 0.0, 0.0, 0)
                    if not found or cost < best:
                        best, found = cost, 1 << slot
                    elif cost == best:
                        found |= 1 << slot
                continue
            own, more = self._own(pace, has)
            place = 0
            while place < idle:
                count, new = rank = ranks[place]
                if found and self._at_least(own, more, count, 0.0) > best:
                    break
                if found and self._at_least(own, more, count, new) > best:
                    place = bisect_left(ranks, (count + 1, -1.0))
                    continue
                place += 1
                alike = masks[rank] & holders
                if not alike:
                    continue
                # Those without any request differ in nothing else.
                for slot in bits(alike) if count and alike & alike - 1 else (lowest(alike),):
                    cost = self._one(pace, slot, has, 0.0, 0.0, 0)
                    mine = 1 << slot if count else alike
                    if not found or cost < best:
                        best, found = cost, mine
                    elif cost == best:
                        found |= mine
            least = self._at_least(own, more, 1, 0.0)
            for place in range(idle, len(ranks)):
                rank = ranks[place]
                ahead = max(0.0, (rank[1] - at.now) / MS - _ROUNDED)
                if found and least + ahead > best:
                    break
                alike = masks[rank] & holders
                if not alike:
                    continue
                for slot in bits(alike) if alike & alike - 1 else (lowest(alike),):
                    bound = self._at_least(own, more, loads.requests[slot], self._computed[slot])
                    if found and bound + ahead > best:
                        continue
                    cost = self._one(pace, slot, has, 0.0, 0.0, 0)
                    if not found or cost < best:
                        best, found = cost, 1 << slot
                    elif cost == best:
                        found |= 1 << slot
        return least_of(found, best, at.rng, why)

    def _one(self, pace: Pace, slot: int, has: int, load: float, room: float, beyond: int) -> float:
        """The milliseconds of a worker that needn't compute ``has`` tokens, takes ``load`` to load others, has room after
        ``room``, and none for ``beyond`` tokens.
        """
        loads, tokens, kept = self._loads, self._tokens, self._kept
        waiting, requests = loads.prefill[slot], loads.requests[slot]
        new = tokens - has
        past = pace.past(new, has)
        own = pace.prefill(new) + past
        wait = 0.0
        if waiting:
            behind = pace.prefill(waiting + new) + past - own + loads.past[slot]
            wait = max(0.0, behind - (self._at.now - loads.computing_since[slot]) / MS)
        if requests:
            wait += pace.passes(waiting + new) * pace.step(requests, loads.blocks[slot] * self._size)
        if load > wait:
            wait = load
        weight = 1.0 + (self._interference + self._blocking * own) * requests + self._renewal * self._computed[slot]
        cost = wait + room + weight * own
        if has < kept:
            lacks = tokens - max(has, self._used)
            again = pace.prefill(lacks) + pace.past(lacks, tokens - lacks)
            cost += self._stickiness * (again - pace.prefill(tokens - kept) - pace.past(tokens - kept, kept))
        if beyond:
            cost += self._stickiness * (pace.prefill(beyond) + pace.past(beyond, tokens - beyond))
        return cost

    def _own(self, pace: Pace, has: int) -> tuple[float, float]:
        """Of ``_one``, what is the same for all that have ``has`` tokens and room: the prompt's own prefill, which is weighted,
        and what its copy costs.
        """
        tokens, kept = self._tokens, self._kept
        own = pace.prefill(tokens - has) + pace.past(tokens - has, has)
        if has >= kept:
            return own, 0.0
        lacks = tokens - max(has, self._used)
        again = pace.prefill(lacks) + pace.past(lacks, tokens - lacks)
        return own, self._stickiness * (again - pace.prefill(tokens - kept) - pace.past(tokens - kept, kept))

    def _at_least(self, own: float, more: float, requests: int, computed: float) -> float:
        """No worker with at least so many requests, and at least so much computed lately, costs less: all other terms of
        ``_one`` are times, and so 0 or more.
        """
        weight = 1.0 + (self._interference + self._blocking * own) * requests + self._renewal * computed
        bound = weight * own + more
        if requests:
            bound += self._least_step  # there is at least one pass to take together
        return bound * _ALMOST if bound > 0 else bound / _ALMOST


def _caches(at: RoutingInput) -> tuple[list[int], list[float], list[int], int]:
    """Per worker that may be chosen the tokens it needn't compute, the milliseconds until there is room for the prompt, and
    the tokens for which there is none; and the most tokens that any worker has and can keep.
    """
    loads, shared = at.loads, at.shared
    cached = [at.cached(slot) for slot in at.slots]
    kept = max(cached)
    rooms, beyond = [0.0] * len(cached), [0] * len(cached)
    full = False
    blocks, prompt, paces = loads.blocks, at.blocks, at.paces
    for place, slot in enumerate(at.slots):
        capacity = paces[slot].capacity
        if capacity is None or blocks[slot] + prompt <= capacity or not loads.requests[slot]:
            continue
        free = capacity - blocks[slot] + (shared[slot] if shared is not None else 0)
        if free < prompt:
            cached[place] = max(0, min(cached[place], free * loads.block_size))
            rooms[place] = loads.mean_age(slot, at.now) / MS
            beyond[place] = min(at.request.num_tokens, (prompt - free) * loads.block_size)
            full = True
    if full:
        kept = max([tokens for tokens, more in zip(cached, beyond) if not more], default=0)
    return cached, rooms, beyond, kept
