"""``preble``: the least loaded of the workers with more than half of the prompt; else the least work in recent minutes.

Source: Preble's E2 (ICLR 25) as AIBrix has it: threshold 0.5, a window of 3 minutes, 45 tokens of output for each request.
Work is in predicted milliseconds, by the workers' own pace instead of its polynomials of a V100 and an A6000. What an
eviction costs and the splitting of hot prefixes are left out.
"""

from collections import deque
from typing import ClassVar

from kvyard.clock import from_seconds
from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import Policy
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class Preble(Policy):
    needs_index = True
    needs_pace = True
    OPTIONS: ClassVar[Options] = {
        "match": Option(0.5, "Share of the prompt that a worker must have to be taken for it."),
        "window_s": Option(180.0, "Seconds of work that count for a worker."),
        "decode_tokens": Option(45, "Output tokens that each request is assumed to have."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._window: deque[tuple[int, int, float]] = deque()
        """(when, slot, milliseconds), oldest first."""
        self._work: dict[int, float] = {}
        """The sum of these milliseconds, by slot."""

    def choose(self, routing: RoutingInput) -> Choice:
        work, tokens = self._work, routing.num_tokens
        longest = routing.longest_matches
        if longest[0].cached_tokens > self.options["match"] * tokens:
            return routing.cheapest(lambda worker, _: work.get(worker.slot, 0.0), "match", longest)
        return routing.cheapest(
            lambda worker, match: work.get(worker.slot, 0.0) + self._own(worker, match, tokens), "time"
        )

    def routed(self, routing: RoutingInput, choice: Choice) -> None:
        slot, oldest = choice.slot, routing.now - from_seconds(self.options["window_s"])
        own = self._own(routing.loads.workers[slot], routing.match_of(slot), routing.num_tokens)
        self._window.append((routing.now, slot, own))
        self._work[slot] = self._work.get(slot, 0.0) + own
        while self._window[0][0] < oldest:
            _, slot, own = self._window.popleft()
            self._work[slot] = self._work.get(slot, 0.0) - own

    def gone(self, slot: int) -> None:
        self._work.pop(slot, None)
        self._window = deque(entry for entry in self._window if entry[1] != slot)

    def _own(self, worker: WorkerLoad, match: Match, tokens: int) -> float:
        """Return milliseconds of this request there: its prefill, and its share of the passes that decode it."""
        pace, running = worker.pace, worker.requests + 1
        context = worker.blocks * worker.block_size + tokens
        decode = self.options["decode_tokens"] * pace.step(running, context) / running
        return pace.prefill(match.new_tokens) + decode
