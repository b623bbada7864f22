"""``least-time``: the worker with the earliest first token, plus what the prompt costs other requests and the cache there.

    time = max(wait, load) + prefill(this prompt) + passes * decode step + room
    cost = time
           + prefill(this prompt) * (interference * requests / mean requests + renewal * new tokens / mean new tokens)
           + prefill(this prompt) * blocking * (its prefill in seconds) * requests
           + stickiness * prefill(blocks that it lacks and another worker keeps)

All times are by the worker's own pace (``kvyard.router.pace``).

- ``wait``: prefill of the prompts that wait there. ``load``: loading blocks from lower tiers, at the same time.
- ``passes * decode step``: passes that compute the waiting prompts and this one also decode the requests there.
- ``room``: if the prompt doesn't fit beside the requests in flight, some of them must end first. Their mean age is the estimate
  of the time that they still take. They may evict the prompt's cached blocks meanwhile.
- ``interference`` is the cost to requests that decode there, ``renewal`` the cost to the cache: a worker that computed much new
  content lately keeps less of it. Both compare a worker with the mean of all, so their weight doesn't depend on the load.
- ``blocking``: requests that arrive while the prompt is computed wait for it, so its cost grows with the square of its prefill
  time. Many requests in flight mean many arrivals; with none, because a long prompt is computed there, a second one delays few.
- ``stickiness``: a second copy costs its computation and the room of other blocks. It doesn't count for blocks that requests in
  flight share, since copies of these are used, nor for a copy that has no room to stay: that part will be computed again and
  counts against this worker.

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
