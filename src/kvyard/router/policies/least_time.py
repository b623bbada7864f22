"""``least-time``: the worker that gives the first token soonest, with a regard for those who decode there and for its cache.

    time = max(what waits there, load) + prefill(this prompt) + passes that both take * what those add who decode there + room
    cost = time
           + prefill(this prompt) * (interference * requests there / usual + renewal * new content there / usual)
           + prefill(this prompt) * blocking * seconds of it * requests there
           + stickiness * prefill(what it lacks and another keeps)

``prefill``, ``load`` and a pass that decodes take what the worker itself takes (``kvyard.router.pace``), for what it has to
compute and to load.

- ``room``: where the prompt doesn't fit beside those under way, some of them must end first. How long they have been there is,
  on average, how long they still take. What is cached of the prompt gives way to them meanwhile.
- ``interference`` is what a prompt costs those who decode there, ``renewal`` what it costs the cache: where much that is new
  was computed lately, less is kept. Both compare a worker with the mean of all, so they weigh the same at any load.
- ``blocking``: who comes there while a prompt is computed waits for it, so a prompt costs by the square of its time. Where
  many are under way, many come; where none are, since a long prompt is computed there already, a second one harms few.
- ``stickiness``: a second copy takes the time of computing it and the room of something else. It doesn't count for the part
  of the prompt that other requests use right now, since copies of that one are used, nor for a copy that hasn't room to stay;
  what hasn't room here will be computed again and counts against this worker.

The figures were chosen on the Mooncake conversation trace alone, with 8 workers.
"""

from math import exp
from typing import ClassVar

from kvyard.clock import from_seconds
from kvyard.registry import Option, Options
from kvyard.router.active import WEIGHT, ActiveLoads
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy
from kvyard.router.time_cost import TimeCost


class LeastTime(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    OPTIONS: ClassVar[Options] = {
        "interference": Option(0.2, "Weight of what a prompt costs requests that decode there."),
        "blocking": Option(0.02, "Weight of what a prompt costs requests that arrive while it is computed."),
        "stickiness": Option(1.0, "Weight of computing what another worker keeps."),
        "renewal": Option(0.1, "Weight of what a prompt costs the cache."),
        "renewal_s": Option(300.0, "Seconds for which new content counts."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._new: list[float] = []
        """By slot, tokens that it had to compute, each times ``exp(when / renewal_s)``: newer ones count for more."""
        self._all = 0.0
        """The sum of that."""
        self._renewal = from_seconds(max(self.options["renewal_s"], 1e-6))
        self._since = 0
        """What ``when`` is counted from."""
        self._loads: ActiveLoads | None = None
        """What keeps workers in order, where there are many."""
        self.ranked_by = WEIGHT

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            capacity = at.capacity
            if capacity is None or at.loads.most_blocks(at.blocks, capacity) + at.blocks <= capacity:
                return self._cost(at).least(at.speeds, "time")
        return least(at.slots, self.costs(at), at.rng, "time")

    def costs(self, at: RoutingInput) -> list[float]:
        """Per worker that may be chosen, milliseconds."""
        return self._cost(at).all()

    def _cost(self, at: RoutingInput) -> TimeCost:
        of = self.options
        computed = self._computed(len(at.loads.prefill))
        total = self._all - sum([computed[slot] for slot in at.closed()])
        return TimeCost(at, computed, total, of["interference"], of["blocking"], of["renewal"], of["stickiness"])

    def rank(self, loads: ActiveLoads) -> None:
        self._loads = loads
        for slot, new in enumerate(self._computed(len(loads.prefill))):
            loads.weigh(slot, new)

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        passed = (at.now - self._since) / self._renewal
        if passed > 100:  # far below what a float can hold
            left = exp(-min(passed, 700.0))
            self._new = [left * tokens for tokens in self._new]
            self._all = sum(self._new)
            self._since, passed = at.now, 0.0
            if self._loads is not None:
                self.rank(self._loads)
        new = (at.request.num_tokens - at.cached(choice.slot)) * exp(passed)
        self._computed(choice.slot + 1)[choice.slot] += new
        self._all += new
        self._weigh(choice.slot)

    def gone(self, slot: int) -> None:
        self._computed(slot + 1)[slot] = 0.0
        self._all = sum(self._new)
        self._weigh(slot)

    def _weigh(self, slot: int) -> None:
        if self._loads is not None:
            self._loads.weigh(slot, self._new[slot])

    def _computed(self, slots: int) -> list[float]:
        """The tokens computed, of ``slots`` workers at least."""
        if len(self._new) < slots:
            self._new += [0.0] * (slots - len(self._new))
        return self._new
