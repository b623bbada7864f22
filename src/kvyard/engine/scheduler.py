"""The scheduler: a continuous batcher over the block manager, in the way of vLLM.

There is no prefill and no decode phase. Every job has known tokens and computed ones, and a pass hands out tokens from one
budget: to the running jobs first, in order of admission, then to those that wait, strictly in their order. What doesn't
fit pushes out the newest running job, which starts over from what is still cached of it.

Decoding jobs are kept by ``Cohort`` and cost nothing in a pass in which they need no block. The scheduler never reads a
clock and doesn't know how long a pass takes: ``EngineCore`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.blocks import BlockManager
from kvyard.engine.batch import Batch, Chunk
from kvyard.engine.bursts import Bursts
from kvyard.engine.cohort import Cohort
from kvyard.engine.config import EngineConfig
from kvyard.engine.drafts import Drafts
from kvyard.engine.growth import Growth
from kvyard.engine.job import Job, State
from kvyard.engine.loads import Loads
from kvyard.engine.queue import make_queue
from kvyard.engine.stuck import Stuck
from kvyard.engine.watcher import NOBODY, Watcher
from kvyard.hashing import TraceChain

if TYPE_CHECKING:
    from kvyard.blocks import Hit
    from kvyard.tiers.offload import Offload

UNLIMITED = 1 << 30


class Scheduler:
    """Waiting and running jobs, and the rules by which passes are made of them."""

    prompts_apart = False
    """Whether prompts and decode steps have passes of their own."""

    def __init__(
        self,
        manager: BlockManager,
        config: EngineConfig,
        *,
        offload: Offload | None = None,
        watcher: Watcher = NOBODY,
    ) -> None:
        self.manager = manager
        self.config = config
        self.watcher = watcher
        self.cohort = Cohort()
        self.waiting = make_queue(config.scheduling_policy)
        self.running: dict[int, Job] = {}
        """Every running job by its serial, hence in order of admission."""
        self.prefilling: dict[int, Job] = {}
        """Those of them that still compute known tokens."""
        self.loads = Loads(self, offload) if offload is not None else None
        self.growth: Growth | None = None
        """Where blocks may be taken for many passes at once."""
        self.bursts: Bursts | None = None
        if config.speculative is not None:
            self.bursts = Bursts(self, Drafts(config.speculative, config.seed))
        self.preemptions = 0
        self.rejections = 0
        self._serial = 0
        self._budget = config.max_num_batched_tokens
        self._max_seqs = config.max_num_seqs
        self._limit = config.max_model_len or UNLIMITED
        self._threshold = config.long_prefill_token_threshold or UNLIMITED
        self._newest = config.preemption_mode == "newest"
        self._by_priority = config.scheduling_policy == "priority"
        self._whole = config.scheduler_reserve_full_isl
        self._usable = manager.pool.num_blocks - 1
        self.steps_alone = self.bursts is not None or any(group.restless for group in manager.groups)
        """Whether every pass must be worked out by itself."""
        self._may_defer = manager.caching and not self.steps_alone
        if any(group.rule.forgets for group in manager.groups) or (self.loads is not None and self.loads.stores_output):
            self._may_defer = False
        aligned = [spec.block_size for spec in config.specs if spec.is_state and spec.mode == "align"]
        self._chunk_unit = max(aligned, default=1) if config.enable_prefix_caching else 1
        full = [spec.block_size for spec in config.specs if spec.is_full]
        self._surely_fits = self._usable // len(full) * min(full) if full else UNLIMITED
        """So many tokens fit into the pool in any case; of more, it has to be worked out."""
        self._has_states = any(spec.is_state for spec in config.specs)
        self._stuck: Stuck | None = None
        self._forms = 0
        self.preempted = False
        """Whether somebody was pushed out while the last pass was formed."""
        self.took_blocks = False
        """Whether the last pass saw to the blocks of decoding jobs."""

    @property
    def exacting(self) -> bool:
        """Whether every pass of a decode batch has to do with lower tiers."""
        return self.loads is not None and (self.loads.cleans or self.loads.stores_output)

    # -- in and out -------------------------------------------------------------------------------------------------

    def add(self, job: Job, now: int) -> None:
        """``job`` has arrived. One that can never be served is turned away at once."""
        room = self._limit - job.num_prompt_tokens
        if room < 1:
            self._reject(
                job, now, f"its prompt of {job.num_prompt_tokens} tokens leaves no room in max_model_len {self._limit}"
            )
        else:
            job.max_tokens = min(job.max_tokens, room)
            job.defers = self._may_defer and isinstance(job.chain, TraceChain)
            self.waiting.push(job)

    def drop(self, job: Job, now: int) -> None:
        """``job`` is cancelled: take it out of wherever it is and give its blocks back. Between passes only."""
        if job.state.ended:
            return
        if job.state is State.WAITING:
            self.waiting.remove(job)
        elif job.state is State.LOADING:
            assert self.loads is not None
            del self.loads.parked[job.id]
        else:
            self._stop_running(job)
            self._register_rest(job)
        self._release(job, now)
        job.state = State.CANCELLED
        self.watcher.ended(job, now, "cancelled")

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits, loads included."""
        return not (self.running or self.waiting or (self.loads is not None and self.loads.parked))

    # -- a pass -----------------------------------------------------------------------------------------------------

    def form(self, now: int) -> Batch | None:
        """Decide what the pass that starts at ``now`` computes, and take its blocks; ``None`` if there is nothing to do."""
        batch = self._form(now)
        while batch is None and (self.preempted or (self.loads is not None and self.loads.untangle(now))):
            # The last ones running pushed themselves out, and as the rule is nobody was let in; or those that wait were in
            # each other's way. So try once more.
            batch = self._form(now)
        return batch

    def _form(self, now: int) -> Batch | None:
        self._forms += 1
        if self._has_states:
            self.manager.begin_step()
        self.preempted = False
        cohort = self.cohort
        chunks: list[Chunk] = []
        bursting = self.bursts
        growth = self.growth
        if growth is not None and growth.covers(self):
            due = []
            # With nobody else to take any, blocks can be taken together with those of the passes that follow.
            if self.waiting or self.prefilling:
                growth.through(cohort.tick + 1)
            self.took_blocks = False
        else:
            due = cohort.due()
            self.took_blocks = bool(due)
            if growth is not None:
                growth.settle_all(due)
        budget = self._budget - cohort.count
        if self.prefilling or bursting is not None:
            due += self.prefilling.values()
            if bursting is not None:
                due += bursting.jobs.values()
                budget -= sum(map(bursting.tokens, bursting.jobs.values()))
            due.sort(key=_serial)
        bursts: list[tuple[Job, int]] = []
        for job in due:
            state = job.state
            if state is State.PREFILL:
                budget -= self._continue(job, budget, chunks, now)
            elif state is State.DECODE:
                if bursting is None:
                    if self._provide(job, 1, 0, now):
                        cohort.watch(job, cohort.tick + 1)
                else:
                    tokens = bursting.tokens(job)
                    if self._provide(job, tokens, tokens - 1, now):
                        bursts.append((job, tokens))
        if self.preempted:
            chunks = [chunk for chunk in chunks if chunk[0].state is State.PREFILL]
            bursts = [burst for burst in bursts if burst[0].state is State.DECODE]
        elif self.waiting and budget > 0:
            self._admit(budget, chunks, now)
        if not chunks and not bursts and not cohort.count:
            return None
        context = cohort.context
        for job, tokens in bursts:
            context += job.num_computed_tokens + tokens
        return Batch(chunks, cohort.count + len(bursts), context, bursts)

    def _continue(self, job: Job, budget: int, chunks: list[Chunk], now: int) -> int:
        """Go on with a prompt; returns how many tokens it takes of the budget."""
        past = job.num_computed_tokens
        new = self._cut(job.num_tokens, past, budget)
        if new <= 0 or not self._provide(job, new, 0, now):
            return 0
        chunks.append((job, new, past))
        return new

    def _cut(self, known: int, past: int, budget: int) -> int:
        """How many tokens the next chunk has. Aligned states are only kept at the ends of blocks, so chunks end there."""
        new = known - past
        if new > budget:
            new = budget
        if new > self._threshold:
            new = self._threshold
        unit = self._chunk_unit
        if unit > 1 and past + new < known:
            whole = (past + new) // unit * unit - past
            if whole > 0:
                new = whole
        return new

    def _provide(self, job: Job, new: int, lookahead: int, now: int) -> bool:
        """Get blocks for a running job, preempting others for it; false if it was itself the one to go."""
        allocate = self.manager.allocate
        loads = self.loads
        if loads is not None and loads.cleans and loads.must_wait(job, new + lookahead, now):
            if job.state is State.DECODE and self.bursts is None:
                loads.stall(job)
            return False
        while True:
            if allocate(job, new, lookahead=lookahead) is not None:
                return True
            victim = self._victim()
            self._preempt(victim, now)
            if victim is job:
                return False

    def _victim(self) -> Job:
        running = self.running
        if self._by_priority:
            return max(running.values(), key=lambda job: (job.priority, job.arrival, job.serial))
        return running[next(reversed(running)) if self._newest else next(iter(running))]

    def _preempt(self, job: Job, now: int) -> None:
        """Take everything from ``job``; it goes back to the front and will compute again what isn't cached any more."""
        self.preempted = True
        self.preemptions += 1
        job.preemptions += 1
        self._stop_running(job)
        self._register_rest(job)
        if self.loads is not None:
            self.loads.forget(job, now)
        self.manager.preempt(job)
        job.state = State.WAITING
        self.waiting.push_front(job)
        self.watcher.preempted(job, now)

    def _stop_running(self, job: Job) -> None:
        del self.running[job.serial]
        if self.prefilling.pop(job.serial, None) is not None:
            return
        if self.bursts is not None:
            del self.bursts.jobs[job.serial]
        elif self.loads is None or self.loads.stalled.pop(job.serial, None) is None:
            self.cohort.leave(job)

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, chunks: list[Chunk], now: int) -> None:
        """Let waiting jobs in, in their order, until one has to wait."""
        waiting, running, manager, loads = self.waiting, self.running, self.manager, self.loads
        while waiting and budget > 0 and len(running) < self._max_seqs:
            job = waiting.peek()
            stuck = self._stuck
            if stuck is not None and stuck.holds(job, self._forms, manager.pool.free, chunks):
                stuck.form = self._forms
                break
            if job.num_tokens > self._surely_fits and self._hopeless(job):
                waiting.pop()
                self._reject(
                    job, now, f"its {job.num_tokens} tokens need more blocks than the {self._usable} there are"
                )
                continue
            hit: Hit | None = None
            past = job.num_computed_tokens
            if not past:
                hit = manager.lookup(job)
                past = hit.tokens
                if loads is not None:
                    verdict = loads.ask(job, hit, now)
                    if verdict is False:
                        break
                    if verdict:
                        continue
                    if hit.version != manager.pool.version:  # making room downstairs may have moved things here
                        hit = manager.lookup(job)
                        past = hit.tokens
            new = self._cut(job.num_tokens, past, budget)
            if new < job.num_tokens - past and not self.config.enable_chunked_prefill:
                if job.num_tokens - past <= self._budget:
                    break
                waiting.pop()
                self._reject(
                    job,
                    now,
                    f"its {job.num_tokens - past} tokens don't fit into a pass of {self._budget}, and chunks are off",
                )
                continue
            if loads is not None and loads.cleans and loads.must_wait(job, new, now, hit):
                break
            if not self._enter(job, new, hit):
                if not running and not manager.requests and manager.pool.free == self._usable:
                    waiting.pop()
                    self._reject(
                        job, now, f"its {job.num_tokens} tokens don't fit into the {self._usable} blocks there are"
                    )
                    continue
                if (
                    self._whole
                    and self.growth is not None
                    and loads is None
                    and hit is not None
                    and type(self) is Scheduler
                ):
                    self._stuck = Stuck(job, hit.tokens, self._forms, manager.pool.free)
                break
            waiting.pop()
            budget -= new
            self._start(job, new, past, now)
            chunks.append((job, new, past))

    def _enter(self, job: Job, new: int, hit: Hit | None) -> bool:
        """Get the first blocks of a job, all of its known tokens considered."""
        return (
            self.manager.allocate(
                job, new, hit, must_fit=self._whole and not job.running, has_running=bool(self.running)
            )
            is not None
        )

    def _start(self, job: Job, new: int, past: int, now: int) -> None:
        self._serial += 1
        job.serial = self._serial
        job.state = State.PREFILL
        job.running = True
        job.num_computed_tokens = past
        self.running[job.serial] = self.prefilling[job.serial] = job
        cached = past - job.loaded
        if job.cached_tokens < 0:
            job.cached_tokens = cached
            job.external_tokens = past - cached
            job.storage_tokens = job.loaded_storage
        self.watcher.admitted(job, now, cached, past - cached)
        job.loaded = job.loaded_storage = 0

    def _hopeless(self, job: Job) -> bool:
        """Whether ``job`` can't fit even alone. Windows and states hold less than their length: those must be tried."""
        need = 0
        for spec in self.config.specs:
            if spec.is_full:
                need += -(-job.num_tokens // spec.block_size)
        return need > self._usable

    def _reject(self, job: Job, now: int, reason: str) -> None:
        self.rejections += 1
        job.state = State.REJECTED
        self._release(job, now)
        self.watcher.ended(job, now, reason)

    def shut_passes(self, passes: int) -> int:
        """How many of the next ``passes`` decode passes let nobody in, where a policy has its own reasons; one or more."""
        return passes

    # -- the end of a pass ------------------------------------------------------------------------------------------

    def complete(self, batch: Batch, end: int) -> None:
        """The pass of ``batch`` is over at ``end``, its lockstep part included (``Cohort.advance`` was called)."""
        loads = self.loads
        joining: list[Job] = []
        for job, new, past in batch.chunks:
            job.num_computed_tokens = past + new
            if loads is not None:
                loads.offload.offload(job, end)
            if past + new == job.num_tokens:
                del self.prefilling[job.serial]
                job.emit(1)
                self.watcher.produced(job, 1, end)
                joining.append(job)
        for job, tokens in batch.bursts:
            assert self.bursts is not None
            if self.bursts.verify(job, tokens, end):
                self._finish(job, end)
        if loads is not None and loads.stores_output:
            loads.offer_output(end)
        for job in self.cohort.finished():
            self._finish(job, end)
        for job in joining:
            if job.output >= job.max_tokens:
                self._finish(job, end)
            elif self.bursts is not None:
                self.bursts.join(job)
            else:
                if self.growth is not None:
                    self.manager.note_limits(job)
                self.cohort.join(job)

    def _register_rest(self, job: Job) -> None:
        """Write down what was put off, before the blocks are given back."""
        if self.growth is not None:
            self.growth.settle(job)
        if job.defers and job.state is State.DECODE and job.num_computed_tokens > job.registered_until:
            self.manager.cache(job, job.num_computed_tokens)

    def _finish(self, job: Job, end: int) -> None:
        del self.running[job.serial]
        self._register_rest(job)
        job.state = State.FINISHED
        self._release(job, end)
        self.watcher.ended(job, end, "")

    def _release(self, job: Job, now: int) -> None:
        if self.loads is not None:
            self.loads.forget(job, now)
        if job.tables:
            self.manager.free(job)
        if self.bursts is not None:
            self.bursts.drafts.forget(job.id)

    def lockstep(self) -> list[Job]:
        """The jobs that take part in every decode pass, in order of admission."""
        if self.bursts is not None:
            return []
        stalled = self.loads.stalled if self.loads is not None else ()
        return [job for job in self.running.values() if job.state is State.DECODE and job.serial not in stalled]

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless every job is in one place and the blocks add up."""
        if self.growth is not None:
            self.growth.settle_all(self.running.values())
        self.manager.check_integrity()
        parked = self.loads.parked.values() if self.loads is not None else ()
        places = [*self.waiting, *parked, *self.running.values()]
        assert len({id(job) for job in places}) == len(places), "a job is in two places (I9)"
        for job in places:
            assert not job.state.ended, f"{job} has ended and is still here (I9)"
        decoding = self.lockstep()
        cohort = self.cohort
        assert len(decoding) == cohort.count, f"{cohort.count} decode by count, {len(decoding)} do"
        context = sum(job.base + cohort.tick - job.joined + 1 for job in decoding)
        assert context == cohort.context, f"the context is {context}, not {cohort.context}"
        assert list(self.running) == sorted(self.running), "the running are out of order"
        for holder in self.manager.requests.values():
            assert holder in places, f"{holder} holds blocks and is nowhere"


def _serial(job: Job) -> int:
    return job.serial
