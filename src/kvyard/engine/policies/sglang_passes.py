"""SGLang's scheduling, as its ``Scheduler`` and ``PrefillAdder`` decide: held to logs of both (``tests/golden/sglang``).

A pass extends (computes prompts) or decodes; while a prompt can get in, decoding waits, unless the two are mixed. Once one did
not fit (``Budget``), the batch counts as full until a request leaves it. When the share set aside was too little, requests with
the least output go back to the queue.

What is cached is a radix tree (``kvyard.blocks.radix``), with host memory below it or without (``kvyard.tiers.hicache``).
"""

from typing import ClassVar

from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import TreeLoads, prefetches_of
from kvyard.engine.passes import Pass
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_admission import Admission
from kvyard.engine.policies.sglang_decoding import DecodeSide
from kvyard.engine.policies.sglang_drafts import DraftSide
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.engine.speculative import ReservedDrafts


class SglangPasses(PassMaker):
    """Extend passes and decode passes."""

    spare_tokens: ClassVar[int] = 1

    def __init__(self, jobs: Lifecycle, config: EngineConfig) -> None:
        super().__init__(jobs)
        waiting = jobs.waiting
        assert isinstance(waiting, WaitingQueue)
        # A plan is made only where nobody waits, or nobody is tried until a request leaves: who comes later changes nothing.
        # Unless it asks storage for its prompt.
        self._prefetches = prefetches_of(jobs.loads)
        waiting.strict = self._prefetches is None
        self._waiting = waiting
        self._hicache = jobs.loads.hicache if isinstance(jobs.loads, TreeLoads) else None
        drafts = jobs.speculative
        self._decode: DecodeSide
        if isinstance(drafts, ReservedDrafts):
            self._decode = DraftSide(jobs, config, waiting, drafts)
        else:
            self._decode = DecodeSide(jobs, config, waiting)
        self._admission = Admission(jobs, config, self._decode, waiting)
        # A plan would have to know what is in flight, when requests arrive in it, or how windows move on.
        settings = config.sglang or SglangSettings()
        self._interval = settings.scheduler_recv_interval
        waiting.holds = self._interval > 1
        self._unseen = 0
        """Passes since the engine last looked for jobs that have come."""
        self._only_decoded = False
        """True if the last pass only decoded."""
        self._plans = not (
            self._decode.ahead
            or settings.schedule_policy == "hrrn"
            or waiting.holds
            or self._decode.windows is not None
            or drafts is not None
        )
        self._extended_tokens = 0
        """Tokens of the last pass that extended."""
        self._extended: list[Job] = []
        """The jobs of the last pass, if that extended; they are not in the decode batch yet."""
        self._endings = 0
        """Jobs that had ended when the decode batch was last looked through."""
        self._published: set[Job] = set()
        """Jobs whose prompts were inserted at the end of this pass."""
        self._founding = 0
        """Tokens of the extend pass that the decode batch began with. SGLang counts them again with each decode pass."""
        self._aborted: list[Job] = []
        """Running jobs that were cancelled since the last pass was formed."""
        jobs.finishing = self._finishing
        jobs.aborting = self._aborted.append

    @property
    def ratio(self) -> float:
        """Share of the running requests' output that room is set aside for."""
        return self._decode.ratio.current

    def decoding(self) -> list[Job]:
        """Return the jobs that decode in the pass that was last formed, in SGLang's order."""
        return self._decode.taking_part(self._extended)

    # -- a pass -----------------------------------------------------------------------------------------------------

    def form(self, now: int, longest: int) -> Pass | None:
        jobs = self.jobs
        jobs.manager.begin_step()
        if self._prefetches is not None:
            self._prefetches.begin_pass(self._waiting.jobs)
        jobs.batch.resting = bool(jobs.in_flight) and not jobs.in_flight[-1].decided.decoding
        if self._waiting.holds:
            self._unseen += 1
            if not self._only_decoded or self._unseen >= self._interval:
                self._receive()
        new_pass = self._form(now, longest)
        if new_pass is None and self._waiting.outside and not jobs.in_flight:
            self._receive()
            new_pass = self._form(now, longest)
        self._only_decoded = new_pass is not None and not new_pass.chunks
        jobs.batch.resting = False
        if new_pass is not None and self._hicache is not None:
            new_pass.begins = self._hicache.clock
        return new_pass

    def _receive(self) -> None:
        self._unseen = 0
        self._waiting.receive()

    def _form(self, now: int, longest: int) -> Pass | None:
        jobs, decode, admission = self.jobs, self._decode, self._admission
        if self._aborted:
            self._abort(now)
        self._merge()
        chunks = admission.admit(now)
        if chunks:
            self._extended = [job for job, _, _ in chunks]
            self._extended_tokens = sum([new for _, new, _ in chunks])
            if admission.mixes and decode.mix():
                made = decode.make_pass(chunks, 1)
                self._extended += decode.running
                self._extended_tokens += len(decode.running)
                decode.running = []
            else:
                made = Pass(chunks, 0, 0)
            self._waiting.processed += self._extended_tokens
            made.until, admission.until = admission.until, 0
            return made
        if not decode.running:
            if not jobs.waiting and not jobs.in_flight and admission.chunked is None:
                decode.ratio.reset()
            return None
        took_pages = decode.provide(now)
        if took_pages is None:
            # With the last of the decode batch given up, the prompt under way may have room.
            again = admission.chunked is not None and not decode.running and not jobs.in_flight
            return self._form(now, longest) if again else None
        self._waiting.processed += self._founding
        return decode.make_pass([], self._stable_for(longest, took_pages))

    def _stable_for(self, longest: int, took_pages: bool) -> int:
        """Return for how many passes, up to ``longest``, the decode batch stays as it is."""
        jobs, admission = self.jobs, self._admission
        if not self._plans or admission.chunked is not None:
            return 1
        if jobs.waiting and (not self._decode.full or admission.preempts):
            return 1
        if self._prefetches is not None and not self._prefetches.settled:
            return 1
        passes = self.horizon.passes(longest, took_pages)
        if self._hicache is not None and self._hicache.pages.writes_back and not jobs.blocks.evict_none(passes):
            return 1  # the scheduler waits for the copy of what is evicted
        return passes

    def _merge(self) -> None:
        """Take what became of the last pass into account: its prompts join the decode batch, ended requests leave it."""
        decode, admission = self._decode, self._admission
        self._waiting.processed += decode.passed() * self._founding
        chunked = admission.chunked
        if chunked is not None and chunked.state.ended:
            chunked = admission.chunked = None
        if chunked is not None and admission.stash:
            self._insert(chunked, admission.stash)
            admission.stash = 0
        overtaken = False
        if self._extended:
            joined = [job for job in self._extended if job is not chunked and not job.state.ended]
            if len(joined) < len(self._extended):
                decode.full = False
            if joined:
                if not decode.running:
                    decode.running, decode.full = joined, False
                    self._founding = self._extended_tokens
                else:
                    # Shorter prompts may have passed one in chunks, which stands behind them from now on.
                    overtaken = joined[0].serial < decode.running[-1].serial
                    decode.running = decode.running + joined
            self._extended = []
        if self._endings != self.jobs.endings:
            self._endings = self.jobs.endings
            decode.drop_ended()
        if overtaken:
            decode.reorder()

    def _abort(self, now: int) -> None:
        """A prompt in chunks that was cancelled goes; others have one more token and are inserted."""
        admission = self._admission
        for job in self._aborted:
            if job is admission.chunked:
                admission.chunked, admission.stash = None, 0
                self.jobs.drop(job, now)
            else:
                self._decode.abort(job)
        self._aborted.clear()

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _insert(self, job: Job, tokens: int, *, finished: bool = False) -> None:
        tree = self._decode.tree
        if tree is not None:
            tree.insert(job, tokens, job.priority, finished=finished)
        elif self.jobs.manager.caching:
            self.jobs.manager.cache(job, tokens)

    def computed(self, done: Pass) -> None:
        """Prompts that are computed can be found from now on; chunks of them from the next pass on."""
        self._published.clear()
        self._decode.computed_states(done)
        for job, new, past in done.chunks:
            if job.running and past + new >= job.num_tokens and not job.state.ended:
                job.awaits = 0
                tokens, ends = past + new, job.output + 1 >= job.max_tokens
                if not ends and self._decode.parts(job):
                    tokens, ends = self._decode.computed(job), True
                self._insert(job, tokens, finished=ends)
                self._published.add(job)

    def _finishing(self, job: Job) -> None:
        """``job`` has its last token: what it computed can be found from now on."""
        if job not in self._published:
            self._insert(job, job.num_computed_tokens, finished=True)
