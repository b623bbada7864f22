"""``least-loaded``: the worker that has least to do, by ``RouterConfig.load``."""

from kvyard.router.matches import Match
from kvyard.router.policies import Policy, load_of
from kvyard.router.worker import WorkerLoad


class LeastLoaded(Policy):
    ranked = True
    same_rank_same_cost = True
    why = "load"

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        return load_of(self.config.load, worker)

    def rank(self, worker: WorkerLoad) -> tuple[int, float]:
        return 0, load_of(self.config.load, worker)

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        return figure
