"""``prefix-hash``: the worker that the first tokens hash to, or the next one on the ring that isn't overloaded.

Source: SMG, policy ``prefix_hash``, with its defaults: 256 tokens, 1.25 times the mean of requests under way. It needs no
index. A prompt that is shorter hashes by what it has; without a full block, all such prompts hash alike.
"""

from typing import ClassVar

from kvyard.index.bits import mask_of
from kvyard.registry import Option, Options
from kvyard.router.active import REQUESTS
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.policies.ring import HashRing


class PrefixHash(Policy):
    ranked_by = REQUESTS
    OPTIONS: ClassVar[Options] = {
        "tokens": Option(256, "Tokens of the prefix that is hashed."),
        "overload": Option(1.25, "Times the mean of requests beyond which a worker is passed over."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._ring = HashRing()

    def choose(self, at: RoutingInput) -> Choice:
        blocks = min(at.blocks, max(1, int(self.options["tokens"]) // at.loads.block_size))
        key = at.request.keys[blocks - 1] if blocks else 0
        loads, slots = at.loads, at.slots
        # With this request, as a mean without it would be 0 for the first.
        if at.sparse:
            under_way, among = loads.total - sum([loads.requests[slot] for slot in at.closed()]), at.among
        else:
            under_way, among = sum([loads.requests[slot] for slot in slots]), mask_of(slots)
        most = max(1.0, self.options["overload"] * (under_way + 1) / len(slots))
        fits = 0
        if at.sparse:
            assert loads.ranking is not None
            for requests, having in loads.ranking.counted(among):
                if requests + 1 > most:
                    break
                fits |= having
        else:
            fits = mask_of([slot for slot in slots if loads.requests[slot] + 1 <= most])
        return Choice(self._ring.first(key, fits or among), 0.0, 1, "hash")
