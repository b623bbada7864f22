"""What is under way: per worker the prefill still to do, the blocks that active prompts hold, the requests.

The router's own bookkeeping, from routing to finish; no engine is asked. Blocks that several active requests of a worker
share count once. Tokens of a prefill count net of what the worker was credited with, until the caller says it is done.
"""

from typing import Final

from kvyard.clock import MS
from kvyard.router.ranking import Ranking
from kvyard.router.request import Load, RouteRequest
from kvyard.router.tree import Path, PrefixTree, PromptStretch

BLOCKS: Final = 1
"""Ranked by blocks to prefill and held,"""
TOKENS: Final = 2
"""by tokens to prefill,"""
REQUESTS: Final = 3
"""by requests,"""
WORK: Final = 4
"""by tokens to prefill, then requests (see ``MORE``),"""
WEIGHT: Final = 5
"""by requests, then a figure of the policy's own; those that compute prompts come last, by when these may be done,"""
BATCH: Final = 6
"""by requests, then tokens to prefill,"""
BOTH: Final = 7
"""by the sum of requests and tokens to prefill,"""
QUEUE: Final = 8
"""by requests whose prompts aren't computed, then blocks held,"""
UNORDERED: Final = 9
"""or not at all, for a policy that finds its workers otherwise."""
COMPUTING: Final = 1 << 40
"""The shelf of those that compute prompts."""
MORE: Final = 1 << 20
"""A token to prefill counts as so many requests: more than a worker ever has. Sums are exact, as long as fewer than 2^33 tokens
wait at a worker."""


class Active:
    """One request under way."""

    __slots__ = (
        "blocks",
        "num_tokens",
        "output_blocks",
        "pairs",
        "past",
        "prefill_tokens",
        "sent",
        "since",
        "slot",
        "tail",
    )

    def __init__(
        self, slot: int, tail: PromptStretch | None, num_tokens: int, blocks: int, prefill: int, since: int
    ) -> None:
        self.slot = slot
        self.tail = tail
        self.num_tokens = num_tokens
        self.blocks = blocks
        self.prefill_tokens = prefill
        """Still to do; 0 once it is done."""
        self.pairs = 0
        """How often its tokens attend to others; 0 once they are computed."""
        self.past = 0.0
        """Milliseconds that attention to what is cached adds to its prefill; 0 once that is done."""
        self.output_blocks = 0
        self.sent = 0
        """Its number in the memory of what was routed; 0 where there is none."""
        self.since = since


