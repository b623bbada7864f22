"""SGLang's way: prompts first, admission by a budget of tokens, retraction when decoding runs out of memory.

A pass either extends (computes prompts) or decodes, never both; while a prompt can get in, decoding waits. A prompt gets in
if it fits into what is free after setting aside a share of the output that running requests may still produce
(``NewTokenRatio``). When that was too little, the request with the least output goes back to the queue's end.

Pages are the block manager's blocks, and its cached blocks stand for the radix tree. Three things differ from a tree: copies of
one text computed side by side stay two copies until evicted, eviction takes single blocks rather than whole leaves, and it goes
by when a block was last let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvyard.blocks import BlockManager
from kvyard.engine.batch import Batch, Chunk
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, State
from kvyard.engine.policies.ratio import NewTokenRatio
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.queue import ArrivalQueue
from kvyard.engine.scheduler import Scheduler
from kvyard.engine.watcher import NOBODY, Watcher
from kvyard.tiers.offload import Offload

LONGEST_SORTED = 128
"""With more waiting than this, longest prefix first would cost more than it gains: first come, first served."""
SAME_START = 32
"""Requests that have no more than this cached and share their first tokens, this many: one goes first, the others later."""


class PrefixQueue(ArrivalQueue):
    """Kept in order of arrival; who is next changes with what is cached."""

    strict = False


class SglangScheduler(Scheduler):
    """Extend passes and decode passes, first in first out or longest prefix first."""

    prompts_apart = True

    def __init__(
        self, manager: BlockManager, config: EngineConfig, *, offload: Offload | None = None, watcher: Watcher = NOBODY
    ) -> None:
        super().__init__(manager, config, offload=offload, watcher=watcher)
        settings = config.sglang or SglangSettings()
        self.settings = settings
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._page = manager.groups[0].block_size
        self._sorts = settings.schedule_policy == "lpm" and config.enable_prefix_caching
        if self._sorts:
            self.waiting = PrefixQueue()
        self._verbose: set[Job] = set()
        """Jobs that may produce more tokens than count."""
        self._head: tuple[Job, int] | None = None
        """Who was first in line in the last pass, and how much of it was there already."""
        self._seen = 0
        """The pool's version when the order of waiting jobs was last worked out."""

    def add(self, job: Job, now: int) -> None:
        """``job`` has arrived; it may produce no more than the pool has room for, a page for rounding left out."""
        room = (self._usable - 1) * self._page - job.num_prompt_tokens
        if room < 1:
            self._reject(
                job,
                now,
                f"its prompt of {job.num_prompt_tokens} tokens leaves no room in the {self._usable} pages there are",
            )
            return
        job.max_tokens = min(job.max_tokens, room)
        super().add(job, now)

    # -- a pass -----------------------------------------------------------------------------------------------------

    def _form(self, now: int) -> Batch | None:
        self.manager.begin_step()
        self.preempted = self.took_blocks = False
        if self.waiting or self.prefilling:
            chunks = self._extend(now)
            if chunks:
                return Batch(chunks, 0, 0)
        cohort = self.cohort
        if not cohort.count:
            return None
        self._decode(now)
        return Batch((), cohort.count, cohort.context)

    def _extend(self, now: int) -> list[Chunk]:
        """Let prompts in, in order, until one has to wait."""
        manager, settings, page = self.manager, self.settings, self._page
        free = manager.pool.free - (self._wanted(self.lockstep(), 0) if settings.books_sampled else 0)
        budget = free * page - self.ratio.at(self.cohort.tick) * self._outstanding()
        prompt_budget, chunk_budget = settings.max_prefill_tokens, settings.chunked_prefill_size
        chunks: list[Chunk] = []
        self._head = None
        for job in self._candidates():
            hit = None
            past = job.num_computed_tokens
            if job.state is State.WAITING:
                if len(self.running) >= self._max_seqs:
                    break
                hit = manager.lookup(job)
                past = hit.tokens
            self._head = self._head or (job, past)
            new, charged, reserve = self._price(job, past, chunk_budget)
            if not new or charged + reserve >= budget or charged > prompt_budget:
                break
            # Others find a page in the tree when it has been computed, not when it is about to be.
            if manager.allocate(job, new, hit, delay_caching=True) is None:
                break
            if job.state is State.WAITING:
                self.waiting.remove(job)
                self._start(job, new, past, now)
                if job.remaining > settings.clip_max_new_tokens:
                    self._verbose.add(job)
            chunks.append((job, new, past))
            budget -= charged + reserve
            prompt_budget -= charged
            chunk_budget -= charged
            if chunk_budget <= 0:
                break
        return chunks

    def _price(self, job: Job, past: int, chunk_budget: int) -> tuple[int, int, int]:
        """How many tokens ``job`` computes next, how many those cost in whole pages, and what its output needs aside."""
        page = self._page
        left = job.num_tokens - past
        charged = -(-left // page) * page
        if charged <= chunk_budget:
            return left, charged, min(job.remaining, self.settings.clip_max_new_tokens)
        whole = chunk_budget // page * page
        return whole, whole, 0

    def _outstanding(self) -> int:
        """How many tokens the decoding jobs may still produce, each no more than counts."""
        cohort, clip = self.cohort, self.settings.clip_max_new_tokens
        tokens = cohort.ends - cohort.count * cohort.tick
        for job in list(self._verbose):
            if job.state is State.DECODE:
                tokens -= max(0, job.end - cohort.tick - clip)
            elif job.state is not State.PREFILL:
                self._verbose.remove(job)
        return tokens

    def _candidates(self) -> Iterator[Job]:
        """A prompt that is under way, then those that wait, in the order of the policy. Who asks for the next one has let the
        last one in.
        """
        yield from list(self.prefilling.values())
        waiting = self.waiting
        if self._sorts:
            self._seen = self.manager.pool.version
            if len(waiting) <= LONGEST_SORTED:
                yield from self._by_prefix()
        while waiting:
            yield waiting.peek()

    def _by_prefix(self) -> list[Job]:
        """Longest cached prefix first, arrival among equals. Of those that begin alike, with nothing of it cached yet, all but
        one go last: in a later pass they find what that one computed.
        """
        lookup = self.manager.lookup
        blocks = -(-SAME_START // self._page)
        starts: set[object] = set()
        ranked: list[tuple[bool, int, int, Job]] = []
        for at, job in enumerate(self.waiting):
            cached = lookup(job).tokens
            twin = False
            if cached <= SAME_START and job.num_tokens >= blocks * self._page:
                start = job.chain.keys[blocks - 1]
                twin = start in starts
                starts.add(start)
            ranked.append((twin, -cached, at, job))
        ranked.sort(key=lambda entry: entry[:3])
        return [entry[3] for entry in ranked]

    def _decode(self, now: int) -> None:
        """Provide for a decode pass, retracting until what is left of the batch fits."""
        cohort, manager = self.cohort, self.manager
        due = cohort.due()
        self.took_blocks = bool(due)
        if self.growth is not None:
            self.growth.settle_all(due)
        ahead = self.settings.books_sampled
        while self._wanted(self.lockstep() if ahead else due, int(ahead)) > manager.pool.free:
            victim = self._retracted()
            if victim is None:
                break
            self._preempt(victim, now)
            due = [job for job in due if job is not victim]
        if self.preempted:
            left = self.lockstep()
            produced = sum(self._produced(job) for job in left)
            self.ratio.estimate(cohort.tick, produced, sum(job.max_tokens for job in left), len(left))
        for job in due:
            taken = manager.allocate(job, 1)
            assert taken is not None, f"{job} was left without a page"
            cohort.watch(job, cohort.tick + 1)

    def _wanted(self, jobs: Iterable[Job], ahead: int) -> int:
        """How many pages decoding ``jobs`` lack for the tokens they know, and ``ahead`` more."""
        page = self._page
        shift = self.cohort.tick + 1 + ahead
        return sum(
            [
                max(0, -(-(job.base - job.joined + shift) // page) - job.tables[0].length - len(job.ahead))
                for job in jobs
            ]
        )

    def _retracted(self) -> Job | None:
        """Who has to go: least output first. The last one decoding stays, and a prompt under way makes room for it."""
        decoding = self.lockstep()
        if len(decoding) > 1:
            return min(decoding, key=self._produced)
        return next(iter(self.prefilling.values()), None)

    def _produced(self, job: Job) -> int:
        return job.max_tokens - (job.end - self.cohort.tick)

    def _preempt(self, job: Job, now: int) -> None:
        """Retract ``job``: what is cached of it stays, and it queues up behind all others."""
        super()._preempt(job, now)
        self.waiting.remove(job)
        self.waiting.push(job)

    # -- plans ------------------------------------------------------------------------------------------------------

    def shut_passes(self, passes: int) -> int:
        """How many of ``passes`` decode passes are over before a prompt could get in; at least one.

        The budget grows as the ratio falls and as output is produced, and shrinks as pages are taken. What is computed here
        is never less than the budget will be.
        """
        if self._head is None or not (self.waiting or self.prefilling):
            return passes
        cohort, page = self.cohort, self._page
        if self._sorts and not self.prefilling:
            # Whoever is next may be another as soon as something is evicted.
            if self._seen != self.manager.pool.version:
                return 1
            touch = cohort.next_touch()
            if touch is not None:
                passes = min(passes, max(1, touch - cohort.tick))
        candidate, past = self._head
        chunk = self.settings.chunked_prefill_size
        _, charged, reserve = self._price(candidate, past, chunk)
        need = charged + reserve
        if candidate.state is State.WAITING and candidate.num_tokens > chunk:
            need = min(need, chunk)  # having lost what is cached of it, it would come in chunks and need less at once
        held = sum([job.tables[0].length + len(job.ahead) for job in self.lockstep()])
        after = np.arange(1, passes)
        taken = np.maximum(0, cohort.context + (after - 1) * cohort.count - held * page)
        aside = self.ratio.many(cohort.tick, passes - 1) * (self._outstanding() - after * cohort.count)
        fits = self.manager.pool.free * page - taken - aside + 1 > need
        return int(fits.argmax()) + 1 if fits.any() else passes

    # -- the end of a pass ------------------------------------------------------------------------------------------

    def complete(self, batch: Batch, end: int) -> None:
        """The pass of ``batch`` is over: what it computed of prompts can be found from now on."""
        for job, new, past in batch.chunks:
            self.manager.cache(job, past + new)
        super().complete(batch, end)
