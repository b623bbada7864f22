"""``preble``: who has more than half of the prompt, the least loaded of them; else the least work of the last minutes.

Source: Preble's E2 (ICLR 25) as AIBrix has it: threshold 0.5, a window of 3 minutes, 45 tokens of output for each request.
Work is in predicted milliseconds, by the workers' own pace instead of its polynomials of a V100 and an A6000. What an
eviction costs and the splitting of hot prefixes are left out.
"""

from collections import deque
from typing import ClassVar

from kvyard.clock import from_seconds
from kvyard.index.bits import bits
from kvyard.registry import Option, Options
from kvyard.router.active import REQUESTS, ActiveLoads
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.policies import Policy
from kvyard.router.ranking import classes, lowest, most
from kvyard.router.tally import Tally


class Preble(Policy):
    needs_index = True
    needs_pace = True
    ranked_by = REQUESTS
    OPTIONS: ClassVar[Options] = {
        "match": Option(0.5, "Share of the prompt that a worker must have to be taken for it."),
        "window_s": Option(180.0, "Seconds of work that count for a worker."),
        "decode_tokens": Option(45, "Output tokens that each request is assumed to have."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._window: deque[tuple[int, int, float]] = deque()
        """(when, slot, milliseconds), oldest first."""
        self._work = Tally()

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        slots = at.slots
        cached = [at.cached(slot) for slot in slots]
        best = max(cached)
        if best > self.options["match"] * at.request.num_tokens:
            slots = [slot for slot, tokens in zip(slots, cached) if tokens == best]
            return least(slots, [self._work.of(slot) for slot in slots], at.rng, "match")
        return least(slots, [self._work.of(slot) + self._own(at, slot) for slot in slots], at.rng, "time")

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by workers in order of their work: of those that have equally much and are equally fast, none costs less
        than its work and the prefill.
        """
        tokens = at.request.num_tokens
        levels = at.prefixes.levels if at.prefixes is not None else []
        blocks, holders = most(levels, at.among)
        if holders and at.tokens_of(blocks) > self.options["match"] * tokens:
            work, found = self._work.least(holders)
            return least_of(found, work, at.rng, "match")
        ranking = at.loads.ranking
        assert ranking is not None
        fewest, idle = ranking.counted(at.among)[0]
        if fewest:
            idle = 0
        low, found = 0.0, 0
        for pace, members in at.speeds:
            for blocks, mine in classes(levels, at.among & members):
                prefill = pace.prefill(tokens - at.tokens_of(blocks))
                for work, slot, several in self._work.in_order(mine):
                    if found and work + prefill > low:
                        break
                    # Those without any request differ in nothing else.
                    alike = several & idle
                    parts = [(lowest(alike), alike)] if alike else []
                    parts += [(one, 1 << one) for one in (bits(several ^ alike) if slot < 0 else (slot,))]
                    for one, slots in parts:
                        cost = work + self._own(at, one)
                        if not found or cost < low:
                            low, found = cost, slots
                        elif cost == low:
                            found |= slots
        return least_of(found, low, at.rng, "time")

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        slot, oldest = choice.slot, at.now - from_seconds(self.options["window_s"])
        own = self._own(at, slot)
        self._window.append((at.now, slot, own))
        self._work.add(slot, own)
        while self._window[0][0] < oldest:
            _, slot, own = self._window.popleft()
            self._work.add(slot, -own)

    def rank(self, loads: ActiveLoads) -> None:
        self._work.rank(len(loads.prefill))

    def gone(self, slot: int) -> None:
        self._work.forget(slot)
        self._window = deque(one for one in self._window if one[1] != slot)

    def _own(self, at: RoutingInput, slot: int) -> float:
        """Milliseconds of this request there: its prefill, and its share of the passes that decode it."""
        pace, running = at.paces[slot], at.loads.requests[slot] + 1
        context = at.loads.blocks[slot] * at.loads.block_size + at.request.num_tokens
        decode = self.options["decode_tokens"] * pace.step(running, context) / running
        return pace.prefill(at.request.num_tokens - at.cached(slot)) + decode
