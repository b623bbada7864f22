"""``dualmap``: two workers by two hashes of the prefix; the one with the cache while it keeps its promise, else the idler.

Source: DualMap (ICLR 26, arXiv 2602.06502). The prefix that is hashed has ``tokens`` tokens instead of an adaptive length, and
requests that wait don't move to their other worker: this router routes once. ``slo_ms`` is the time to first token promised.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.policies.ring import HashRing
from kvyard.router.request import Choice


class DualMap(Policy):
    needs_index = True
    needs_pace = True
    OPTIONS: ClassVar[Options] = {
        "tokens": Option(1024, "Tokens of the prefix that is hashed."),
        "slo_ms": Option(2000.0, "Time to first token that is promised, in milliseconds."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._ring = HashRing()

    def choose(self, routing: RoutingInput) -> Choice:
        blocks = min(routing.blocks, max(1, int(self.options["tokens"]) // routing.loads.block_size))
        key = routing.request.keys[blocks - 1] if blocks else routing.rng.randrange(1 << 62)
        first = self._ring.first(key, routing.eligible)
        others = routing.eligible ^ 1 << first
        slots = [first, self._ring.first(~key, others)] if others else [first]
        matches = [routing.match_of(slot) for slot in slots]
        workers = [routing.loads.workers[slot] for slot in slots]
        times = [
            worker.pace.prefill(worker.prefill_tokens + match.new_tokens)
            for worker, match in zip(workers, matches, strict=False)
        ]
        if len(slots) == 2 and matches[0].cached_tokens != matches[1].cached_tokens:
            place = 0 if matches[0].cached_tokens > matches[1].cached_tokens else 1
            if times[place] <= self.options["slo_ms"]:
                return Choice(slots[place], times[place], 1, "match")
        soonest = [slot for slot, ms in zip(slots, times, strict=False) if ms == min(times)]
        slot = soonest[routing.rng.randrange(len(soonest))] if len(soonest) > 1 else soonest[0]
        return Choice(slot, min(times), len(soonest), "time")
