"""TensorRT-LLM's scheduling, as its ``PyCapacityScheduler`` and ``PyMicroBatchScheduler`` decide: held to logs of both
(``tests/golden/trtllm``).

Requests are active in order of arrival, up to ``max_num_seqs``. Each pass is formed anew: first by blocks (which active
requests fit), then by tokens (``kvyard.engine.policies.micro_batch``). A request gets blocks for its whole prompt when its
first chunk is computed. By ``guaranteed_no_evict`` it must fit to its end next to all others; by ``max_utilization`` its next
step must, and a request that doesn't fit has later arrivals paused for it. A prompt that could reuse a block which another one
is about to compute waits for that.
"""

from collections.abc import Iterator, Sequence

from kvyard.blocks import Hit
from kvyard.blocks.extent import Extent
from kvyard.blocks.spec import ConfigError
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.backend import SchedulerBackend
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.micro_batch import Context, MicroBatch
from kvyard.engine.policies.mixed import MixedPasses
from kvyard.engine.policies.settings import TrtllmSettings
from kvyard.engine.policies.to_the_end import FitsToTheEnd, no_victim
from kvyard.engine.queue import Queue, make_queue
from kvyard.hashing import TokenChain
from kvyard.integers import ceil_div

UNUSED = {
    "max_loras": "a limit of adapters per pass is modelled for vllm",
    "preemption_mode": "it pauses the latest arrival, or none",
    "scheduler_reserve_full_isl": "it has trtllm.capacity_scheduler_policy",
    "watermark": "it has trtllm.capacity_scheduler_policy",
}
UNUSED_BY_ITS_OWN_RULES = {
    "enable_chunked_prefill": "it has trtllm.enable_chunked_prefill",
    "long_prefill_token_threshold": "it has trtllm.chunk_unit_size",
    "long_prefill_token_threshold_adaptive": "it has trtllm.chunk_unit_size",
    "max_num_scheduled_tokens": "its passes have max_num_batched_tokens",
    "scheduling_policy": "it serves first come, first served",
}
NO_CONTENT: tuple[object, ...] = ()


class EntryQueue:
    """Jobs that wait, in order of their first arrival: a paused job has its old place."""

    def __init__(self, longest: int | None = None) -> None:
        """A prompt that is longer than ``longest`` is rejected in the next pass, whoever waits before it."""
        self.strict = True
        self._longest = longest
        self._jobs: list[Job] = []
        self.entries: dict[Job, int] = {}
        """Jobs that wait or run by the number of their arrival. Ended ones are dropped now and then."""
        self._arrivals = 0

    def push(self, job: Job) -> None:
        self._arrivals += 1
        self.entries[job] = self._arrivals
        self._jobs.append(job)
        self.strict = self._longest is None or job.num_tokens <= self._longest
        if self._arrivals % 1024 == 0:
            self.entries = {job: entry for job, entry in self.entries.items() if not job.state.ended}

    def push_front(self, job: Job) -> None:
        entry, entries = self.entries[job], self.entries
        index = next((index for index, other in enumerate(self._jobs) if entries[other] > entry), len(self._jobs))
        self._jobs.insert(index, job)

    def peek(self) -> Job:
        return self._jobs[0]

    def pop(self) -> Job:
        return self._jobs.pop(0)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)


