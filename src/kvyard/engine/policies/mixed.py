"""Continuous batching: passes that mix prompts and decode steps, in the way of vLLM.

There is no prefill and no decode phase. Every job has known tokens and computed ones, and a pass hands out tokens from one
budget: to the running jobs first, in order of admission, then to those that wait, strictly in their order. What doesn't
fit preempts a running job, which starts over from what is still cached of it.

Two parts are chosen by the backend: who gets in (``AdmissionRule``), and who is preempted (a function).
"""

from collections.abc import Callable, Sequence

from mypy_extensions import mypyc_attr

from kvyard.blocks import Hit
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.load_source import AT_ONCE, NO_ROOM
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.adapters import AdapterLimit
from kvyard.engine.policies.chunks import UNLIMITED, ChunkSizes
from kvyard.engine.policies.maker import PassMaker
from kvyard.hashing import Key
from kvyard.integers import ceil_div

# -- who is preempted ------------------------------------------------------------------------------------------------


def newest(running: dict[int, Job]) -> Job:
    """Return the job that was admitted last."""
    return running[next(reversed(running))]


def oldest(running: dict[int, Job]) -> Job:
    """Return the job that was admitted first."""
    return running[next(iter(running))]


def least_important(running: dict[int, Job]) -> Job:
    """Return the job of the highest priority value, and the last arrival of those; among equals the one admitted first."""
    return max(running.values(), key=lambda job: (job.priority, job.arrival))


# -- who gets in -----------------------------------------------------------------------------------------------------


