"""Requests in flight, and their sums per worker.

The router's own bookkeeping, from routing to finish; no engine is asked. Blocks that several requests of a worker share count
once. Tokens of a prefill count net of what the worker was credited with, until the caller reports it done.
"""

from collections.abc import Callable

from kvyard.router.ranking import Ranking
from kvyard.router.request import Prompt
from kvyard.router.tree import Path, PrefixTree, PromptNode
from kvyard.router.worker import WorkerLoad


class Booking:
    """One request in flight, as its router holds it."""

    __slots__ = (
        "best",
        "blocks",
        "num_tokens",
        "output_blocks",
        "overlap",
        "pairs",
        "past_ms",
        "prefill_tokens",
        "sent",
        "since",
        "tail",
        "worker",
    )

    def __init__(
        self, num_tokens: int, blocks: int, worker: WorkerLoad, tail: PromptNode | None, prefill: int, since: int
    ) -> None:
        self.num_tokens = num_tokens
        """Of its prompt."""
        self.blocks = blocks
        """Full blocks of its prompt."""
        self.worker = worker
        self.overlap = 0
        """Blocks of the prompt's prefix that its worker had, from all tiers, and"""
        self.best = 0
        """the most that any worker had that could have been chosen."""
        self.tail = tail
        self.prefill_tokens = prefill
        """Left to compute; 0 once the prefill is done."""
        self.pairs = 0
        """Number of token pairs that attend; 0 once they are computed."""
        self.past_ms = 0.0
        """Milliseconds that attention to cached tokens adds to its prefill; 0 once that is done."""
        self.output_blocks = 0
        self.sent = 0
        """Number in the memory of routed prompts; 0 if there is none."""
        self.since = since