class TrtllmPasses(PassMaker):
    """Forms passes by blocks, then by tokens."""

    def __init__(self, jobs: Lifecycle, config: EngineConfig) -> None:
        super().__init__(jobs)
        settings = config.trtllm or TrtllmSettings()
        waiting = jobs.waiting
        assert isinstance(waiting, EntryQueue)
        self._waiting = waiting
        self._size = jobs.manager.groups[0].block_size
        self._max_seqs = config.max_num_seqs
        self._chunked = settings.enable_chunked_prefill
        self._budget = config.max_num_batched_tokens
        self._pauses = settings.capacity_scheduler_policy == "max_utilization"
        self._reuses = jobs.manager.caching
        self._micro_batch = MicroBatch(settings, self._size, config.max_num_batched_tokens, config.max_num_seqs)
        self._wait_passes = settings.batch_wait_timeout_iters
        self._wait_tokens = settings.batch_wait_max_tokens_ratio * config.max_num_batched_tokens
        self._waited = 0
        """Passes that prompts have waited for a fuller batch."""
        self._hits: dict[Job, Hit] = {}
        """Cached prefixes of jobs that could begin, in the pass being formed."""
        self._latest = 0
        """The latest entry of a job that has begun."""
        self._overtaken = False
        """True if a job that decodes may have begun after one that came later."""
        self._left_out: list[Job] = []
        """Jobs that decode and have no token in the pass."""

    def form(self, now: int, longest: int) -> Pass | None:
        jobs = self.jobs
        if not jobs.running and not jobs.waiting:
            return None
        jobs.manager.begin_step()
        for job in self._left_out:
            if job.state is JobState.DECODE:
                jobs.join(job)
        self._left_out = []
        if self._overtaken:
            decoding = jobs.lockstep()
            self._overtaken = bool(decoding) or bool(jobs.prefilling)
            in_order = sorted(decoding, key=self._waiting.entries.__getitem__)
            if in_order != decoding:
                jobs.renumber(in_order)
        self._reject_too_long(now)
        active = self._active()
        self._hits.clear()
        fitting, paused = self._max_utilization(active) if self._pauses else self._no_evict(active)
        contexts, decoding = self._micro_batch.form(fitting)
        waits = bool(contexts and decoding and self._wait_for_more(contexts, len(decoding)))
        for job in paused:
            jobs.preempt(job, now)
        chosen = set(decoding)
        for job in jobs.lockstep():
            if job not in chosen:
                jobs.sit_out(job)
                self._left_out.append(job)
        chunks = [] if waits else self._chunks(contexts, now)
        due = jobs.blocks.begin_pass(in_order=not chunks, alone=not (jobs.waiting or jobs.prefilling))
        for job in due:
            taken = jobs.blocks.take(job)
            assert taken, f"{job} was scheduled and there is no block for it"
        batch = jobs.batch
        if not chunks and not batch.count:
            return None
        stable_for = 1
        # A prompt that fits and got no tokens may get some, or be overtaken by a shorter one, in the next pass.
        steady = len(fitting) == len(decoding)
        if steady and not (paused or self._left_out or jobs.prefilling or jobs.in_flight) and longest > 1:
            stable_for = self.horizon.passes(longest, bool(due))
        return Pass(
            chunks, batch.count, batch.context, batch.longest(), stable_for=stable_for, left_out=len(self._left_out)
        )

    def order(self, batch: Pass) -> list[tuple[Job, int]]:
        """Return the jobs of a pass with their tokens in TensorRT-LLM's order: prompts that go on, prompts that end, decoding
        jobs.
        """
        entries = self._waiting.entries
        # They were sorted before; what is cached may have made others the last chunks of their prompts.
        chunks = sorted(batch.chunks, key=lambda chunk: chunk[1] + chunk[2] >= chunk[0].num_tokens)
        decoding = sorted(self.jobs.lockstep() if batch.decoding else (), key=lambda job: entries[job])
        return [*((job, new) for job, new, _ in chunks), *((job, 1) for job in decoding)]

    def _active(self) -> list[Job]:
        entries = self._waiting.entries
        active = [*self.jobs.running.values(), *self._waiting]
        active.sort(key=entries.__getitem__)
        return active[: self._max_seqs]

    def _reject_too_long(self, now: int) -> None:
        """Without chunks, a prompt must fit into a pass."""
        if self._chunked:
            return
        for job in [job for job in self._waiting if job.num_tokens > self._budget]:
            self._waiting.remove(job)
            self.jobs.reject(
                job, now, f"its {job.num_tokens} tokens don't fit into a pass of {self._budget}, and chunks are off"
            )

    # -- by blocks --------------------------------------------------------------------------------------------------

    def _held(self, job: Job) -> int:
        return job.tables[0].length + len(job.ahead) if job.tables else 0

    def _reusable(self, job: Job) -> tuple[int, int]:
        """Return cached blocks of a job that could begin, and how many of them other jobs hold."""
        if not self._reuses:
            return 0, 0
        hit = self._hits.get(job)
        if hit is None:
            hit = self._hits[job] = self.jobs.manager.lookup(job)
        group = hit.groups[0]
        return group.blocks, group.blocks - group.free_blocks(0)

    def _no_evict(self, active: Sequence[Job]) -> tuple[list[Job | Context], list[Job]]:
        """Return those that fit to their ends: first those that decode, then prompts until one doesn't fit."""
        available = self.jobs.manager.pool.free
        fitting: list[Job | Context] = []
        for job in active:
            if job.state is JobState.DECODE:
                available -= self._to_the_end(job) - self._held(job)
                if job.end >= 0:
                    fitting.append(job)
        computing = self._computing(active)
        for job in active:
            if job.state is JobState.DECODE or self._worth_waiting(job, computing):
                continue
            begins = job.state is JobState.WAITING
            cached, held = self._reusable(job) if begins else (0, self._held(job))
            need = self._to_the_end(job) - held
            if need > available:
                break
            available -= need
            fitting.append(Context(job, job.num_computed_tokens, cached * self._size, begins))
        return fitting, []

    def _to_the_end(self, job: Job) -> int:
        return ceil_div(job.num_prompt_tokens + job.max_tokens, self._size)

    def _max_utilization(self, active: Sequence[Job]) -> tuple[list[Job | Context], list[Job]]:
        """Return those whose next step fits, in order of arrival, and those that have to be paused for them."""
        free = self.jobs.manager.pool.free
        fitting: list[Job | Context] = []
        paused: list[Job] = []
        references: dict[Extent, int] = {}
        computing = self._computing(active)
        taken = index = 0
        end = len(active)
        while index < end:
            job = active[index]
            if self._worth_waiting(job, computing):
                index += 1
                continue
            begins = job.state is JobState.WAITING
            held = 0
            if begins:
                held = self._reusable(job)[1]
                need = ceil_div(job.num_tokens, self._size) - held
            elif job.state is JobState.DECODE:
                need = max(0, ceil_div(self._length(job) + 1, self._size) - self._held(job))
            else:
                need = 0
            if taken + need <= free:
                taken += need
                index += 1
                if job.state is not JobState.DECODE:
                    fitting.append(Context(job, job.num_computed_tokens, held * self._size, begins))
                elif job.end >= 0:
                    fitting.append(job)
                continue
            started = [place for place in range(index, end) if active[place].state is not JobState.WAITING]
            if not started:
                break
            end = started[-1]
            paused.append(active[end])
            free += self._freed(active[end], references)
        return fitting, paused

    def _length(self, job: Job) -> int:
        """Return tokens of a decoding job that are computed."""
        return job.base + self.jobs.batch.tick - job.joined if job.end >= 0 else job.num_computed_tokens

    def _freed(self, job: Job, references: dict[Extent, int]) -> int:
        """Return blocks that become free when ``job`` is paused, after those whose extents have ``references`` left."""
        self.jobs.blocks.settle((job,))
        freed = 0
        for extent in job.tables[0]:
            left = references[extent] = references.get(extent, extent.refs) - 1
            if not left:
                freed += len(extent.ids)
        return freed

    # -- prompts that wait for another's blocks ---------------------------------------------------------------------

    def _computing(self, active: Sequence[Job]) -> set[tuple[object, ...]]:
        """Return contents of the next block of each prompt that is partly computed."""
        if not self._reuses:
            return set()
        started = [job for job in active if job.state is JobState.PREFILL]
        contents = {self._content(job, self.jobs.manager.lookup(job).groups[0].blocks) for job in started}
        contents.discard(NO_CONTENT)
        return contents

    def _worth_waiting(self, job: Job, computing: set[tuple[object, ...]]) -> bool:
        """True if another prompt is about to compute the first block that isn't cached of ``job``, which could begin."""
        if not self._reuses or job.state is not JobState.WAITING:
            return False
        content = self._content(job, self._reusable(job)[0])
        if content in computing:
            return True
        if content:
            computing.add(content)
        return False

    def _content(self, job: Job, block: int) -> tuple[object, ...]:
        """Return content of a whole block of ``job`` that isn't cached. TensorRT-LLM goes by its tokens, whatever precedes
        them.
        """
        keys = job.chain.keys
        if block >= len(keys) or (
            (block + 1) * self._size == job.num_tokens
            and self.jobs.manager.pool.maps[0].walk(keys, block + 1)[1] > block
        ):
            return NO_CONTENT  # all whole blocks are cached
        chain = job.chain
        if isinstance(chain, TokenChain):
            return tuple(chain.tokens_of(block, block + 1) or ())
        return (keys[block],)

    # -- the pass ---------------------------------------------------------------------------------------------------

    def _wait_for_more(self, contexts: Sequence[Context], decoding: int) -> bool:
        """True if prompts wait for a fuller batch."""
        if not self._wait_passes and not self._wait_tokens:
            return False
        tokens = decoding + sum([max(1, context.cost) for context in contexts])
        if self._waited < self._wait_passes and tokens < self._wait_tokens:
            self._waited += 1
            return True
        self._waited = 0
        return False

    def _chunks(self, contexts: Sequence[Context], now: int) -> list[Chunk]:
        """Give those that begin blocks for their whole prompts, and return what is computed of all."""
        jobs, size = self.jobs, self._size
        chunks: list[Chunk] = []
        for context in contexts:
            job, new, past = context.job, context.chunk, context.past
            hit = None
            if context.begins:
                hit = jobs.manager.lookup(job) if self._reuses else None
                past = hit.tokens if hit is not None else 0
                new = min(new, job.num_tokens - past)
                if past and past + new < job.num_tokens:
                    new = (past + new) // size * size - past
            # Others find a block when it has been computed, not when it is about to be.
            taken = jobs.manager.allocate(
                job, new, hit, lookahead=job.num_tokens - past - new, delay_caching=self._reuses
            )
            assert taken is not None, f"{job} was scheduled and there are no blocks for it"
            if context.begins:
                entry = self._waiting.entries[job]
                self._overtaken = self._overtaken or entry < self._latest
                self._latest = max(self._latest, entry)
                jobs.waiting.remove(job)
                jobs.start(job, past, now)
            chunks.append((job, new, past))
        return chunks

    def computed(self, done: Pass) -> None:
        """Register the computed parts of prompts, so that they can be found."""
        if self._reuses:
            for job, new, past in done.chunks:
                if job.running and not job.state.ended:
                    self.jobs.manager.cache(job, past + new)


