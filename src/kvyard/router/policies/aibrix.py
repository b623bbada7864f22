"""``aibrix``: the least loaded while loads are far apart; else by falling match, the first that isn't busier than most.

Source: AIBrix, ``prefix-cache``, with its defaults: a difference of 8 requests, and the mean plus one standard deviation.
"""

from math import sqrt
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import Policy
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class Aibrix(Policy):
    needs_index = True
    OPTIONS: ClassVar[Options] = {
        "imbalance": Option(8, "Difference in requests beyond which the least loaded worker is taken."),
        "deviations": Option(1.0, "Standard deviations above the mean up to which a worker is taken for its match."),
    }

    def choose(self, routing: RoutingInput) -> Choice:
        running = [worker.requests for worker in routing.workers]
        if max(running) - min(running) <= self.options["imbalance"]:
            most = self._most(running)
            fits = [
                (match.cached_tokens, -worker.requests, worker.slot)
                for match in routing.matches
                if match.cached_tokens
                for worker in routing.workers_of([match])
                if worker.requests <= most
            ]
            if fits:
                return Choice(max(fits)[2], 0.0, 1, "match")
        return routing.cheapest(_requests, "load")

    def _most(self, running: list[int]) -> float:
        """The requests of a worker that isn't busier than most."""
        count, total = len(running), sum(running)
        squares = sum([requests * requests for requests in running])
        return total / count + self.options["deviations"] * (sqrt(count * squares - total * total) / count)


def _requests(worker: WorkerLoad, match: Match) -> float:
    return float(worker.requests)
