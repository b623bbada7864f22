"""The decode batch of SGLang: who is in it, what is set aside for the rest of their answers, and how its passes get pages.

When a pass doesn't fit, requests with the least output are retracted: they go back to the queue.
"""

from kvyard.blocks.radix import Held, RadixGroup, held_of
from kvyard.blocks.state_slots import StateTracking
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import prefetches_of
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.mocker import LOOK_AHEAD
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_budget import NewTokenRatio
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.integers import ceil_div

SLIDE_INTERVAL = 128
"""Tokens by which a window moves on before a request gives back what is out of it: SGLANG_SWA_EVICTION_INTERVAL."""


class DecodeSide:
    """Requests that decode in lockstep, one token a pass."""

    def __init__(self, jobs: Lifecycle, config: EngineConfig, waiting: WaitingQueue) -> None:
        settings = config.sglang or SglangSettings()
        self.jobs = jobs
        self._waiting = waiting
        self.page = jobs.manager.groups[0].block_size
        self.ahead = config.decides_ahead
        """True if the tokens of the last pass are not known yet when the next one is formed."""
        self._clip = settings.clip_max_new_tokens
        self._whole_answers = settings.ignore_eos
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self.tree: RadixGroup | None = jobs.manager.tree if jobs.manager.caching else None
        self.windows = jobs.manager.pool.windows
        self._states = jobs.manager.pool.states
        self._writing: list[tuple[Held, int]] | None = None
        """States that the pass being formed writes, where slots for them are taken then."""
        self._written: dict[Pass, list[tuple[Held, int]]] = {}
        """States that passes in flight write."""
        self.running: list[Job] = []
        """The decode batch, in SGLang's order."""
        self.full = False
        """True if no prompt is tried until a request leaves the batch."""
        self.tried: dict[Job, tuple[int, int]] = {}
        """Tokens of each job, and how many of these were cached, when it was last tried; kept where requests are preempted for
        others."""
        self._tick = jobs.batch.tick
        """Decode passes that the ratio knows of."""
        jobs.blocks.headroom = self.tree is not None and self.page > 1

    # -- who is in it -----------------------------------------------------------------------------------------------

    def taking_part(self, extended: list[Job]) -> list[Job]:
        """Return the jobs that decode in the pass that was formed last, in SGLang's order. ``extended``: those
        that mixed in.
        """
        return [job for job in [*extended, *self.running] if job.end >= 0 and not job.state.ended]

    def passed(self) -> int:
        """Count the passes of a plan since the last pass was formed, except for its first. Returns how many."""
        passed = self.jobs.batch.tick - self._tick
        if passed > 0:
            self.ratio.decay(passed)
        self._tick = self.jobs.batch.tick
        return max(0, passed)

    def drop_ended(self) -> None:
        """Requests that have ended leave the batch."""
        still = [job for job in self.running if job.state < JobState.FINISHED]
        if len(still) < len(self.running):
            self.running, self.full = still, False

    def reorder(self) -> None:
        """Have those in it stand in SGLang's order behind all others that run."""
        self.jobs.renumber([job for job in self.running if job.end >= 0])

    def abort(self, job: Job) -> None:
        """``job`` was cancelled: it has one more token."""
        if self.ahead:
            self.jobs.parting.append(job)
        elif job.state is JobState.DECODE and not job.aborted:
            self.jobs.batch.abort(job)

    def parts(self, job: Job) -> bool:
        """Return true if ``job``, whose prompt was computed just now, was cancelled and ends with its first token."""
        return job in self.jobs.parting

    def computed(self, job: Job) -> int:
        """Return tokens of ``job``, whose first token is known just now, that are computed or in flight."""
        job.emit(1)
        return job.base + self.jobs.batch.tick - job.joined

    # -- tokens -----------------------------------------------------------------------------------------------------

    def aside(self) -> float:
        """Return tokens set aside for the answers of running requests."""
        # One by one, as SGLang adds them up: a product would round differently.
        aside = 0.0
        if self.ahead:
            for job in self.running:
                aside += self.aside_for(job)
            return aside
        ratio = 1.0 if self._whole_answers else self.ratio.current
        clip, tick = self._clip, self.jobs.batch.tick
        for job in self.running:
            left = job.end - tick + job.forgone
            aside += (left if left < clip else clip) * ratio
        return aside

    def aside_for(self, job: Job) -> float:
        """Return tokens set aside for the answer of ``job``."""
        ratio = 1.0 if self._whole_answers else self.ratio.current
        return min(self.remaining(job), self._clip) * ratio

    def remaining(self, job: Job) -> int:
        """Return tokens that a running request has still to produce, those in flight included."""
        if job.end < 0:
            return 1
        batch = self.jobs.batch
        left = job.end - batch.tick + job.forgone
        return left + batch.in_flight(job) if self.ahead else left

    def produced(self, job: Job) -> int:
        """Return tokens of the answer of ``job`` that are known."""
        return job.wanted - self.remaining(job)

    def length(self, job: Job) -> int:
        """Return known tokens of ``job``, its prompt included."""
        return job.num_prompt_tokens + self.produced(job)

    # -- a pass -----------------------------------------------------------------------------------------------------

    def provide(self, now: int) -> bool | None:
        """Provide for a decode pass, retracting until the rest of the batch fits. Returns whether a job needed a page; ``None``
        if nothing decodes.
        """
        ending = self._leave_ending()
        if not self.running:
            return None
        due = self._due()
        if self._has_room(self._pages(due)):
            self.ratio.decay(1)
        elif ending:
            # What ends with the pass in flight makes room.
            self._put_off(due)
            return None
        else:
            due = self._retract(due, now)
            if not self.running:
                return None
        self._tick = self.jobs.batch.tick + 1
        self._take(due)
        return bool(due)

    def mix(self) -> bool:
        """Let the decode batch take part in an extend pass; false if there is none, or no room for it."""
        jobs = self.jobs
        self._leave_ending()
        if not self.running:
            return False
        # From here on they stand behind the prompts of this batch.
        jobs.renumber(self.running)
        due = self._due()
        if not self._has_room(self._pages(due)):
            self._put_off(due)
            return False
        tracking = self._states.tracking if self._states is not None else None
        self._take(due)
        if tracking is not None and not tracking.noted:
            # No states are kept of answers in mixed passes.
            for job, tokens in self._at_state(tracking):
                held_of(job.tables[0]).missed.append(tokens)
        elif self._writing is not None:
            self._free_written(self._writing)
            self._writing = None
        self._tick = jobs.batch.tick + 1
        return True

    def make_pass(self, chunks: list[Chunk], passes: int) -> Pass:
        """Return the pass that was provided for, with ``chunks`` of prompts mixed in or for ``passes`` passes."""
        batch = self.jobs.batch
        made = Pass(chunks, batch.count, batch.context, batch.longest(), stable_for=passes)
        if self._writing is not None:
            self._written[made], self._writing = self._writing, None
        return made

    def _leave_ending(self) -> bool:
        """Requests whose last token is in flight leave the batch, though their pages are still theirs. Returns whether there
        are any.
        """
        if not self.ahead:
            return False
        still = [job for job in self.running if job.end >= 0]
        ending = len(still) < len(self.running)
        if ending:
            self.running, self.full = still, False
        return ending

    def _due(self) -> list[Job]:
        """Return the jobs that need pages in the pass being formed."""
        return self.jobs.blocks.due()

    def _put_off(self, due: list[Job]) -> None:
        """The jobs that are ``due`` don't take part in the pass being formed."""
        for job in due:
            self.jobs.batch.watch(job, self.jobs.batch.tick)

    def _pages(self, due: list[Job]) -> int:
        """Return pages that the jobs which are ``due`` need."""
        return len(due)

    def _has_room(self, pages: int) -> bool:
        """Evict until ``pages`` are free; false if there aren't that many."""
        pool, windows = self.jobs.manager.pool, self.windows
        if self.tree is None:
            return pool.free >= pages and (windows is None or windows.free >= pages)
        pool.radix.make_room(pages)
        return pool.unnamed >= pages and (windows is None or windows.free >= pages)

    def _take(self, due: list[Job]) -> None:
        """Take the pages of a decode pass. SGLang evicts for a page for each request, whether it needs one or not."""
        blocks = self.jobs.blocks
        if self.windows is not None:
            self._slide()
        if blocks.headroom:
            blocks.make_headroom()
        tracking = self._states.tracking if self._states is not None else None
        due_states = self._at_state(tracking) if tracking is not None and tracking.lazy else []
        for job in due:
            taken = blocks.take(job)
            assert taken, f"{job} was left without a page"
        if due_states:
            self._write_states(due_states)

    # -- states inside answers --------------------------------------------------------------------------------------

    def _at_state(self, tracking: StateTracking) -> list[tuple[Job, int]]:
        """Return jobs that the pass being formed brings to a state which may be kept, and their tokens then."""
        batch, ahead, interval = self.jobs.batch, self.ahead, tracking.interval
        lengths = [(job, self.length(job) + (batch.in_flight(job) if ahead else 0)) for job in self.running]
        return [(job, tokens) for job, tokens in lengths if not tokens % interval]

    def _write_states(self, due: list[tuple[Job, int]]) -> None:
        """Take a slot for each state that the pass being formed writes. Where none is free it overwrites the one before, though
        that be a prompt's which isn't inserted yet.
        """
        states = self._states
        assert states is not None
        self._writing = []
        for job, tokens in due:
            held = held_of(job.tables[0])
            if states.free:
                states.free -= 1
                held.writing = 1
            else:
                held.kept, held.track = (0, 0), 0
            self._writing.append((held, tokens))

    def computed_states(self, done: Pass) -> None:
        """The pass ``done`` is over: the states that it wrote are kept, and those before are not."""
        written = self._written.pop(done, None)
        if written is not None:
            for held, tokens in written:
                held.kept = (tokens, 0)
            self._free_written(written)

    def _free_written(self, written: list[tuple[Held, int]]) -> None:
        """Free the slots that are needed no longer once ``written`` are."""
        assert self._states is not None
        for held, _ in written:
            self._states.free += held.writing
            held.writing = 0

    def _slide(self) -> None:
        """Free what is out of the windows of the decode batch, of a request once in ``SLIDE_INTERVAL`` tokens, and not before
        its second decode pass: the pass in flight may still compute its prompt.
        """
        tree, windows, states = self.jobs.manager.tree, self.windows, self._states
        assert tree is not None
        assert windows is not None
        for job in self.running:
            held = held_of(job.tables[0])
            tokens = self.length(job) - 1
            if held.decodes and tokens - windows.window >= held.evicted * self.page + SLIDE_INTERVAL:
                tree.slide(job.tables[0], tokens, held.state_in_answer(states, tokens) if states is not None else 0)
            held.decodes = True

    # -- back to the queue ------------------------------------------------------------------------------------------

    def send_back(self, job: Job, left: int, now: int) -> None:
        """Take everything from ``job``, and evict for the ``left`` requests of the batch; it is in no queue then."""
        self.jobs.preempt(job, now, to_front=False, keeps_in_flight=False)
        self._waiting.remove(job)
        if job in self.tried:
            self.tried[job] = (self.tried[job][0], 0)
        if self.tree is not None:
            self.jobs.manager.pool.radix.make_room(ceil_div(left * LOOK_AHEAD, self.page))

    def _retract(self, due: list[Job], now: int) -> list[Job]:
        """Send those with the least output back to the queue until the rest fits. Returns the rest of ``due``."""
        jobs = self.jobs
        kept = sorted(self.running, key=lambda job: (self.produced(job), -job.num_prompt_tokens), reverse=True)
        retracted: list[Job] = []
        while len(kept) > 1 and (not retracted or not self._has_room(self._pages(due))):
            victim = kept.pop()
            due = [job for job in due if job is not victim]
            retracted.append(victim)
            self.send_back(victim, len(kept), now)
        for victim in retracted:
            self._waiting.push(victim)
        if len(kept) == 1 and not self._has_room(self._pages(due)):
            # SGLang gives it up: a prompt in flight holds the rest, and is not retracted.
            due = []
            jobs.drop(kept.pop(), now)
        prefetches = prefetches_of(jobs.loads)
        if prefetches is not None:
            for victim in retracted:
                prefetches.retracted(victim)
        self.running = kept
        self.full = False
        jobs.renumber(kept)
        produced = sum([self.produced(job) for job in kept])
        self.ratio.estimate(produced, sum([job.wanted for job in kept]), len(kept))
        needing = set(due)
        return [job for job in kept if job in needing]
