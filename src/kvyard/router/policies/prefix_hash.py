"""``prefix-hash``: the worker that the first tokens hash to, or the next one on the ring that isn't overloaded.

Source: SMG, policy ``prefix_hash``, with its defaults: 256 tokens, 1.25 times the mean of requests in flight. It needs no
index. A prompt that is shorter hashes by what it has; prompts without a full block all hash alike.
"""

from typing import ClassVar

from kvyard.index.bits import mask_of
from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.policies.ring import HashRing
from kvyard.router.request import Choice


class PrefixHash(Policy):
    OPTIONS: ClassVar[Options] = {
        "tokens": Option(256, "Tokens of the prefix that is hashed."),
        "overload": Option(1.25, "Times the mean of requests beyond which a worker is passed over."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._ring = HashRing()

    def choose(self, routing: RoutingInput) -> Choice:
        blocks = min(routing.blocks, max(1, int(self.options["tokens"]) // routing.loads.block_size))
        key = routing.request.keys[blocks - 1] if blocks else 0
        workers = routing.workers
        # With this request, as a mean without it would be 0 for the first.
        requests = sum([worker.requests for worker in workers]) + 1
        most = max(1.0, self.options["overload"] * requests / len(workers))
        fits = mask_of([worker.slot for worker in workers if worker.requests + 1 <= most])
        return Choice(self._ring.first(key, fits or routing.eligible), 0.0, 1, "hash")
