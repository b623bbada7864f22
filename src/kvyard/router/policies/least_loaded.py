"""``least-loaded``: the worker that has least to do, by ``RouterConfig.load``.

With ``choices`` only that many workers, drawn at random, are compared: Envoy's default for requests is two.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import Policy, load_of
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class LeastLoaded(Policy):
    ranked = True
    same_rank_same_cost = True
    why = "load"
    OPTIONS: ClassVar[Options] = {"choices": Option(0, "Workers drawn at random to choose among; 0: all.")}

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        return load_of(self.config.load, worker)

    def rank(self, worker: WorkerLoad) -> tuple[int, float]:
        return 0, load_of(self.config.load, worker)

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        return figure

    def choose(self, routing: RoutingInput) -> Choice:
        choices = int(self.options["choices"])
        if not choices:
            return super().choose(routing)
        workers, load = routing.workers, self.config.load
        drawn = [workers[routing.rng.randrange(len(workers))] for _ in range(choices)]
        least = min(drawn, key=lambda worker: load_of(load, worker))
        return Choice(least.slot, load_of(load, least), 1, self.why)
