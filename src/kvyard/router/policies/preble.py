"""``preble``: who has more than half of the prompt, the least loaded of them; else the least work of the last minutes.

Source: Preble's E2 (ICLR 25) as AIBrix has it: threshold 0.5, a window of 3 minutes, 45 tokens of output for each request.
Work is in predicted milliseconds, by the workers' own pace instead of its polynomials of a V100 and an A6000. What an
eviction costs and the splitting of hot prefixes are left out.
"""

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

from kvyard.clock import from_seconds
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least
from kvyard.router.policies import Policy


class Preble(Policy):
    needs_index = True
    needs_pace = True
    OPTIONS: ClassVar[Mapping[str, float]] = {"match": 0.5, "window_s": 180.0, "decode_tokens": 45}

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._window: deque[tuple[int, int, float]] = deque()
        """(when, slot, milliseconds), oldest first."""
        self._work: dict[int, float] = {}

    def choose(self, at: RoutingInput) -> Choice:
        slots = at.slots
        cached = [at.cached(slot) for slot in slots]
        most = max(cached)
        if most > self.options["match"] * at.request.num_tokens:
            slots = [slot for slot, tokens in zip(slots, cached) if tokens == most]
            return least(slots, [self._work.get(slot, 0.0) for slot in slots], at.rng, "match")
        return least(slots, [self._work.get(slot, 0.0) + self._own(at, slot) for slot in slots], at.rng, "time")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        slot, oldest = choice.slot, at.now - from_seconds(self.options["window_s"])
        own = self._own(at, slot)
        self._window.append((at.now, slot, own))
        self._work[slot] = self._work.get(slot, 0.0) + own
        while self._window[0][0] < oldest:
            _, slot, own = self._window.popleft()
            if slot in self._work:
                self._work[slot] -= own

    def gone(self, slot: int) -> None:
        self._work.pop(slot, None)
        self._window = deque(one for one in self._window if one[1] != slot)

    def _own(self, at: RoutingInput, slot: int) -> float:
        """Milliseconds of this request there: its prefill, and its share of the passes that decode it."""
        pace, running = at.paces[slot], at.loads.requests[slot] + 1
        context = at.loads.blocks[slot] * at.loads.block_size + at.request.num_tokens
        decode = self.options["decode_tokens"] * pace.step(running, context) / running
        return pace.prefill(at.request.num_tokens - at.cached(slot)) + decode