@mypyc_attr(allow_interpreted_subclasses=True)  # policies from outside the package derive from it
class AdmissionRule:
    """Gives the head of the queue its first blocks, or doesn't."""

    waits_for_free_blocks = False
    """True if a job that was refused is admitted only when more blocks are free, or more of its prompt is cached."""

    def enter(self, job: Job, new: int, hit: Hit | None) -> bool:
        """Take blocks for the first ``new`` tokens after ``hit``; false if ``job`` has to wait."""
        raise NotImplementedError

    def can_reserve(self, job: Job, hit: Hit) -> bool:
        """Return true if ``job`` may get blocks for all of its prompt but ``hit`` now, since another worker computes it."""
        return True

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if what this keeps contradicts the jobs."""


class FitsNow(AdmissionRule):
    """A job gets in when what it is known to need fits now: its first chunk, or all of its known tokens (``whole``)."""

    def __init__(self, jobs: Lifecycle, whole: bool) -> None:
        self._jobs = jobs
        self._whole = whole
        self._lookahead = jobs.speculative.lookahead if jobs.speculative is not None else 0
        self.waits_for_free_blocks = whole

    def enter(self, job: Job, new: int, hit: Hit | None) -> bool:
        jobs = self._jobs
        return (
            jobs.manager.allocate(
                job,
                new,
                hit,
                external=job.loaded if hit is not None else 0,
                lookahead=self._lookahead,
                must_fit=self._whole and not job.running,
                has_running=bool(jobs.running),
            )
            is not None
        )


class BlockedHead:
    """Remembers the job that was refused last, from one pass to the next.

    For one group of full attention without lower tiers: free blocks must become more, or a job must have computed the block
    after its hit.
    """

    __slots__ = ("_block", "_free", "_job", "_key", "_number", "_refused_in")

    def __init__(self) -> None:
        self._job: Job | None = None
        self._free = 0
        self._block = 0
        self._key: Key | None = None
        self._number = 0
        self._refused_in = 0
        """The number of the last pass in which it was refused."""

    def begin_pass(self) -> None:
        """The next pass is being formed."""
        self._number += 1

    def remember(self, job: Job, hit: int, free: int) -> None:
        """``job`` found ``hit`` tokens cached, and not enough among ``free`` blocks."""
        keys = job.chain.keys
        self._job = job
        self._free = free
        self._block = hit // job.chain.block_size
        self._key = keys[self._block] if self._block < len(keys) else None
        self._refused_in = self._number

    def still(self, job: Job, free: int, chunks: Sequence[Chunk]) -> bool:
        """Return true if ``job`` would be refused again. It must have been in the pass before this one; since then only
        decoding jobs and ``chunks`` took blocks.
        """
        if job is not self._job or self._number != self._refused_in + 1 or free > self._free:
            return False
        for chunk in chunks:
            keys = chunk[0].chain.keys
            if self._block < len(keys) and keys[self._block] == self._key:
                return False
        self._refused_in = self._number
        return True


# -- passes ----------------------------------------------------------------------------------------------------------


class MixedPasses(PassMaker):
    """Forms passes for running jobs first, then for those that wait."""

    def __init__(
        self,
        jobs: Lifecycle,
        config: EngineConfig,
        admission: AdmissionRule,
        victim: Callable[[dict[int, Job]], Job],
        *,
        decoding_first: bool = False,
    ) -> None:
        """``decoding_first``: jobs that decode have their tokens before any prompt goes on, and the threshold for long
        prompts always holds. vLLM goes by admission alone, and lets a job that is alone compute all it can.
        """
        super().__init__(jobs)
        manager = jobs.manager
        self._admission = admission
        self._victim = victim
        self._chunk = ChunkSizes(config, manager.geometry, always=decoding_first)
        self._decoding_first = decoding_first
        self._budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self._max_seqs = config.max_num_seqs
        self._lookahead = jobs.speculative.lookahead if jobs.speculative is not None else 0
        self._adapters = AdapterLimit(config.max_loras) if config.max_loras is not None else None
        self._chunked = config.enable_chunked_prefill
        self._usable = manager.pool.num_blocks - 1
        specs = config.specs
        self._has_states = any(spec.is_state for spec in specs)
        self._full_sizes = [spec.block_size for spec in specs if spec.is_full]
        full = self._full_sizes
        self._surely_fits = self._usable // len(full) * min(full) if full else UNLIMITED
        """Tokens that fit into the pool in any case; more have to be checked."""
        self._blocked: BlockedHead | None = None
        if admission.waits_for_free_blocks and jobs.blocks.ahead and not jobs.may_load:
            self._blocked = BlockedHead()
        # Of the pass being formed.
        self._left = 0
        """Tokens that can still be handed out."""
        self._chunks: list[Chunk] = []
        self._drafted: list[tuple[Job, int]] = []
        self._entering: list[Job] = []
        self._reserved = False
        """True if the tokens of all jobs in lockstep are already taken off the budget."""
        self._without: list[Job] = []
        """Jobs that decode and have no token in it."""

    def form(self, now: int, longest: int) -> Pass | None:
        jobs = self.jobs
        batch, prefilling, speculative, running = jobs.batch, jobs.prefilling, jobs.speculative, jobs.running
        if not running and not jobs.waiting and not self._has_states:
            return None
        if self._has_states:
            jobs.manager.begin_step()
        if self._blocked is not None:
            self._blocked.begin_pass()
        if self._without:
            self._take_back()
        if self._chunk.threshold:
            loading = len(jobs.parked) if jobs.loads is not None and jobs.loads.in_line else 0
            self._chunk.begin_pass(len(running) + len(jobs.waiting) + loading)
        before = jobs.preemptions
        self._chunks, self._drafted = [], []
        if self._entering:
            self._entering = []
        # Most decoding jobs need nothing in a pass but their token. Where it is reserved for them beforehand, only the jobs
        # that are due (a block, a chunk of a prompt, drafts) are visited, in order of admission; else all are, since each
        # takes its tokens from what earlier ones left.
        in_order = not prefilling or self._prompts_last()
        due = jobs.blocks.begin_pass(in_order=in_order, alone=not (jobs.waiting or prefilling))
        took_blocks = bool(due)
        self._left = self._budget
        self._reserved = in_order or self._decoding_first
        if self._reserved:
            self._left -= batch.count
            if prefilling or speculative is not None:
                due += prefilling.values()
                if speculative is not None:
                    due += speculative.jobs.values()
                due.sort(key=_serial)
            if due:
                self._walk(due, due, now)
        else:
            self._walk(list(running.values()), due, now)
        chunks, drafted = self._chunks, self._drafted
        preempted = jobs.preemptions != before
        if not preempted and jobs.waiting and self._left > 0:
            self._admit(self._left, chunks, now)
        if self._has_states:
            jobs.manager.take_copies()  # they are made before the pass computes, and then hold nothing any more
        if not chunks and not drafted and not batch.count:
            return None
        context, length = batch.context, batch.longest()
        for job, tokens in drafted:
            context += job.num_computed_tokens + tokens
            length = max(length, job.num_computed_tokens + tokens)
        # A pass without prompts, drafts or preemptions repeats unchanged for as long as the horizon allows: that makes a plan.
        stable_for = 1
        entering = self._entering
        if (
            not (chunks or drafted or preempted or prefilling or self._without or speculative is not None)
            and longest > 1
            and not (entering and jobs.watcher.waits_for_first_tokens)
        ):
            stable_for = self.horizon.passes(longest, took_blocks or bool(entering))
        return Pass(
            chunks, batch.count + len(drafted), context, length, drafted, stable_for, len(self._without), entering
        )

    def _prompts_last(self) -> bool:
        """Return true if every job that decodes was admitted before those that compute prompts."""
        prefilling = self.jobs.prefilling
        left = len(prefilling)
        for serial in reversed(self.jobs.running):
            if serial not in prefilling:
                return False
            left -= 1
            if not left:
                break
        return True

    # -- the running ------------------------------------------------------------------------------------------------

    def _walk(self, visited: list[Job], due: list[Job], now: int) -> None:
        """Hand out tokens and blocks to the ``visited`` jobs, in order of admission. ``due`` are those of them in lockstep that
        need blocks.
        """
        jobs = self.jobs
        speculative = jobs.speculative
        needy = {job.serial for job in due} if due is not visited else set()
        for job in visited:
            state = job.state
            provided = True
            if state is JobState.PREFILL:
                past = job.num_computed_tokens
                new = self._chunk.cut(job, past, self._left)
                if new > 0:
                    provided = self._provide(job, new, now)
                    if provided:
                        self._chunks.append((job, new, past))
                        self._left -= new
            elif state is not JobState.DECODE:
                continue  # it was preempted for one before it
            elif speculative is not None:
                tokens = min(speculative.tokens(job), self._left)
                if tokens > 0:
                    provided = self._provide(job, tokens, now)
                    if provided:
                        self._drafted.append((job, tokens))
                        self._left -= tokens
            elif self._reserved:
                provided = self._provide(job, 1, now)
            elif job.end < 0:
                continue  # it waits for a block to be copied
            elif not self._left:
                self._leave_out(job)
            elif job.serial not in needy:
                self._left -= 1
            else:
                provided = self._provide(job, 1, now)
                self._left -= provided
            if not provided and job.state is JobState.WAITING and self._victim is not oldest:
                self._end_walk(job.serial)
                break

    def _end_walk(self, serial: int) -> None:
        """A job was its own victim: those behind it have nothing in this pass."""
        if self.jobs.speculative is None:
            for job in self.jobs.lockstep():
                if job.serial > serial:
                    self._leave_out(job)

    def _leave_out(self, job: Job) -> None:
        """``job`` doesn't decode in this pass."""
        self.jobs.sit_out(job)
        self._without.append(job)

    def _take_back(self) -> None:
        """Let jobs without a token in the pass before decode again."""
        for job in self._without:
            if job.state is JobState.DECODE:
                self.jobs.join(job)
        self._without = []

    def _provide(self, job: Job, new: int, now: int) -> bool:
        """Get blocks for a running job, preempting others for it; false if it was itself the one to go."""
        jobs = self.jobs
        stores, lookahead = jobs.stores, self._lookahead
        in_lockstep = job.state is JobState.DECODE and jobs.speculative is None
        if stores is not None and stores.cleans and stores.must_wait(job, new + lookahead, now):
            if in_lockstep:
                stores.stall(job)
            return False
        while True:
            if in_lockstep:
                if jobs.blocks.take(job):
                    return True
            elif jobs.manager.allocate(job, new, lookahead=lookahead) is not None:
                return True
            victim = self._victim(jobs.running)
            self._give_back_tokens(victim, job.serial)
            jobs.preempt(victim, now)
            if victim is job:
                return False

    def _give_back_tokens(self, victim: Job, serial: int) -> None:
        """Return the tokens of ``victim`` to this pass's budget; the job ``serial`` is being handled."""
        if victim.state is JobState.PREFILL:
            for index, (job, new, _) in enumerate(self._chunks):
                if job is victim:
                    del self._chunks[index]
                    self._left += new
                    break
        elif self.jobs.speculative is not None:
            for index, (job, tokens) in enumerate(self._drafted):
                if job is victim:
                    del self._drafted[index]
                    self._left += tokens
                    break
        elif victim.end >= 0 and (self._reserved or victim.serial < serial):
            self._left += 1

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, chunks: list[Chunk], now: int) -> None:
        """Let waiting jobs in, in their order, until one has to wait."""
        jobs, blocked = self.jobs, self._blocked
        waiting, running, manager, loads, stores = jobs.waiting, jobs.running, jobs.manager, jobs.loads, jobs.stores
        adapters, speculative = self._adapters, jobs.speculative
        computes_prompts = len(chunks) > 0
        skipped: list[Job] = []
        if adapters is not None:
            drafting = [job for job, _ in self._drafted]
            adapters.begin_pass([job for job, _, _ in chunks] + jobs.lockstep() + drafting)
        while waiting and budget > 0 and len(running) < self._max_seqs:
            job = waiting.peek()
            if adapters is not None and not adapters.allows(job):
                skipped.append(waiting.pop())  # those behind it may come in
                continue
            if blocked is not None and blocked.still(job, manager.pool.free, chunks):
                break
            if job.num_tokens > self._surely_fits and self._hopeless(job):
                waiting.pop()
                jobs.reject(job, now, f"its {job.num_tokens} tokens need more blocks than the {self._usable} there are")
                continue
            hit: Hit | None = None
            past = job.num_computed_tokens
            if not past:
                hit = manager.lookup(job)
                past = hit.tokens
                if jobs.may_load:
                    if job.received and not self._admission.can_reserve(job, hit):
                        break
                    on_the_way = jobs.load(job, hit, now)
                    if on_the_way == NO_ROOM:
                        break
                    if on_the_way >= 0:
                        continue
                    if on_the_way == AT_ONCE:
                        past += job.loaded
                    elif hit.version != manager.pool.version:  # making room in lower tiers may have moved things here
                        hit = manager.lookup(job)
                        past = hit.tokens
            elif loads is not None and not job.received:
                loads.receive(job)
                past = job.num_computed_tokens
            new = self._chunk.cut(job, past, budget)
            if new < job.num_tokens - past and not self._chunked:
                if job.num_tokens - past <= self._budget:
                    break
                waiting.pop()
                jobs.reject(
                    job,
                    now,
                    f"its {job.num_tokens - past} tokens don't fit into a pass of {self._budget}, and chunks are off",
                )
                continue
            if speculative is not None and job.num_tokens - past == 1 and not computes_prompts:
                # Jobs that decode compute this many each; if this one does too, it doesn't slow their pass down.
                filler = speculative.filler(past) if past or self._drafted else 0
                if new + filler > budget:
                    break
                new += filler
            if new <= 0 or (stores is not None and stores.cleans and stores.must_wait(job, new, now, hit)):
                break
            if not self._admission.enter(job, new, hit):
                if not running and not manager.requests and manager.pool.free == self._usable:
                    waiting.pop()
                    jobs.reject(
                        job, now, f"its {job.num_tokens} tokens don't fit into the {self._usable} blocks there are"
                    )
                    continue
                if blocked is not None and hit is not None:
                    blocked.remember(job, hit.tokens, manager.pool.free)
                break
            waiting.pop()
            budget -= new
            jobs.start(job, past, now)
            if job.received:
                jobs.enter(job, now)
                self._entering.append(job)
                if speculative is not None:
                    self._drafted.append((job, 1))  # it has no drafts yet
            else:
                chunks.append((job, new, past))
            if adapters is not None:
                adapters.add(job)
        for job in reversed(skipped):
            waiting.push_front(job)

    def _hopeless(self, job: Job) -> bool:
        """Return true if ``job`` can't fit even alone. Windows and states hold less than their length: those must be tried."""
        return sum([ceil_div(job.num_tokens, size) for size in self._full_sizes]) > self._usable

    def check_integrity(self) -> None:
        self._admission.check_integrity()


def _serial(job: Job) -> int:
    return job.serial
