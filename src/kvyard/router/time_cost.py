"""What least time costs at each worker, apart from the policy so that it can be compiled; the policy says what each term is."""

from collections.abc import Sequence
from typing import Final

from kvyard.clock import MS
from kvyard.index.bits import bits
from kvyard.router.active import COMPUTING
from kvyard.router.inputs import Choice, RoutingInput, least_of
from kvyard.router.pace import ModelPace, Pace
from kvyard.router.ranking import FEW, Levels, as_bytes, is_in, lowest, most

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
        self._best = -1.0
        """The least cost so far,"""
        self._found = 0
        """and the slots, as bits, that have it; 0 for none."""

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

    def least(self, speeds: Sequence[tuple[Pace, int]], why: str) -> Choice:
        """The least of all, each worker having room for the prompt: what ``all`` has least. ``speeds`` are their paces, each
        with the slots, as bits, that have it.

        It takes workers by requests and by what was computed there, those that still compute prompts by when these may be
        done, and goes on for as long as another could cost less.
        """
        at, loads = self._at, self._loads
        requests = loads.total - sum([loads.requests[slot] for slot in at.closed()])
        self._interference /= max(1.0, requests / len(at.slots))
        levels: Levels = at.prefixes.levels if at.prefixes is not None else []
        self._kept = at.tokens_of(most(levels, at.among)[0])
        self._used = min(self._kept, most(at.shared_levels, at.among)[0] * self._size)
        for pace, members in speeds:
            self._least_step = pace.least_step if isinstance(pace, ModelPace) else 0.0
            mine = at.among if len(speeds) == 1 else at.among & members
            if not mine:
                continue
            for blocks, holders in at.prefixes.split(mine) if at.prefixes is not None else [((0,), mine)]:
                has = at.tokens_of(sum(blocks)) if at.prefixes is not None else 0
                load = pace.load(blocks[1:]) if len(blocks) > 1 else 0.0
                if holders.bit_count() <= FEW:
                    for slot in bits(holders):
                        self._note(self._one(pace, slot, has, load, 0.0, 0), slot)
                else:
                    self._walk(pace, has, load, holders)
        return least_of(self._found, self._best, at.rng, why)

    def _note(self, cost: float, slot: int) -> None:
        """``slot`` costs so much."""
        if not self._found or cost < self._best:
            self._best, self._found = cost, 1 << slot
        elif cost == self._best:
            self._found |= 1 << slot

    def _note_all(self, cost: float, slots: int) -> None:
        """All of the set ``slots`` cost so much."""
        if not self._found or cost < self._best:
            self._best, self._found = cost, slots
        elif cost == self._best:
            self._found |= slots

    def _walk(self, pace: Pace, has: int, load: float, holders: int) -> None:
        """Find the least of ``holders``: equally fast, with ``has`` tokens not to be computed, and ``load`` to load them."""
        ranking, now = self._loads.ranking, self._at.now
        assert ranking is not None
        own, more = self._own(pace, has)
        passes = pace.passes(self._tokens - has)
        if self._found and self._at_least(own, more, passes, 0, 0.0) > self._best:
            return
        row = as_bytes(holders)
        for count in ranking.order:
            if count == COMPUTING or (self._found and self._at_least(own, more, passes, count, 0.0) > self._best):
                break
            shelf = ranking.shelves[count]
            for figure, lone in zip(shelf.figures, shelf.lones):
                if self._found and self._at_least(own, more, passes, count, figure) > self._best:
                    break
                if lone >= 0:
                    if is_in(row, lone):
                        self._note(self._calm(pace, lone, own, more, passes, load), lone)
                    continue
                alike = shelf.many(figure) & holders
                if not alike:
                    continue
                if not count:  # those without any request differ in nothing else
                    self._note_all(self._calm(pace, lowest(alike), own, more, passes, load), alike)
                else:
                    for slot in bits(alike):
                        self._note(self._calm(pace, slot, own, more, passes, load), slot)
        computing = ranking.shelves.get(COMPUTING)
        if computing is None:
            return
        least = self._at_least(own, more, passes, 1, 0.0)
        for figure, lone in zip(computing.figures, computing.lones):
            ahead = max(0.0, (figure - now) / MS - _ROUNDED)
            if self._found and least + ahead > self._best:
                break
            if lone >= 0:
                if is_in(row, lone):
                    self._maybe(pace, lone, has, load, own, more, passes, ahead)
            else:
                for slot in bits(computing.many(figure) & holders):
                    self._maybe(pace, slot, has, load, own, more, passes, ahead)

    def _maybe(
        self, pace: Pace, slot: int, has: int, load: float, own: float, more: float, passes: int, ahead: float
    ) -> None:
        """Look at a worker that computes prompts for another ``ahead`` milliseconds at least, if it can cost least."""
        bound = self._at_least(own, more, passes, self._loads.requests[slot], self._computed[slot])
        if not self._found or bound + ahead <= self._best:
            self._note(self._one(pace, slot, has, load, 0.0, 0), slot)

    def _calm(self, pace: Pace, slot: int, own: float, more: float, passes: int, load: float) -> float:
        """``_one``, to the bit, for a worker at which no prompt waits, by what is the same for all that have equally much."""
        requests = self._loads.requests[slot]
        wait = 0.0
        if requests:
            wait += passes * pace.step(requests, self._loads.blocks[slot] * self._size)
        if load > wait:
            wait = load
        weight = 1.0 + (self._interference + self._blocking * own) * requests + self._renewal * self._computed[slot]
        return wait + weight * own + more

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

    def _at_least(self, own: float, more: float, passes: int, requests: int, computed: float) -> float:
        """No worker with at least so many requests, and at least so much computed lately, costs less that takes at least so
        many passes: all other terms of ``_one`` are times, and so 0 or more.
        """
        weight = 1.0 + (self._interference + self._blocking * own) * requests + self._renewal * computed
        bound = weight * own + more
        if requests:
            bound += passes * self._least_step
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
