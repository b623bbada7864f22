"""``least-time``: the worker that gives the first token soonest, with a regard for those who decode there and for its cache.

    time = max(what waits there, load) + prefill(this prompt) + passes that both take * what those add who decode there + room
    cost = time
           + prefill(this prompt) * (interference * requests there / usual + renewal * new content there / usual)
           + prefill(this prompt) * blocking * seconds of it * requests there
           + stickiness * prefill(what it lacks and another keeps)

``prefill``, ``load`` and a pass that decodes take what the worker itself takes (``kvyard.router.pace``), for what it has to
compute and to load.

- ``room``: where the prompt doesn't fit beside those in flight, some of them must end first. How long they have been there is,
  on average, how long they still take. What is cached of the prompt gives way to them meanwhile.
- ``interference`` is what a prompt costs those who decode there, ``renewal`` what it costs the cache: where much that is new
  was computed lately, less is kept. Both compare a worker with the mean of all, so they weigh the same at any load.
- ``blocking``: who comes there while a prompt is computed waits for it, so a prompt costs by the square of its time. Where
  many are in flight, many come; if none are, since a long prompt is computed there already, a second one harms few.
- ``stickiness``: a second copy takes the time of computing it and the room of something else. It doesn't count for the part
  of the prompt that other requests use right now, since copies of that one are used, nor for a copy that hasn't room to stay;
  what hasn't room here will be computed again and counts against this worker.

The figures were chosen on the Mooncake conversation trace alone, with 8 workers.
"""

from math import exp
from typing import ClassVar

from kvyard.clock import from_seconds
from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import CostModel, Policy
from kvyard.router.request import Choice
from kvyard.router.time_cost import TimeCost, time_rank
from kvyard.router.worker import WorkerLoad


class LeastTime(Policy):
    needs_index = True
    needs_pace = True
    guarded = True
    ranked = True
    why = "time"
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
        """Origin of ``when``."""

    def costs(self, routing: RoutingInput) -> CostModel:
        computed = self._computed(len(routing.loads.workers))
        total = self._all - sum([computed[worker.slot] for worker in routing.closed()])
        return TimeCost(routing, computed, total, self.options)

    def rank(self, worker: WorkerLoad) -> tuple[int, float]:
        return time_rank(worker, self._computed(worker.slot + 1)[worker.slot])

    def routed(self, routing: RoutingInput, choice: Choice) -> bool:
        passed = (routing.now - self._since) / self._renewal
        rescaled = passed > 100  # far below what a float can hold
        if rescaled:
            left = exp(-min(passed, 700.0))
            self._new = [left * tokens for tokens in self._new]
            self._all = sum(self._new)
            self._since, passed = routing.now, 0.0
        new = routing.match_of(choice.slot).new_tokens * exp(passed)
        self._computed(choice.slot + 1)[choice.slot] += new
        self._all += new
        return rescaled

    def gone(self, slot: int) -> None:
        self._computed(slot + 1)[slot] = 0.0
        self._all = sum(self._new)

    def _computed(self, slots: int) -> list[float]:
        """Return the tokens computed, of ``slots`` workers at least."""
        if len(self._new) < slots:
            self._new += [0.0] * (slots - len(self._new))
        return self._new
