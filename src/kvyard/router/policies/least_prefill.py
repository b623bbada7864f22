"""``least-prefill``: the least prompt tokens left to compute, this request's included; then the fewest requests, then by turn.

Source: "LPWL", least prefill work left, of gahow's agentic-kvc analysis (2026); it has no figures to set.
"""

from kvyard.router.active import MORE, WORK
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.policies import Policy
from kvyard.router.ranking import classes, lowest


class LeastPrefill(Policy):
    needs_index = True
    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._next = 0
        self.ranked_by = WORK

    def choose(self, at: RoutingInput) -> Choice:
        if at.sparse:
            return self._candidate(at)
        ranked = [(at.work(slot), at.loads.requests[slot], slot < self._next, slot) for slot in at.slots]
        best = min(ranked)
        tied = sum(one[:2] == best[:2] for one in ranked)
        return Choice(best[3], float(best[0]), tied, "load")

    def _candidate(self, at: RoutingInput) -> Choice:
        """The same, by the least loaded of those that have equally much of the prompt."""
        ranking, tokens = at.loads.ranking, at.request.num_tokens
        assert ranking is not None
        best, found = (0, 0), 0
        for blocks, holders in classes(at.prefixes.levels, at.among) if at.prefixes is not None else [(0, at.among)]:
            _, figure, slots = ranking.least(holders)
            waiting, requests = divmod(int(figure), MORE)
            work = (waiting + tokens - (at.tokens_of(blocks) if at.prefixes is not None else 0), requests)
            if not found or work < best:
                best, found = work, slots
            elif work == best:
                found |= slots
        due = found >> self._next << self._next
        return Choice(lowest(due or found), float(best[0]), found.bit_count(), "load")

    def costs(self, at: RoutingInput) -> list[float]:
        """Prompt tokens left to compute."""
        return [float(at.work(slot)) for slot in at.slots]

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        self._next = choice.slot + 1
