"""``least-time``: the worker that gives the first token soonest, unless a copy is worth keeping to one place.

    time = max(prefill(what waits there, and this prompt) - what of it is done by now, prefill(this prompt))
           + passes that this takes * what those add who decode there
    cost = max(time, load) + interference * prefill(this prompt) * requests there

``prefill``, ``load`` and a pass that decodes take what the worker itself takes (``kvyard.router.pace``), for what it has to
compute and to load. The last term is what this prompt costs those who decode there. The worker with the longest match is
taken even where it isn't the cheapest, as long as the difference is below ``stickiness`` times what computing the match again
would take: a second copy takes that time, and the room of something else.

The figures were chosen on the Mooncake conversation trace alone, with 8 workers.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.clock import MS
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class LeastTime(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"interference": 0.15, "stickiness": 1.0, "least_match": 1024}

    def choose(self, at: RoutingInput) -> Choice:
        slots = at.slots
        costs = self.costs(at)
        if at.overlaps is not None:
            cached = [at.cached(slot) for slot in slots]
            match = max(cached)
            if match >= self.options["least_match"]:
                cost, place = min((costs[place], place) for place, tokens in enumerate(cached) if tokens == match)
                again = self.options["stickiness"] * at.paces[slots[place]].prefill(match)
                if cost - min(costs) <= again:
                    return Choice(slots[place], cost, 1, "time")
        return least(slots, costs, at.rng, "time")

    def costs(self, at: RoutingInput) -> list[float]:
        """Per worker that may be chosen, milliseconds."""
        loads, overlaps, paces = at.loads, at.overlaps, at.paces
        tokens, interference = at.request.num_tokens, self.options["interference"]
        lower = overlaps is not None and len(overlaps.tiers) > 1
        found = []
        for slot in at.slots:
            pace, waiting, requests = paces[slot], loads.prefill[slot], loads.requests[slot]
            new = tokens - at.cached(slot) if overlaps is not None else tokens
            own = pace.prefill(new)
            time = own
            if waiting:
                time = max(own, pace.prefill(waiting + new) - (at.now - loads.computing_since[slot]) / MS)
            if requests:
                time += pace.passes(waiting + new) * pace.step(requests, loads.blocks[slot] * loads.block_size)
            if lower and overlaps is not None:
                time = max(time, pace.load(overlaps.at(slot)[1:]))
            found.append(time + interference * own * requests)
        return found