def _as_mocker(config: EngineConfig) -> bool:
    return config.role != "both" or (config.trtllm is not None and config.trtllm.mocker)


def policy(jobs: Lifecycle, config: EngineConfig) -> PassMaker:
    """Return TensorRT-LLM's own rules, or those of Dynamo's mocker: vLLM's passes, but jobs that decode come first."""
    if jobs.may_load or _as_mocker(config):
        return MixedPasses(jobs, config, FitsToTheEnd(jobs), no_victim, decoding_first=True)
    return TrtllmPasses(jobs, config)


def queue(config: EngineConfig) -> Queue:
    """Make the queue of waiting jobs."""
    if _as_mocker(config):
        return make_queue(config.scheduling_policy)
    chunked = (config.trtllm or TrtllmSettings()).enable_chunked_prefill
    return EntryQueue(None if chunked else config.max_num_batched_tokens)


def check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for what it isn't modelled with."""
    config.check_token_budget()
    config.check_plain_model()
    config.refuse(UNUSED)
    (config.trtllm or TrtllmSettings()).check(config.specs[0].block_size)
    if not _as_mocker(config):
        config.refuse(UNUSED_BY_ITS_OWN_RULES)
    elif config.async_scheduling:
        raise ConfigError("async_scheduling is not modelled with trtllm.mocker and roles: turn one of them off")


TRTLLM = SchedulerBackend(block_size=32, check=check, queue=queue, policy=policy, spare_blocks=0)
