"""``least-time``: the worker that gives the first token soonest, with a regard for those who decode there and for its cache.

    time = max(what waits there, load) + prefill(this prompt) + passes that both take * what those add who decode there + room
    cost = time
           + prefill(this prompt) * (interference * requests there / usual + renewal * new content there / usual)
           + stickiness * prefill(what it lacks and another keeps)

``prefill``, ``load`` and a pass that decodes take what the worker itself takes (``kvyard.router.pace``), for what it has to
compute and to load.

- ``room``: where the prompt doesn't fit beside those under way, some of them must end first. How long they have been there is,
  on average, how long they still take. What is cached of the prompt gives way to them meanwhile.
- ``interference`` is what a prompt costs those who decode there, ``renewal`` what it costs the cache: where much that is new
  was computed lately, less is kept. Both compare a worker with the mean of all, so they weigh the same at any load.
- ``stickiness``: a second copy takes the time of computing it and the room of something else. It doesn't count for the part
  of the prompt that other requests use right now, since copies of that one are used, nor for a copy that hasn't room to stay.

The figures were chosen on the Mooncake conversation trace alone, with 8 workers.
"""

from collections.abc import Mapping
from math import exp
from typing import ClassVar

from kvyard.clock import MS, from_seconds
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class LeastTime(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Mapping[str, float]] = {
        "interference": 0.2,
        "stickiness": 1.0,
        "renewal": 0.1,
        "renewal_s": 300.0,
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._new: dict[int, float] = {}
        """Tokens that each slot had to compute, older ones counting less."""
        self._since = 0

    def choose(self, at: RoutingInput) -> Choice:
        return least(at.slots, self.costs(at), at.rng, "time")

    def costs(self, at: RoutingInput) -> list[float]:
        """Per worker that may be chosen, milliseconds."""
        loads, overlaps, paces, slots = at.loads, at.overlaps, at.paces, at.slots
        tokens, size = at.request.num_tokens, loads.block_size
        cached, rooms, kept = self._caches(at)
        used = min(kept, max([at.shared[slot] for slot in slots]) * size) if at.shared is not None else 0
        lower = overlaps is not None and len(overlaps.tiers) > 1
        requests = loads.requests
        interference = self.options["interference"] / max(1.0, sum([requests[slot] for slot in slots]) / len(slots))
        new_content = self._new
        total = sum([new_content.get(slot, 0.0) for slot in slots])
        renewal = self.options["renewal"] * len(slots) / total if total else 0.0
        stickiness = self.options["stickiness"]
        costs = []
        for place, slot in enumerate(slots):
            pace, waiting, has = paces[slot], loads.prefill[slot], cached[place]
            new = tokens - has
            past = pace.past(new, has)
            own = pace.prefill(new) + past
            wait = 0.0
            if waiting:
                behind = pace.prefill(waiting + new) + past - own + loads.past[slot]
                wait = max(0.0, behind - (at.now - loads.computing_since[slot]) / MS)
            if requests[slot]:
                wait += pace.passes(waiting + new) * pace.step(requests[slot], loads.blocks[slot] * size)
            if lower and overlaps is not None:
                wait = max(wait, pace.load(overlaps.at(slot)[1:]))
            weight = 1.0 + interference * requests[slot] + renewal * new_content.get(slot, 0.0)
            cost = wait + rooms[place] + weight * own
            if has < kept:
                lacks = tokens - max(has, used)
                again = pace.prefill(lacks) + pace.past(lacks, tokens - lacks)
                cost += stickiness * (again - pace.prefill(tokens - kept) - pace.past(tokens - kept, kept))
            costs.append(cost)
        return costs

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        if at.now > self._since:
            left = exp((self._since - at.now) / from_seconds(max(self.options["renewal_s"], 1e-9)))
            self._new = {slot: left * tokens for slot, tokens in self._new.items()}
            self._since = at.now
        self._new[choice.slot] = self._new.get(choice.slot, 0.0) + at.request.num_tokens - at.cached(choice.slot)

    def gone(self, slot: int) -> None:
        self._new.pop(slot, None)

    def _caches(self, at: RoutingInput) -> tuple[list[int], list[float], int]:
        """Per worker that may be chosen the tokens it needn't compute and the milliseconds until there is room for the prompt;
        and the most tokens that any worker has and can keep.
        """
        loads, shared = at.loads, at.shared
        cached = [at.cached(slot) for slot in at.slots]
        kept = max(cached)
        rooms = [0.0] * len(cached)
        full = False
        for place, slot in enumerate(at.slots):
            capacity = at.paces[slot].capacity
            if capacity is None or loads.blocks[slot] + at.blocks <= capacity or not loads.requests[slot]:
                continue
            free = capacity - loads.blocks[slot] + (shared[slot] if shared is not None else 0)
            if free < at.blocks:
                cached[place] = max(0, min(cached[place], free * loads.block_size))
                rooms[place] = loads.mean_age(slot, at.now) / MS
                full = True
        if full:
            kept = max([tokens for tokens, room in zip(cached, rooms) if not room], default=0)
        return cached, rooms, kept
