"""``aibrix``: the least loaded while loads are far apart; else by falling match, the first that isn't busier than most.

Source: AIBrix, ``prefix-cache``, with its defaults: a difference of 8 requests, and the mean plus one standard deviation.
"""

from collections.abc import Mapping
from statistics import fmean, pstdev
from typing import ClassVar

from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class Aibrix(Policy):
    needs_index = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"imbalance": 8, "deviations": 1.0}

    def choose(self, at: RoutingInput) -> Choice:
        slots = at.slots
        running = [float(at.loads.requests[slot]) for slot in slots]
        if max(running) - min(running) > self.options["imbalance"]:
            return least(slots, running, at.rng, "load")
        most = fmean(running) + self.options["deviations"] * pstdev(running)
        cached = [at.cached(slot) for slot in slots]
        fits = [(tokens, -load, slot) for tokens, load, slot in zip(cached, running, slots) if tokens and load <= most]
        if fits:
            return Choice(max(fits)[2], 0.0, 1, "match")
        return least(slots, running, at.rng, "load")
