"""The life of jobs in one engine: where each one is, and every step from one state to the next.

A job waits, may load, runs (computes its prompt, then decodes), and ends. Here are the effects of each step on queues,
blocks, lower tiers and counts, and the reports to the watcher. Which job takes which step, and when, is decided elsewhere:
by the policy that forms passes, and by the clients.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvyard.blocks import BlockManager, Hit
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.decode_blocks import DecodeBlocks
from kvyard.engine.handovers import EngineHandovers
from kvyard.engine.horizon import in_lockstep
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import NO_HELP, LoadSource
from kvyard.engine.passes import InFlightPass, Pass
from kvyard.engine.queue import Queue
from kvyard.engine.speculative import SpeculativeBatch
from kvyard.engine.stores import Stores
from kvyard.engine.watcher import Watcher


class Transfers(NamedTuple):
    """Ways for blocks to come to one device and leave it, besides being computed and evicted."""

    loads: LoadSource | None = None
    """Source of the rest of a prompt."""
    handovers: EngineHandovers | None = None
    """Prompts that go to other workers, and come from there."""
    stores: Stores | None = None
    """Computed blocks that go to lower tiers."""


class Lifecycle:
    """Every job of one engine."""

    def __init__(
        self,
        manager: BlockManager,
        waiting: Queue,
        batch: DecodeBatch,
        blocks: DecodeBlocks,
        transfers: Transfers,
        *,
        speculative: SpeculativeBatch | None,
        watcher: Watcher,
    ) -> None:
        self.manager = manager
        self.waiting = waiting
        self.running: dict[int, Job] = {}
        """Every running job by its serial, hence in order of admission."""
        self.prefilling: dict[int, Job] = {}
        """Running jobs that still compute known tokens."""
        self.batch = batch
        """Running jobs that decode in lockstep."""
        self.blocks = blocks
        self.parked: dict[str, Job] = {}
        """Jobs in no queue, because their blocks are in flight."""
        self.loads = transfers.loads
        self.handovers = transfers.handovers
        self.stores = transfers.stores
        self.may_load = transfers.loads is not None or transfers.handovers is not None
        """True if a waiting job may have to wait for blocks in flight."""
        self.speculative = speculative
        """Running jobs that decode with drafts, if the engine does."""
        self.watcher = watcher
        """Receiver of reports from all parts of the engine."""
        self.in_flight: list[InFlightPass] = []
        """Passes whose tokens are not known yet, the next to end first: with asynchronous scheduling."""
        self.preemptions = 0
        self.rejections = 0
        self.endings = 0
        """Jobs that have ended in any way."""
        self._serial = 0
        self.finishing: Callable[[Job], None] | None = None
        """Called for a job that has its last token, before its blocks are freed."""
        self.aborting: Callable[[Job], None] | None = None
        """Called for a running job that is cancelled, if that has one more token (``Job.aborted``)."""
        self.parting: list[Job] = []
        """With passes decided ahead: cancelled jobs that end with the pass in flight, though the next one has them."""

    @property
    def idle(self) -> bool:
        """Return true if nothing runs and nothing waits, loads included."""
        return not (self.running or self.waiting or self.parked)

    @property
    def leaving(self) -> dict[str, Job]:
        """Jobs that have ended, whose blocks are still in use."""
        leaving = self.loads.leaving if self.loads is not None else {}
        return leaving if self.handovers is None else {**leaving, **self.handovers.leaving}

    def lockstep(self) -> list[Job]:
        """Return the jobs that take part in every decode pass, in order of admission."""
        return in_lockstep(self.running) if self.speculative is None else []

    # -- in ---------------------------------------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        """Add ``job``, which has arrived, to the queue."""
        self.blocks.arrive(job)
        self.waiting.push(job)
        if self.loads is not None:
            self.loads.arrived(job)

    def land(self, now: int) -> None:
        """Transfers that have ended by ``now`` take effect: who waited for them goes to the front."""
        loads, handovers, stores = self.loads, self.handovers, self.stores
        if handovers is not None:
            handovers.free_ended()
        if loads is not None:
            if stores is not None:
                stores.before_landing()
            self._wait_again(loads.land(now))
            if stores is not None:
                stores.resume()
        if handovers is not None:
            self._wait_again(handovers.land())

    def _wait_again(self, jobs: list[Job]) -> None:
        for job in jobs:
            del self.parked[job.id]
            self.waiting.push_front(job)

    def free_ended(self, now: int) -> None:
        """Give back blocks of ended jobs that no transfer uses any more by ``now``."""
        if self.loads is not None:
            self.loads.free_ended(now)
        if self.handovers is not None:
            self.handovers.free_ended()

    def load(self, job: Job, hit: Hit, now: int) -> int:
        """Have a waiting ``job`` wait for what lower tiers, or another worker, have of its prompt. The answer is that of
        ``LoadSource.ask``: from 0 on, it has left the queue.
        """
        loads, others_run = self.loads, bool(self.running)
        if job.received and self.handovers is not None:
            tokens = self.handovers.ask(job, hit, now, others_run)
        elif loads is not None:
            backlog = 0
            if loads.weighs:
                backlog = sum(
                    [prefilling.num_tokens - prefilling.num_computed_tokens for prefilling in self.prefilling.values()]
                )
            tokens = loads.ask(job, hit, now, others_run, backlog)
        else:
            return NO_HELP
        if tokens > NO_HELP:
            self.waiting.remove(job)
            self.parked[job.id] = job
            self.watcher.loading(job, now, tokens)
        return tokens

    def start(self, job: Job, past: int, now: int) -> None:
        """Start ``job``, which has left the queue and has its first blocks, with ``past`` tokens computed."""
        self._serial += 1
        job.serial = self._serial
        job.state = JobState.PREFILL
        job.running = True
        job.num_computed_tokens = past
        self.running[job.serial] = self.prefilling[job.serial] = job
        if self.loads is not None and not job.received:
            self.loads.admitted(job)
        cached = past - job.loaded
        if job.cached_tokens < 0:
            job.cached_tokens = cached
            job.external_tokens = past - cached
            job.tier_tokens = job.loaded_by_tier
        self.watcher.admitted(job, now, cached, past - cached)
        job.loaded, job.loaded_by_tier = 0, ()
        job.pulled = 0

    def enter(self, job: Job, now: int) -> None:
        """Let ``job``, which was just started and whose prompt another worker computed, decode in the pass being formed."""
        del self.prefilling[job.serial]
        job.received = False
        if self.speculative is not None:
            self.speculative.join(job)
        else:
            self.blocks.join(job)
        if self.handovers is not None:
            self.handovers.entered(job, now)

    # -- back -------------------------------------------------------------------------------------------------------

    def preempt(self, job: Job, now: int, to_front: bool = True, keeps_in_flight: bool = True) -> None:
        """Take everything from ``job``; it goes back to the queue and will compute again what isn't cached any more. Its token
        in flight, if there is one, counts if it ``keeps_in_flight``.
        """
        self.preemptions += 1
        job.preemptions += 1
        if self.in_flight:
            launched = self.in_flight[-1]
            if not keeps_in_flight:
                launched.forget(job)
            elif job.end >= 0 and self.batch.in_flight(job):
                launched.owed.append(job)
        self._stop(job)
        job.awaits = 0
        if self.loads is not None:
            self.loads.preempted(job, now)
        self.manager.preempt(job)
        job.state = JobState.WAITING
        if to_front:
            self.waiting.push_front(job)
        else:
            self.waiting.push(job)
        self.watcher.preempted(job, now)

    def renumber(self, jobs: Sequence[Job]) -> None:
        """Have ``jobs``, all of those that decode, stand in this order behind all others that run."""
        speculative = self.speculative
        for job in jobs:
            del self.running[job.serial]
            if speculative is not None:
                del speculative.jobs[job.serial]
                continue
            job.awaits = self.batch.in_flight(job)
            self.blocks.settle((job,))
            self.batch.leave(job)
        for job in jobs:
            self._serial += 1
            job.serial = self._serial
            self.running[job.serial] = job
            if speculative is not None:
                speculative.join(job)
            else:
                self.blocks.join(job)

    def resolve_deadlock(self, now: int) -> bool:
        """Resolve a deadlock: nothing runs and no job could be admitted. If waiting jobs hold loaded blocks, and no
        transfer will ever change that, take the blocks of the last of these jobs; returns true if there was one.
        """
        loads, handovers = self.loads, self.handovers
        if not self.may_load or self.running or (handovers is not None and self.parked):
            return False
        if loads is not None and (loads.in_line or loads.earliest_deadline() is not None):
            return False
        for job in reversed(list(self.waiting)):
            if job.tables:
                self.preemptions += 1
                job.preemptions += 1
                if job.received:
                    job.received = False
                    job.loaded = 0
                elif loads is not None:
                    loads.preempted(job, now, bar=len(self.manager.requests) == 1)
                self.manager.preempt(job)
                self.watcher.preempted(job, now)
                return True
        return False

    # -- out --------------------------------------------------------------------------------------------------------

    def reject(self, job: Job, now: int, reason: str) -> None:
        """Reject ``job``, which is in no queue and can never be served."""
        self.rejections += 1
        job.state = JobState.REJECTED
        self._release(job, now)
        self.watcher.ended(job, now, reason)

    def cancel(self, job: Job, now: int) -> None:
        """``job`` is cancelled: it goes, or has one more token first. Between passes only."""
        if self.aborting is not None and job.running and not job.state.ended:
            self.aborting(job)
        else:
            self.drop(job, now)

    def drop(self, job: Job, now: int) -> None:
        """``job`` is cancelled: take it out of wherever it is and give its blocks back. Between passes only."""
        if job.state.ended:
            return
        if job.state is JobState.WAITING:
            self.waiting.remove(job)
        elif job.state is JobState.LOADING:
            del self.parked[job.id]
        else:
            self._stop(job)
        self._release(job, now)
        job.state = JobState.CANCELLED
        self.watcher.ended(job, now, "cancelled")

    def save(self, done: Pass, now: int) -> None:
        """Store what ``done`` has computed by ``now``, though its tokens aren't known before that has left the device."""
        stores = self.stores
        assert stores is not None
        for job, new, past in done.chunks:
            if not job.state.ended:
                job.num_computed_tokens = past + new
                stores.store(job, now)

    def complete(self, done: Pass, end: int) -> None:
        """Complete the pass ``done``, which ended at ``end``, its lockstep part included
        (``DecodeBatch.advance`` was called).
        """
        stores, speculative, watcher = self.stores, self.speculative, self.watcher
        joining: list[Job] = []
        finished: list[Job] = []
        for job, new, past in done.chunks:
            if job.state.ended:
                continue  # it was given up in this pass
            job.num_computed_tokens = min(past + new, job.num_tokens)  # made-up drafts may come after those it knows
            if stores is not None:
                stores.store(job, end)
            if past + new >= job.num_tokens:
                del self.prefilling[job.serial]
                job.emit(1)
                watcher.produced(job, 1, end)
                joining.append(job)
        for job in done.entering if speculative is None else ():
            if not job.state.ended:
                watcher.produced(job, 1, end)
        if speculative is not None:
            for job, tokens in done.drafted:
                if job.state.ended:
                    continue
                produced = speculative.verify(job, tokens)
                if stores is not None:
                    stores.store(job, end)
                watcher.produced(job, produced, end)
                if speculative.ends(job):
                    del speculative.jobs[job.serial]
                    finished.append(job)
        if stores is not None and stores.stores_output:
            stores.store_output(self.lockstep(), end)
        finished += self.batch.finished()
        for job in joining:
            if job.output >= job.max_tokens:
                finished.append(job)
            elif speculative is not None:
                speculative.join(job)
            else:
                self.blocks.join(job)
        if len(finished) > 1:
            finished.sort(key=_serial)
        for job in finished:
            self._finish(job, end)

    # -- passes decided ahead ---------------------------------------------------------------------------------------

    def launch(self, decided: Pass) -> None:
        """Launch ``decided``; the next pass will be decided on before it is over. Counts its tokens as computed, though their
        output isn't known yet.
        """
        batch, decoding = self.batch, self.lockstep() if self.watcher.wants_tokens else []
        batch.num_in_flight += 1
        if decided.decoding:
            batch.advance(1)
        ending = batch.finished()
        first = list(decided.entering)
        for job, new, past in decided.chunks:
            job.num_computed_tokens = past + new
            job.num_in_flight_tokens += new
            if past + new == job.num_tokens:
                del self.prefilling[job.serial]
                first.append(job)
                if self.speculative is not None:
                    self.speculative.join(job)
                elif job.output + 1 >= job.max_tokens:
                    job.state = JobState.DECODE
                    ending.append(job)
                else:
                    job.awaits = 1
                    self.blocks.join(job)
        ending.sort(key=_serial)
        self.in_flight.append(InFlightPass(decided, first, ending, decoding))

    def add_in_flight(self, launched: InFlightPass) -> None:
        """Add a pass that is like the one before it."""
        self.batch.num_in_flight += 1
        self.in_flight.append(launched)

    def retire(self, end: int) -> None:
        """End the first of the passes in flight at ``end``: its tokens are known now. Cancelled jobs are gone."""
        launched = self.in_flight.pop(0)
        self.batch.num_in_flight -= 1
        for job, new, _ in launched.decided.chunks:
            job.num_in_flight_tokens = max(0, job.num_in_flight_tokens - new)
        if self.speculative is not None:
            self._verify(launched, self.speculative, end)
            return
        for job in launched.first:
            if not job.state.ended:
                self.watcher.produced(job, 1, end)
        for job in launched.owed:
            if not job.state.ended:
                job.emit(1)
        for job in self.in_flight[0].ending if self.in_flight else ():
            if job.num_tokens < job.num_computed_tokens and not job.state.ended:
                job.emit(job.num_computed_tokens - job.num_tokens)
        parting = self._part(launched) if self.parting else []
        for job in sorted([*launched.ending, *parting], key=_serial) if parting else launched.ending:
            if not job.state.ended:
                if not job.aborted:
                    job.emit(job.max_tokens - job.output)
                if job.state is JobState.WAITING:  # it was preempted in the meantime
                    self.waiting.remove(job)
                    self.running[job.serial] = job
                elif self.manager.caching:
                    self.manager.cache(job, job.num_computed_tokens)
                self._finish(job, end)

    def _verify(self, done: InFlightPass, speculative: SpeculativeBatch, end: int) -> None:
        """End a pass of jobs that decode with drafts. Jobs that have ended or gone back to the queue have no token of it."""
        finished: list[Job] = []
        for job in done.first:
            if not job.state.ended:
                job.emit(1)
                self.watcher.produced(job, 1, end)
                if speculative.ends(job):
                    finished.append(job)
        for job, tokens in done.decided.drafted:
            if job.state is JobState.DECODE and job not in done.gone:
                self.watcher.produced(job, speculative.verify(job, tokens), end)
                if speculative.ends(job):
                    finished.append(job)
        finished.sort(key=_serial)
        for job in finished:
            del speculative.jobs[job.serial]
            self._finish(job, end)

    def _part(self, done: InFlightPass) -> list[Job]:
        """Return cancelled jobs that have their last token of the pass ``done`` though the pass in flight may compute another.
        They are in no batch then. Those that had no token of it go on.
        """
        ending: list[Job] = []
        batch, later = self.batch, self.in_flight
        parting, self.parting = self.parting, []
        batch.resting = bool(later) and not later[-1].decided.decoding
        for job in parting:
            if job.state is not JobState.DECODE or job in done.ending:
                continue
            if job not in done.first and (
                not done.decided.decoding or any(job in launched.first for launched in later)
            ):
                self.parting.append(job)
                continue
            job.aborted = True
            if job.end >= 0:  # otherwise the pass in flight has its last token
                self.blocks.settle((job,))
                batch.leave(job)
            ending.append(job)
        batch.resting = False
        return ending

    def sit_out(self, job: Job) -> None:
        """Leave ``job`` out of the pass being formed; ``join`` lets it decode again."""
        self.blocks.settle((job,))
        if self.batch.in_flight(job):
            self.in_flight[-1].owed.append(job)
        self.batch.leave(job)

    def join(self, job: Job) -> None:
        """Let ``job``, which sat out, decode in the pass being formed."""
        job.awaits = job.num_in_flight_tokens = 0
        self.blocks.join(job)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, end: int) -> None:
        del self.running[job.serial]
        self.blocks.close(job)
        if self.finishing is not None:
            self.finishing(job)
        job.state = JobState.CANCELLED if job.aborted else JobState.FINISHED
        self._release(job, end)
        self.watcher.ended(job, end, "cancelled" if job.aborted else "")

    def _stop(self, job: Job) -> None:
        """Take ``job``, which isn't finished, off the running jobs; it keeps its blocks."""
        del self.running[job.serial]
        if self.prefilling.pop(job.serial, None) is None:
            if self.speculative is not None:
                del self.speculative.jobs[job.serial]
            elif job.end >= 0:
                self.batch.leave(job)
            elif self.stores is not None:
                self.stores.stalled.pop(job.serial, None)
        self.blocks.close(job)

    def _release(self, job: Job, now: int) -> None:
        self.endings += 1
        kept = self.loads is not None and self.loads.ended(job, now)
        if job.tables and not kept and (self.handovers is None or not self.handovers.keeps(job)):
            self.manager.free(job)
        if self.speculative is not None:
            self.speculative.forget(job)

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless every job is in one place and the blocks add up."""
        self.blocks.settle(self.running.values())
        self.manager.check_integrity()
        places = [*self.waiting, *self.parked.values(), *self.running.values()]
        assert len({id(job) for job in places}) == len(places), "a job is in two places (I9)"
        for job in places:
            assert not job.state.ended, f"{job} has ended and is still here (I9)"
        decoding = self.lockstep()
        batch = self.batch
        assert len(decoding) == batch.count, f"{batch.count} decode by count, {len(decoding)} do"
        context = sum(job.base + batch.tick - job.joined + 1 for job in decoding)
        assert context == batch.context, f"the context is {context}, not {batch.context}"
        longest = max((job.base + batch.tick - job.joined + 1 for job in decoding), default=0)
        assert batch.longest() in (0, longest), f"the longest is {longest}, not {batch.longest()}"
        assert list(self.running) == sorted(self.running), "the running are out of order"
        leaving = self.leaving
        for holder in self.manager.requests.values():
            assert holder in places or holder.id in leaving, f"{holder} holds blocks and is nowhere"


def _serial(job: Job) -> int:
    return job.serial
