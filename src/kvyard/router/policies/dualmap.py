"""``dualmap``: two workers by two hashes of the prefix; the one with the cache while it keeps its promise, else the idler.

Source: DualMap (ICLR 26, arXiv 2602.06502). The prefix that is hashed has ``tokens`` tokens instead of an adaptive length, and
requests that wait don't move to their other worker: this router routes once. ``slo_ms`` is the time to first token promised.
"""

from typing import ClassVar

from kvyard.index.bits import mask_of
from kvyard.registry import Option, Options
from kvyard.router.active import UNORDERED
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy
from kvyard.router.policies.ring import HashRing


class DualMap(Policy):
    needs_index = True
    needs_pace = True
    ranked_by = UNORDERED
    OPTIONS: ClassVar[Options] = {
        "tokens": Option(1024, "Tokens of the prefix that is hashed."),
        "slo_ms": Option(2000.0, "Time to first token that is promised, in milliseconds."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._ring = HashRing()

    def choose(self, at: RoutingInput) -> Choice:
        blocks = min(at.blocks, max(1, int(self.options["tokens"]) // at.loads.block_size))
        key = at.request.keys[blocks - 1] if blocks else at.rng.randrange(1 << 62)
        among = at.among if at.sparse else mask_of(at.slots)
        first = self._ring.first(key, among)
        others = among ^ 1 << first
        slots = [first, self._ring.first(~key, others)] if others else [first]
        times = [at.paces[slot].prefill(at.work(slot)) for slot in slots]
        if len(slots) == 2:
            second = slots[1]
            here = at.cached(first) >= at.cached(second)
            place = 0 if here else 1
            if at.cached(first) != at.cached(second) and times[place] <= self.options["slo_ms"]:
                return Choice(slots[place], times[place], 1, "match")
        return least(slots, times, at.rng, "time")
