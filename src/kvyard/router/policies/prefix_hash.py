"""``prefix-hash``: the worker that the first tokens hash to, or the next one on the ring that isn't overloaded.

Source: SMG, policy ``prefix_hash``, with its defaults: 256 tokens, 1.25 times the mean of requests under way. It needs no
index. A prompt that is shorter hashes by what it has; without a full block, all such prompts hash alike.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.policies.ring import HashRing


class PrefixHash(Policy):
    OPTIONS: ClassVar[Mapping[str, float]] = {"tokens": 256, "overload": 1.25}

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._ring = HashRing()

    def choose(self, at: RoutingInput) -> Choice:
        blocks = min(at.blocks, max(1, int(self.options["tokens"]) // at.loads.block_size))
        key = at.request.keys[blocks - 1] if blocks else 0
        requests, slots = at.loads.requests, at.slots
        # With this request, as a mean without it would be 0 for the first.
        most = self.options["overload"] * (sum(requests[slot] for slot in slots) + 1) / len(slots)
        places = list(self._ring.walk(key, slots))
        fits = [slot for slot in places if requests[slot] + 1 <= max(1.0, most)]
        return Choice((fits or places)[0], 0.0, 1, "hash")
