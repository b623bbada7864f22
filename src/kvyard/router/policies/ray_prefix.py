"""``ray-prefix``: while queues are even, the best match, or who was sent least; else the shorter queue of two.

Source: Ray Serve's PrefixCacheAffinityRouter, with its defaults: queues count as even up to a difference of 10 requests;
below, a match of 10 % is good enough. It matches the text that it sent; here the index says what is cached.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.request import Choice


class RayPrefix(Policy):
    needs_index = True
    OPTIONS: ClassVar[Options] = {
        "imbalance": Option(10, "Difference in requests up to which queues count as even."),
        "match": Option(0.1, "Share of the prompt that a worker must have to be taken for it."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._sent: dict[int, float] = {}
        """Tokens that each worker was sent to compute so far, by slot."""

    def choose(self, routing: RoutingInput) -> Choice:
        requests = [worker.requests for worker in routing.workers]
        if max(requests) - min(requests) > self.options["imbalance"]:
            return self._of_two(routing)
        longest = routing.longest_matches
        if longest[0].cached_tokens >= self.options["match"] * routing.num_tokens:
            return routing.cheapest(lambda worker, _: float(worker.requests), "match", longest)
        return routing.cheapest(lambda worker, _: self._sent.get(worker.slot, 0.0), "room")

    def _of_two(self, routing: RoutingInput) -> Choice:
        """Return the one of two workers, drawn by chance, that has fewer requests."""
        two = routing.rng.sample(routing.workers, min(2, len(routing.workers)))
        fewest = min([worker.requests for worker in two])
        idler = [worker.slot for worker in two if worker.requests == fewest]
        slot = idler[routing.rng.randrange(len(idler))] if len(idler) > 1 else idler[0]
        return Choice(slot, float(fewest), len(idler), "load")

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        new = routing.match_of(choice.slot).new_tokens
        self._sent[choice.slot] = self._sent.get(choice.slot, 0.0) + new

    def gone(self, slot: int) -> None:
        self._sent.pop(slot, None)