class ActiveLoads:
    """All workers of a router, and their requests in flight."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tree = PrefixTree()
        """The prompts in flight."""
        self.workers: list[WorkerLoad] = []
        """By slot."""
        self.active: dict[object, Booking] = {}
        """By request id, oldest first."""
        self.ranking: Ranking | None = None
        """Workers in the order of the policy's rank, once ``rank_by`` was called."""
        self.idle = 0
        """Slots, as bits, of workers without a request in flight; kept up to date with ``ranking``."""
        self._rank: Callable[[WorkerLoad], tuple[int, float]] | None = None
        self._high = 0
        """No worker holds more blocks."""

    def rank_by(self, rank: Callable[[WorkerLoad], tuple[int, float]]) -> None:
        """Keep workers in the order of ``rank``, a bucket and a figure, from now on; ranks all of them anew."""
        if self.ranking is None:
            self.ranking = Ranking()
        self._rank = rank
        self.idle = 0
        for worker in self.workers:
            if not worker.requests:
                self.idle |= 1 << worker.slot
            self.rerank(worker)

    def rerank(self, worker: WorkerLoad) -> None:
        """Put a worker whose rank may have changed in its place."""
        if self._rank is not None and self.ranking is not None:
            bucket, figure = self._rank(worker)
            self.ranking.put(worker.slot, bucket, figure)

    def most_blocks(self, more: int, capacity: int) -> int:
        """Return blocks of the worker that holds most; or, where ``more`` beside them fit into ``capacity`` in any case, a
        bound.
        """
        if self._high + more > capacity:
            self._high = max([worker.blocks for worker in self.workers])
        return self._high

    def begin(self, request: Prompt, worker: WorkerLoad, known: Path, prefill: int, reserved: int, now: int) -> Booking:
        """Book a request on ``worker``. ``known`` is its path in ``tree``; ``reserved`` blocks are held for its output. The
        caller calls ``rerank`` when all is booked.
        """
        keys = request.keys
        path = self.tree.extend(keys, known)
        slot = worker.slot
        fresh = 0
        for node in path:
            held = node.held
            count = held.get(slot, 0)
            held[slot] = count + 1
            if not count:
                node.mask |= 1 << slot
                fresh += node.stop - node.start
        self.tree.size += fresh
        worker.blocks += fresh + reserved
        if worker.blocks > self._high:
            self._high = worker.blocks
        if not worker.prefill_tokens:
            worker.computing_since = now
        worker.prefill_tokens += prefill
        if prefill:
            worker.queued += 1
        if not worker.requests and self.ranking is not None:
            self.idle ^= 1 << slot
        worker.requests += 1
        tail = path[-1] if path else None
        entry = Booking(request.num_tokens, len(keys), worker, tail, prefill, now)
        entry.output_blocks = reserved
        self.active[request.id] = entry
        return entry

    def attends(self, entry: Booking, pairs: int, past_ms: float) -> None:
        """Note that its tokens attend to others ``pairs`` times, so that its prefill takes ``past_ms`` longer."""
        entry.worker.past_ms += past_ms
        entry.pairs, entry.past_ms = pairs, past_ms

    def prefill_done(self, entry: Booking, now: int) -> None:
        """Mark the prompt as computed."""
        entry.worker.computing_since = now
        self._computed(entry)
        self.rerank(entry.worker)

    def grown(self, entry: Booking, output_tokens: int) -> None:
        """Count the full blocks of the ``output_tokens`` that it has generated so far."""
        blocks = (entry.num_tokens + output_tokens) // self.block_size - entry.blocks
        if blocks > entry.output_blocks:
            worker = entry.worker
            worker.blocks += blocks - entry.output_blocks
            entry.output_blocks = blocks
            if worker.blocks > self._high:
                self._high = worker.blocks
            self.rerank(worker)

    def end(self, id_: object) -> Booking | None:
        """Remove a request; returns its entry, ``None`` if there is none."""
        entry = self.active.pop(id_, None)
        if entry is None:
            return None
        worker, tree = entry.worker, self.tree
        slot = worker.slot
        self._computed(entry)
        worker.requests -= 1
        if not worker.requests and self.ranking is not None:
            self.idle ^= 1 << slot
        worker.blocks -= entry.output_blocks
        node = entry.tail
        last: PromptNode | None = None
        while node is not None and node is not tree.root:
            parent = node.parent
            count = node.held[slot]
            if count > 1:
                node.held[slot] = count - 1
                last = last or node
            else:
                worker.blocks -= node.stop - node.start
                tree.leave(node, slot)
                if node.held:
                    last = last or node
            node = parent
        if last is not None:
            tree.settle(last)
        self.rerank(worker)
        return entry

    def _computed(self, entry: Booking) -> None:
        worker = entry.worker
        worker.prefill_tokens -= entry.prefill_tokens
        if entry.prefill_tokens:
            worker.queued -= 1
        # Sums of floats drift, so it begins afresh whenever nothing waits.
        worker.past_ms = worker.past_ms - entry.past_ms if worker.prefill_tokens else 0.0
        entry.prefill_tokens = entry.pairs = 0
        entry.past_ms = 0.0

    def mean_age(self, worker: WorkerLoad, now: int) -> float:
        """Return mean nanoseconds since the requests in flight on ``worker`` were routed; 0 for none.

        It looks at all requests in flight, so it isn't for every decision.
        """
        ages = [now - entry.since for entry in self.active.values() if entry.worker is worker]
        return sum(ages) / len(ages) if ages else 0.0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless all figures follow from the requests in flight."""
        self.tree.check_integrity()
        if self.ranking is not None and self._rank is not None:
            self.ranking.check_integrity()
            for worker in self.workers:
                assert self.ranking.of(worker.slot) == self._rank(worker), f"slot {worker.slot}: its rank is stale"
                assert self.idle >> worker.slot & 1 == (not worker.requests), f"slot {worker.slot}: idle or not"
        for slot, worker in enumerate(self.workers):
            mine = [entry for entry in self.active.values() if entry.worker is worker]
            prefill = sum(entry.prefill_tokens for entry in mine)
            assert worker.slot == slot, f"slot {slot}: another worker's"
            assert worker.prefill_tokens == prefill, f"slot {slot}: prefill tokens drifted"
            assert worker.requests == len(mine), f"slot {slot}: requests drifted"
            queued = sum(1 for entry in mine if entry.prefill_tokens)
            assert worker.queued == queued, f"slot {slot}: the queue drifted"
            held = sum(node.stop - node.start for node in self.tree.walk() if slot in node.held)
            outputs = sum(entry.output_blocks for entry in mine)
            assert worker.blocks == held + outputs, f"slot {slot}: blocks drifted"
        for node in self.tree.walk():
            below = sum(sum(child.held.values()) for child in node.children.values())
            ends = sum(1 for entry in self.active.values() if entry.tail is node)
            assert sum(node.held.values()) == below + ends, "requests and nodes differ"
