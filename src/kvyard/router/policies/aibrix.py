"""``aibrix``: the least loaded while loads are far apart; else by falling match, the first that isn't busier than most.

Source: AIBrix, ``prefix-cache``, with its defaults: a difference of 8 requests, and the mean plus one standard deviation.
"""

from collections import Counter
from collections.abc import Iterable
from math import sqrt
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.active import REQUESTS
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import highest


class Aibrix(Policy):
    needs_index = True
    ranked_by = REQUESTS
    OPTIONS: ClassVar[Options] = {
        "imbalance": Option(8, "Difference in requests beyond which the least loaded worker is taken."),
        "deviations": Option(1.0, "Standard deviations above the mean up to which a worker is taken for its match."),
    }

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        slots = at.slots
        running = [float(at.loads.requests[slot]) for slot in slots]
        if max(running) - min(running) > self.options["imbalance"]:
            return least(slots, running, at.rng, "load")
        most = self._most(Counter(map(int, running)).items())
        cached = [at.cached(slot) for slot in slots]
        fits = [(tokens, -load, slot) for tokens, load, slot in zip(cached, running, slots) if tokens and load <= most]
        if fits:
            return Choice(max(fits)[2], 0.0, 1, "match")
        return least(slots, running, at.rng, "load")

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by how many workers have how many requests."""
        ranking = at.loads.ranking
        assert ranking is not None
        loads = ranking.counted(at.among)
        (low, idlest), (high, _) = loads[0], loads[-1]
        if high - low > self.options["imbalance"]:
            return least_of(idlest, low, at.rng, "load")
        most = self._most((int(load), slots.bit_count()) for load, slots in loads)
        for blocks, holders in at.prefixes.levels if at.prefixes is not None else ():
            for load, slots in loads:
                if load <= most and slots & holders and at.tokens_of(blocks):
                    return Choice(highest(slots & holders), 0.0, 1, "match")
        return least_of(idlest, low, at.rng, "load")

    def _most(self, counts: Iterable[tuple[int, int]]) -> float:
        """The requests of a worker that isn't busier than most, by how many workers have how many requests."""
        count = total = squares = 0
        for load, workers in counts:
            count += workers
            total += load * workers
            squares += load * load * workers
        return total / count + self.options["deviations"] * (sqrt(count * squares - total * total) / count)
