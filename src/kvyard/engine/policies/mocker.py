"""SGLang's scheduling as Dynamo's mocker simulates it: prompts first, admission by a budget of tokens, retraction.

A pass either extends (computes prompts) or decodes, never both; while a prompt can get in, decoding waits. A prompt gets in
if it fits into what is free after setting aside a share of the output that running requests may still produce
(``MockerTokenRatio``). When that was too little, the request with the least output goes back to the queue's end. Blocks are
cached and evicted as vLLM's are. It also serves engines that hand prompts over to each other, which SGLang's own rules
(``kvyard.engine.policies.sglang_passes``) aren't modelled for.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvyard.blocks import Hit
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.load_source import AT_ONCE, NO_ROOM
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.queue import ArrivalQueue
from kvyard.integers import ceil_div

FIRST = 0.7
LOWEST_SHARE = 0.14
DECAY_PASSES = 600
LOOK_AHEAD = 20
"""Decode steps per request that a new estimate makes room for."""
LONGEST_SORTED = 128
"""With more waiting than this, policies that go by the cache are first come, first served."""
SAME_START = 32
"""Requests that have no more than this cached and share their first tokens, this many: one goes first, the others later."""


class MockerTokenRatio:
    """Share of the output that running requests may still produce for which room is set aside.

    Setting aside all of it would waste most; setting aside none would retract often. So the share starts high and falls
    with every decode pass without a retraction; a retraction sets it to what the running requests have needed so far. It is
    a function of the number of decode passes, not a running sum, so that many passes at once leave the same ratio.
    """

    def __init__(self, conservativeness: float) -> None:
        first = FIRST * conservativeness
        self._floor = first * LOWEST_SHARE
        self._step = (first - self._floor) / DECAY_PASSES
        self._base = first
        self._since = 0

    def at(self, tick: int) -> float:
        """Return the ratio when ``tick`` decode passes are over."""
        passes = tick - self._since
        return self._base if passes <= 0 else max(self._floor, self._base - passes * self._step)

    def many(self, tick: int, count: int) -> npt.NDArray[np.float64]:
        """Return the ratio after each of the next ``count`` decode passes."""
        passes = np.arange(tick + 1, tick + 1 + count) - self._since
        falling = np.maximum(self._floor, self._base - passes * self._step)
        return np.where(passes <= 0, self._base, falling)

    def estimate(self, tick: int, produced: int, wanted: int, requests: int) -> None:
        """Start the estimate again after a retraction in decode pass ``tick``: from what the remaining requests have
        ``produced`` of the ``wanted`` tokens they may produce.
        """
        self._base = min(1.0, (produced + LOOK_AHEAD * requests) / (wanted + 1))
        self._since = tick + 1


class PrefixQueue(ArrivalQueue):
    """Kept in order of arrival; who is next changes with what is cached."""

    def __init__(self) -> None:
        super().__init__(strict=False)


class MockerPasses(PassMaker):
    """Extend passes and decode passes, first in first out or longest prefix first."""

    def __init__(self, jobs: Lifecycle, config: EngineConfig) -> None:
        super().__init__(jobs)
        settings = config.sglang or SglangSettings()
        self._max_prefill = settings.max_prefill_tokens
        self._chunk_size = settings.chunk
        self._clip = settings.clip_max_new_tokens
        self._books_sampled = settings.books_sampled
        self._ratio = MockerTokenRatio(settings.schedule_conservativeness)
        self._page = jobs.manager.groups[0].block_size
        self._max_seqs = config.max_num_seqs
        self._sorts = settings.schedule_policy == "lpm" and config.enable_prefix_caching
        self._verbose: set[Job] = set()
        """Jobs that may produce more tokens than count."""
        self._head: tuple[Job, int] | None = None
        """First job in the queue in the last pass, and how much of it was available then."""
        self._at_once: set[Job] = set()
        """Jobs among these that wait for nothing."""
        self._blocked = 0
        """Tokens that the next job lacks whose prompt another worker computes, if there is no room for it; 0 for none."""
        self._seen = 0
        """The pool's version when the order of waiting jobs was last worked out."""

    # -- a pass -----------------------------------------------------------------------------------------------------

    def form(self, now: int, longest: int) -> Pass | None:
        jobs = self.jobs
        jobs.manager.begin_step()
        receives = jobs.may_load
        if receives:
            self._reserve(now)
        if jobs.waiting or jobs.prefilling:
            chunks = self._extend(now)
            if chunks:
                return Pass(chunks, 0, 0)
        batch = jobs.batch
        entering = self._enter(now) if receives and jobs.waiting else []
        if not batch.count:
            return None
        before = jobs.preemptions
        took_blocks = self._decode(now)
        stable_for = 1
        if jobs.preemptions != before:
            entering = [job for job in entering if job.state is JobState.DECODE]
        elif not (entering and jobs.watcher.waits_for_first_tokens):
            stable_for = self._shut_passes(self.horizon.passes(longest, took_blocks or bool(entering)))
        return Pass((), batch.count, batch.context, batch.longest(), stable_for=stable_for, entering=entering)

    def _extend(self, now: int) -> list[Chunk]:
        """Let prompts in, in order, until one has to wait."""
        jobs = self.jobs
        manager = jobs.manager
        budget = self._budget()
        prompt_budget, chunk_budget = self._max_prefill, self._chunk_size
        chunks: list[Chunk] = []
        self._head = None
        for job in self._candidates():
            hit = None
            past = job.num_computed_tokens
            if job.state is JobState.WAITING:
                if len(jobs.running) >= self._max_seqs:
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
            if job.state is JobState.WAITING:
                jobs.waiting.remove(job)
                jobs.start(job, past, now)
                if job.remaining > self._clip:
                    self._verbose.add(job)
            chunks.append((job, new, past))
            budget -= charged + reserve
            prompt_budget -= charged
            chunk_budget -= charged
            if chunk_budget <= 0:
                break
        return chunks

    def _budget(self) -> float:
        """Return the tokens that fit, besides those set aside for running jobs."""
        jobs = self.jobs
        free = jobs.manager.pool.free - (self._wanted(jobs.lockstep(), 0) if self._books_sampled else 0)
        return free * self._page - self._ratio.at(jobs.batch.tick) * self._outstanding()

    def _price(self, job: Job, past: int, chunk_budget: int) -> tuple[int, int, int]:
        """Return the tokens that ``job`` computes next, their cost in whole pages, and the room set aside for its output."""
        page = self._page
        left = job.num_tokens - past
        charged = ceil_div(left, page) * page
        if charged <= chunk_budget:
            return left, charged, min(job.remaining, self._clip)
        whole = chunk_budget // page * page
        return whole, whole, 0

    def _outstanding(self) -> int:
        """Return the tokens that decoding jobs, and those whose blocks are in flight, may still produce, each capped."""
        batch, clip = self.jobs.batch, self._clip
        tokens = batch.ends - batch.count * batch.tick
        if self.jobs.may_load:
            coming = [*self.jobs.parked.values(), *(job for job in self.jobs.waiting if job.num_computed_tokens)]
            tokens += sum([min(job.remaining, clip) for job in coming])
        for job in list(self._verbose):
            if job.state is JobState.DECODE:
                tokens -= max(0, job.end - batch.tick - clip)
            elif job.state is not JobState.PREFILL:
                self._verbose.remove(job)
        return tokens

    def _candidates(self) -> Iterator[Job]:
        """Yield a prompt in flight, then waiting ones, in the order of the policy. Asking for the next one means that the
        last was admitted.
        """
        yield from list(self.jobs.prefilling.values())
        waiting = self.jobs.waiting
        if self.jobs.may_load:
            yield from [job for job in waiting if not job.received]
            return
        if self._sorts:
            self._seen = self.jobs.manager.pool.version
            if len(waiting) <= LONGEST_SORTED:
                yield from self._by_prefix()
        while waiting:
            yield waiting.peek()

    def _by_prefix(self) -> list[Job]:
        """Return waiting jobs by longest cached prefix, arrival among equals. Of prompts that begin alike, with none of it
        cached yet, all but one go last: in a later pass they find what the first computed.
        """
        lookup = self.jobs.manager.lookup
        blocks = ceil_div(SAME_START, self._page)
        starts: set[object] = set()
        ranked: list[tuple[bool, int, int, Job]] = []
        for position, job in enumerate(self.jobs.waiting):
            cached = lookup(job).tokens
            repeated = False
            if cached <= SAME_START and job.num_tokens >= blocks * self._page:
                start = job.chain.keys[blocks - 1]
                repeated = start in starts
                starts.add(start)
            ranked.append((repeated, -cached, position, job))
        ranked.sort(key=lambda entry: entry[:3])
        return [entry[3] for entry in ranked]

    # -- prompts that other workers compute -----------------------------------------------------------------------

    def _reserve(self, now: int) -> None:
        """Give room to jobs whose prompts come from other workers, in order, until there is none: all of the prompt at once, by
        the budget that prompts get in by.
        """
        jobs = self.jobs
        page = self._page
        self._blocked = 0
        self._at_once.clear()
        arriving = [job for job in jobs.waiting if job.received]
        if not arriving:
            return
        budget = self._budget()
        there = len(jobs.running) + len(jobs.parked) + sum([job.num_computed_tokens > 0 for job in arriving])
        for job in arriving:
            if job.num_computed_tokens:
                continue
            hit = jobs.manager.lookup(job)
            charged = ceil_div(job.num_tokens - hit.tokens, page) * page
            need = charged + min(job.remaining, self._clip)
            if there >= self._max_seqs or need >= budget:
                self._blocked = need
                break
            answer = jobs.load(job, hit, now)
            if answer == NO_ROOM:
                self._blocked = need
                break
            if answer == AT_ONCE:
                self._at_once.add(job)
            there += 1
            budget -= need

    def _enter(self, now: int) -> list[Job]:
        """Let those decode whose blocks have come, or take no time to come."""
        jobs = self.jobs
        entering: list[Job] = []
        for job in [waiting for waiting in jobs.waiting if waiting.received]:
            past = job.num_computed_tokens
            hit: Hit | None = None
            external = 0
            if not past:
                if job not in self._at_once:
                    break
                hit = jobs.manager.lookup(job)
                jobs.load(job, hit, now)  # others may have taken some of it since
                past, external = job.num_tokens - 1, job.loaded
            if jobs.manager.allocate(job, 1, hit, external=external) is None:
                break
            jobs.waiting.remove(job)
            jobs.start(job, past, now)
            if job.remaining > self._clip:
                self._verbose.add(job)
            jobs.enter(job, now)
            entering.append(job)
        return entering

    # -- decode passes ----------------------------------------------------------------------------------------------

    def _decode(self, now: int) -> bool:
        """Provide for a decode pass, retracting until what is left of the batch fits; returns whether a job needed a page."""
        jobs = self.jobs
        batch, pool = jobs.batch, jobs.manager.pool
        due = jobs.blocks.due()
        took_blocks = bool(due)
        ahead = self._books_sampled
        retracted = False
        while self._wanted(jobs.lockstep() if ahead else due, int(ahead)) > pool.free:
            victim = self._victim()
            if victim is None:
                break
            # What is cached of it stays, and it queues up behind all others.
            jobs.preempt(victim, now, to_front=False)
            retracted = True
            due = [job for job in due if job is not victim]
        if retracted:
            left = jobs.lockstep()
            produced = sum(self._produced(job) for job in left)
            self._ratio.estimate(batch.tick, produced, sum(job.max_tokens for job in left), len(left))
        for job in due:
            taken = jobs.blocks.take(job)
            assert taken, f"{job} was left without a page"
        return took_blocks

    def _wanted(self, jobs: Iterable[Job], ahead: int) -> int:
        """Return the pages that decoding ``jobs`` lack for the tokens they know, and ``ahead`` more."""
        page = self._page
        shift = self.jobs.batch.tick + 1 + ahead
        return sum(
            [
                max(0, ceil_div(job.base - job.joined + shift, page) - job.tables[0].length - len(job.ahead))
                for job in jobs
            ]
        )

    def _victim(self) -> Job | None:
        """Return the job to retract: least output first. The last decoding job stays, and a prompt in flight makes room for
        it."""
        decoding = self.jobs.lockstep()
        if len(decoding) > 1:
            return min(decoding, key=self._produced)
        return next(iter(self.jobs.prefilling.values()), None)

    def _produced(self, job: Job) -> int:
        return job.max_tokens - (job.end - self.jobs.batch.tick)

    # -- plans ------------------------------------------------------------------------------------------------------

    def _shut_passes(self, passes: int) -> int:
        """Return how many of ``passes`` decode passes end before a prompt could be admitted; at least one.

        The budget grows as the ratio falls and as output is produced, and shrinks as pages are taken. The bound computed
        here is never less than the budget will be.
        """
        jobs, page = self.jobs, self._page
        batch, pool = jobs.batch, jobs.manager.pool
        if passes == 1 or not (self._blocked or self._head is not None) or not (jobs.waiting or jobs.prefilling):
            return passes
        if self._sorts and not jobs.prefilling:
            # Another may be next as soon as something is evicted.
            if self._seen != pool.version:
                return 1
            touch = batch.next_touch()
            if touch is not None:
                passes = min(passes, max(1, touch - batch.tick))
        need = self._blocked
        if self._head is not None:
            candidate, past = self._head
            chunk = self._chunk_size
            _, charged, reserve = self._price(candidate, past, chunk)
            need = min(need, charged + reserve) if need else charged + reserve
            if candidate.state is JobState.WAITING and candidate.num_tokens > chunk:
                need = min(
                    need, chunk
                )  # having lost what is cached of it, it would come in chunks and need less at once
        held = sum([job.tables[0].length + len(job.ahead) for job in jobs.lockstep()])
        after = np.arange(1, passes)
        taken = np.maximum(0, batch.context + (after - 1) * batch.count - held * page)
        aside = self._ratio.many(batch.tick, passes - 1) * (self._outstanding() - after * batch.count)
        fits = pool.free * page - taken - aside + 1 > need
        return int(fits.argmax()) + 1 if fits.any() else passes

    def computed(self, done: Pass) -> None:
        """Register the computed parts of prompts, so that they can be found."""
        for job, new, past in done.chunks:
            if not job.state.ended:
                self.jobs.manager.cache(job, past + new)
