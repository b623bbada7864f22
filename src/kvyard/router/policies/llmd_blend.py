"""``llm-d-blend``: the highest sum of weighted scores: prefix, queue, free cache, and longest without a new prompt.

Source: llm-d's scorers before August 2026, with weights 3, 2, 2, 2. An engine's queue is taken to be its requests without a
first token, and its cache's use what active prompts hold: the router asks no engine. Where the size of a cache isn't known,
all count as equally free.
"""

from collections.abc import Iterator
from typing import ClassVar

from kvyard.index.bits import one_by_one
from kvyard.registry import Option, Options
from kvyard.router.active import QUEUE
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import as_bytes, classes, is_in, most


class LlmdBlend(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    ranked_by = QUEUE
    OPTIONS: ClassVar[Options] = {
        "prefix": Option(3.0, "Weight of the cached share of the prompt."),
        "queue": Option(2.0, "Weight of a short queue."),
        "cache": Option(2.0, "Weight of free blocks."),
        "no_hit": Option(2.0, "Weight of the time since the worker's last prompt without a hit."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._cold: dict[int, int] = {}
        """Slots by when they last got a prompt that no worker had any of, oldest first."""
        self._colds = 0
        """The same slots as bits."""

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._coldest(at) if _is_cold(at) else self._candidate(at)
        slots, queued, cold = at.slots, at.loads.queued, _is_cold(at)
        waiting = [queued[slot] for slot in slots]
        fewest, longest = min(waiting), max(waiting)
        ranks = {slot: rank for rank, slot in enumerate(self._by_last_cold(set(slots)))} if cold else {}
        costs = []
        for slot in slots:
            queue = _queue(queued[slot], fewest, longest)
            turn = _turn(ranks[slot], len(slots)) if cold else 0.5
            free = _free(at.loads.blocks[slot], at.paces[slot].capacity)
            costs.append(-self._score(at, at.cached(slot), queue, free, turn))
        return least(slots, costs, at.rng, "cost")

    def _score(self, at: RoutingInput, cached: int, queue: float, free: float, turn: float) -> float:
        """It never falls where one of these rises, be it by rounding: every step of it is a sum or product of what isn't
        negative.
        """
        weigh = self.options
        return (
            weigh["prefix"] * cached / at.request.num_tokens
            + weigh["queue"] * queue
            + weigh["cache"] * free
            + weigh["no_hit"] * turn
        )

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same where a worker has some of the prompt: of those that have equally much, have as much room and as many
        waiting, who holds least.
        """
        ranking = at.loads.ranking
        assert ranking is not None
        shelves = [number for number, _, _ in ranking.firsts(at.among)]
        fewest, longest = shelves[0], shelves[-1]
        levels = at.prefixes.levels if at.prefixes is not None else []
        low, found = 0.0, 0
        for pace, members in at.speeds:
            for blocks, mine in classes(levels, at.among & members):
                row, cached = as_bytes(mine), at.tokens_of(blocks)
                for number in shelves:
                    shelf, queue = ranking.shelves[number], _queue(number, fewest, longest)
                    for held, lone in zip(shelf.figures, shelf.lones):
                        cost = -self._score(at, cached, queue, _free(int(held), pace.capacity), 0.5)
                        if found and cost > low:
                            break
                        slots = shelf.many(held) & mine if lone < 0 else 1 << lone if is_in(row, lone) else 0
                        if not slots:
                            continue
                        if not found or cost < low:
                            low, found = cost, slots
                        else:
                            found |= slots
        return least_of(found, low, at.rng, "cost")

    def _coldest(self, at: RoutingInput) -> Choice:
        """The same where none has any of the prompt: by who went longest without such a one, for as long as a shorter queue
        and more room could make up for it.
        """
        loads, ranking, count = at.loads, at.loads.ranking, len(at.slots)
        assert ranking is not None
        firsts = ranking.firsts(at.among)
        fewest, longest = firsts[0][0], firsts[-1][0]
        least_held = int(min([held for _, held, _ in firsts]))
        most_free = max([_free(least_held, pace.capacity) for pace, members in at.speeds if members & at.among])
        low, found = 0.0, 0
        for rank, slot in enumerate(self._by_last_cold_of(at.among)):
            turn = _turn(rank, count)
            if found and -self._score(at, 0, 1.0, most_free, turn) > low:
                break
            queue = _queue(loads.queued[slot], fewest, longest)
            cost = -self._score(at, 0, queue, _free(loads.blocks[slot], at.paces[slot].capacity), turn)
            if not found or cost < low:
                low, found = cost, 1 << slot
            elif cost == low:
                found |= 1 << slot
        return least_of(found, low, at.rng, "cost")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        if _is_cold(at):
            self._cold.pop(choice.slot, None)
            self._cold[choice.slot] = at.now
            self._colds |= 1 << choice.slot

    def gone(self, slot: int) -> None:
        self._cold.pop(slot, None)
        self._colds &= ~(1 << slot)

    def _by_last_cold(self, slots: set[int]) -> list[int]:
        """Those that never got one first, then those whose last one is longest ago."""
        return [*sorted(slots - self._cold.keys()), *[slot for slot in self._cold if slot in slots]]

    def _by_last_cold_of(self, among: int) -> Iterator[int]:
        """The same of a set that is given as bits, one after the other."""
        yield from one_by_one(among & ~self._colds)
        row = as_bytes(among)
        for slot in self._cold:
            if is_in(row, slot):
                yield slot


def _is_cold(at: RoutingInput) -> bool:
    """Whether no worker has any of the prompt."""
    if at.sparse:
        return at.prefixes is None or not most(at.prefixes.levels, at.among)[0]
    return at.overlaps is None or not any(at.cached(slot) for slot in at.slots)


def _queue(waiting: int, fewest: int, longest: int) -> float:
    return (longest - waiting) / (longest - fewest) if longest > fewest else 1.0


def _free(held: int, capacity: int | None) -> float:
    return 1.0 - min(1.0, held / capacity) if capacity else 1.0


def _turn(rank: int, count: int) -> float:
    return 1.0 - rank / (count - 1) if count > 1 else 0.5