class ActiveLoads:
    """All workers, by slot."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tree = PrefixTree()
        self.prefill: list[int] = []
        self.past: list[float] = []
        """Milliseconds that attention to what is cached adds to what waits, where the router reads paces."""
        self.blocks: list[int] = []
        self.requests: list[int] = []
        self.queued: list[int] = []
        """Requests whose prompts aren't computed yet."""
        self.computing_since: list[int] = []
        """When the prefill that is computed now began; of no meaning where none waits."""
        self.active: dict[object, Active] = {}
        """By request id, oldest first."""
        self.ranking: Ranking | None = None
        """Workers in order of their load, once that is asked for."""
        self.total = 0
        """Requests under way everywhere."""
        self._ranked_by = 0
        self._weights: list[float] = []
        self._per_token = 0.0
        self._high = 0
        """No worker has more blocks."""

    def rank_by(self, kind: int, per_token: float = 0.0) -> Ranking:
        """Keep workers in the order of this kind of load from now on. Weights are 0 until the policy says otherwise; no
        token of a prompt takes less than ``per_token`` milliseconds.
        """
        self._per_token = per_token
        if self.ranking is None or kind != self._ranked_by:
            self.ranking = Ranking()
            self._ranked_by = kind
        for slot in range(len(self.prefill)):
            self._changed(slot)
        return self.ranking

    def weigh(self, slot: int, weight: float) -> None:
        """The policy's own figure of a worker."""
        if self.ranking is not None:
            while len(self._weights) <= slot:
                self._weights.append(0.0)
            self._weights[slot] = weight
            self._changed(slot)

    def most_blocks(self, more: int, capacity: int) -> int:
        """Blocks of the worker that holds most; or, where ``more`` beside them fit into ``capacity`` in any case, a bound."""
        if self._high + more > capacity:
            self._high = max(self.blocks)
        return self._high

    def _changed(self, slot: int) -> None:
        ranking = self.ranking
        if ranking is not None:
            shelf, figure = self._place(slot)
            ranking.put(slot, shelf, figure)

    def _place(self, slot: int) -> tuple[int, float]:
        """The shelf and figure of a worker."""
        kind = self._ranked_by
        if kind == BLOCKS:
            return 0, float(self.prefill[slot] + self.blocks[slot] * self.block_size)
        if kind == TOKENS:
            return 0, float(self.prefill[slot])
        if kind == REQUESTS:
            return 0, float(self.requests[slot])
        if kind == WORK:
            return 0, float(self.prefill[slot] * MORE + self.requests[slot])
        if kind == BOTH:
            return 0, float(self.prefill[slot] + self.requests[slot])
        if kind == BATCH:
            return self.requests[slot], float(self.prefill[slot])
        if kind == QUEUE:
            return self.queued[slot], float(self.blocks[slot])
        if kind == UNORDERED:
            return 0, 0.0
        waiting = self.prefill[slot]
        if waiting:
            return COMPUTING, self.computing_since[slot] + (self._per_token * waiting + self.past[slot]) * MS
        return self.requests[slot], self._weights[slot] if slot < len(self._weights) else 0.0

    def grow(self, slots: int) -> None:
        """Keep figures for ``slots`` workers from now on."""
        missing = slots - len(self.prefill)
        for figures in (self.prefill, self.blocks, self.requests, self.queued, self.computing_since):
            figures += [0] * missing
        self.past += [0.0] * missing
        if self.ranking is not None:
            for slot in range(slots - missing, slots):
                self._changed(slot)

    def begin(self, request: RouteRequest, slot: int, found: Path, prefill: int, reserved: int, now: int) -> Active:
        """Book a request on ``slot``, and return its entry. ``found`` is its way in ``tree``; ``reserved`` blocks are held for
        its output.
        """
        path = self.tree.extend(request.keys, found)
        fresh = 0
        for node in path:
            held = node.held
            count = held.get(slot, 0)
            held[slot] = count + 1
            if not count:
                node.mask |= 1 << slot
                fresh += node.stop - node.start
        self.tree.size += fresh
        self.blocks[slot] += fresh + reserved
        if not self.prefill[slot]:
            self.computing_since[slot] = now
        self.prefill[slot] += prefill
        if prefill:
            self.queued[slot] += 1
        self.requests[slot] += 1
        self.total += 1
        tail = path[-1] if path else None
        entry = Active(slot, tail, request.num_tokens, len(request.keys), prefill, now)
        entry.output_blocks = reserved
        self.active[request.id] = entry
        if self.blocks[slot] > self._high:
            self._high = self.blocks[slot]
        self._changed(slot)
        return entry

    def attends(self, entry: Active, pairs: int, ms: float) -> None:
        """Its tokens attend to others ``pairs`` times, so that its prefill takes ``ms`` longer."""
        self.past[entry.slot] += ms
        entry.pairs, entry.past = pairs, ms
        self._changed(entry.slot)

    def prefill_done(self, entry: Active, now: int) -> None:
        """Its prompt is computed."""
        self.computing_since[entry.slot] = now
        self._computed(entry)
        self._changed(entry.slot)

    def grown(self, entry: Active, output_tokens: int) -> None:
        """It has generated ``output_tokens`` by now: count the full blocks that came of it."""
        blocks = (entry.num_tokens + output_tokens) // self.block_size - entry.blocks
        if blocks > entry.output_blocks:
            self.blocks[entry.slot] += blocks - entry.output_blocks
            entry.output_blocks = blocks
            if self.blocks[entry.slot] > self._high:
                self._high = self.blocks[entry.slot]
            self._changed(entry.slot)

    def end(self, id_: object) -> Active | None:
        """Forget a request; returns what was known of it."""
        entry = self.active.pop(id_, None)
        if entry is None:
            return None
        slot, tree = entry.slot, self.tree
        self._computed(entry)
        self.requests[slot] -= 1
        self.total -= 1
        self.blocks[slot] -= entry.output_blocks
        node = entry.tail
        last: PromptStretch | None = None
        while node is not None and node is not tree.root:
            parent = node.parent
            count = node.held[slot]
            if count > 1:
                node.held[slot] = count - 1
                last = last or node
            else:
                self.blocks[slot] -= node.stop - node.start
                tree.leave(node, slot)
                if node.held:
                    last = last or node
            node = parent
        if last is not None:
            tree.settle(last)
        self._changed(slot)
        return entry

    def _computed(self, entry: Active) -> None:
        slot = entry.slot
        self.prefill[slot] -= entry.prefill_tokens
        if entry.prefill_tokens:
            self.queued[slot] -= 1
        # Sums of floats drift, so it begins afresh whenever nothing waits.
        self.past[slot] = self.past[slot] - entry.past if self.prefill[slot] else 0.0
        entry.prefill_tokens = entry.pairs = 0
        entry.past = 0.0

    def mean_age(self, slot: int, now: int) -> float:
        """How long ago, in nanoseconds and on average, the requests that are under way on ``slot`` were routed; 0 for none.

        It looks at all that is under way, so it isn't for every decision.
        """
        ages = [now - entry.since for entry in self.active.values() if entry.slot == slot]
        return sum(ages) / len(ages) if ages else 0.0

    def of(self, slot: int) -> Load:
        """One worker's load."""
        return Load(self.prefill[slot], self.blocks[slot], self.requests[slot])

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless all figures follow from the active requests."""
        self.tree.check_integrity()
        assert self.total == len(self.active), "requests drifted"
        if self.ranking is not None:
            self.ranking.check_integrity()
            for slot in range(len(self.prefill)):
                assert self.ranking.of(slot) == self._place(slot), f"slot {slot}: its place is out of date"
        for slot, prefill in enumerate(self.prefill):
            mine = [entry for entry in self.active.values() if entry.slot == slot]
            assert prefill == sum(entry.prefill_tokens for entry in mine), f"slot {slot}: prefill tokens drifted"
            assert self.requests[slot] == len(mine), f"slot {slot}: requests drifted"
            queued = sum(1 for entry in mine if entry.prefill_tokens)
            assert self.queued[slot] == queued, f"slot {slot}: the queue drifted"
            held = sum(node.stop - node.start for node in self.tree.walk() if slot in node.held)
            outputs = sum(entry.output_blocks for entry in mine)
            assert self.blocks[slot] == held + outputs, f"slot {slot}: blocks drifted"
        for node in self.tree.walk():
            below = sum(sum(child.held.values()) for child in node.children.values())
            ends = sum(1 for entry in self.active.values() if entry.tail is node)
            assert sum(node.held.values()) == below + ends, "requests and stretches differ"
