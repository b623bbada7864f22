"""``aibrix``: the least loaded while loads are far apart; else by falling match, the first that isn't busier than most.

Source: AIBrix, ``prefix-cache``, with its defaults: a difference of 8 requests, and the mean plus one standard deviation; of
equals any. AIBrix itself knows caches by what it routed (``approximate=1``) unless engines' events are configured.
"""

from math import sqrt
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies.events_or_memory import EventsOrMemory
from kvyard.router.request import Choice
from kvyard.router.search import Cost
from kvyard.router.worker import WorkerLoad


class Aibrix(EventsOrMemory):
    OPTIONS: ClassVar[Options] = {
        "imbalance": Option(8, "Difference in requests beyond which the least loaded worker is taken."),
        "deviations": Option(1.0, "Standard deviations above the mean up to which a worker is taken for its match."),
        **EventsOrMemory.OPTIONS,
    }

    def choose(self, routing: RoutingInput) -> Choice:
        running = [worker.requests for worker in routing.workers]
        if max(running) - min(running) <= self.options["imbalance"]:
            most = self._most(running)
            fits = [
                match
                for match in routing.matches
                if match.cached_tokens and any(worker.requests <= most for worker in routing.workers_of([match]))
            ]
            if fits:
                return routing.cheapest(_by_match(most), "match", fits)
        return routing.cheapest(_requests, "load")

    def _most(self, running: list[int]) -> float:
        """Return the requests of a worker that isn't busier than most."""
        count, total = len(running), sum(running)
        squares = sum([requests * requests for requests in running])
        return total / count + self.options["deviations"] * (sqrt(count * squares - total * total) / count)


def _requests(worker: WorkerLoad, match: Match) -> float:
    return float(worker.requests)


def _by_match(most: float) -> Cost:
    """Return cost of a worker with at most ``most`` requests by its match first, and by its requests among equals."""

    def cost(worker: WorkerLoad, match: Match) -> float:
        return float("inf") if worker.requests > most else worker.requests - 1e9 * match.cached_tokens

    return cost
