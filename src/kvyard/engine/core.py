"""The core: one engine under any clock. Nothing in here sleeps, spawns, or reads a clock.

``next_decision`` names the instant at which the engine next has something to decide; ``advance`` carries everything out that
happened by an instant; ``begin`` lets the pass start that is due then. A driver of several engines calls them in this
order at each instant: ``advance`` on all, then hand over arrivals, then ``begin`` on all.

A decode batch that stays the same is a *plan*: the durations of many passes at once. It is carried out up to the instant asked
for and no further, so an arrival, a cancellation or a landing cuts it at the next pass boundary. Stepping one pass at a time
(``plans=False``) gives the same records and the same events, and is how the tests know.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvyard.clock import VirtualClock
from kvyard.engine.handovers import EngineHandovers
from kvyard.engine.job import Job, JobState
from kvyard.engine.passes import InFlightPass, Pass
from kvyard.engine.scheduler import Scheduler
from kvyard.engine.stores import Stores
from kvyard.engine.timing import Durations, TimingModel
from kvyard.engine.watcher import Watcher
from kvyard.errors import KvyardError
from kvyard.events.batcher import Batcher
from kvyard.events.types import EventBatch, Sink, Tier
from kvyard.hashing import Run
from kvyard.tiers.offload import Offload

LONGEST_PLAN = 1024
"""Passes computed ahead at most: plans are often cut, and the rest is then wasted."""

Instants: TypeAlias = "array[int]"
"""An array and not a list: few of a plan's passes are looked at one by one, and a number object for each would cost more than
all that is done with them."""
_SHORT: Final = 24
"""Passes up to which a sum one by one is faster than numpy."""
_NEVER: Final = array("q")
"""The ends of no passes. It is never changed: what is changed has an end to it."""


class EventBatcher(Sink, Protocol):
    """The sink of every tier's map. It gathers the events of a pass."""

    @property
    def pending(self) -> bool:
        """Return true if anything has happened since the last pass ended."""

    def end_iteration(self, now: int) -> EventBatch | None:
        """End a pass, and return its events as a batch if batches are wanted."""


class EngineCore:
    """One rank: a scheduler, a timing model, and the plan they made.

    A pass is *decided* by the scheduler and *started* by the clock. Decided passes wait in a queue until they start. Mostly a
    pass is decided at the instant at which it starts. With asynchronous scheduling (``depth`` 2) it is decided when the one
    before it starts, without knowing its results or what arrives meanwhile.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        timing: TimingModel,
        *,
        batcher: EventBatcher | None = None,
        offload: Offload | None = None,
        clock: VirtualClock,
        timed: bool = False,
        plans: bool = True,
        depth: int = 1,
        name: str = "",
    ) -> None:
        """``batcher`` is the sink of every tier's map, if events are wanted; ``clock`` is set to the current time for eviction
        policies that read it (``timed``), and once a request names a tenant; ``depth`` is the most passes that may be decided
        at a time.

        Raises ``KvyardError`` for a depth that isn't supported.
        """
        if depth not in (1, 2):
            raise KvyardError(
                f"a depth of {depth} is not supported: passes are decided on when they start, or one ahead"
            )
        self.ahead = depth == 2
        """True if a pass is decided on when the one before it starts."""
        self.name = name
        self.scheduler = scheduler
        self.timing = timing
        self.batcher = batcher
        self.offload = offload
        self._loads = scheduler.jobs.loads
        self._stores = scheduler.stores if scheduler.stores is not None and scheduler.stores.waits else None
        """Stores that a pass waits for at its end, if it does."""
        self._saved = False
        """True if what the pass in flight computed has been handed to these."""
        self._clock = clock
        self._timed = timed
        self.busy_ns = 0
        """Total time of completed passes."""
        self.passes = 0
        """Passes that have ended."""
        self._longest = LONGEST_PLAN if plans else 1
        self._decided: list[Pass] = []
        """Passes that have not started, the next one first."""
        self._batch: Pass | None = None
        """The pass in flight, or the plan of passes that it begins."""
        self._start = 0
        self._delayed = False
        """With passes decided ahead: true if the pass in flight starts later, when the one after it is decided on."""
        self._durations: Durations = np.zeros(0, dtype=np.int64)
        self._ends: Instants = _NEVER
        self._done = 0
        """Passes of the plan that are carried out,"""
        self._reported = 0
        """Of these, passes that the watcher has received: unless it wants every token, it receives a plan at its end."""
        self._formed = 0
        """With passes decided ahead: formed passes of a plan, counted from the one in flight."""
        self._first = 0
        """The number of the plan's first pass."""
        self._cancelled: list[Job] = []

    @property
    def handovers(self) -> EngineHandovers | None:
        """Return the hand-overs of prompts from and to other engines, if there are any."""
        return self.scheduler.jobs.handovers

    @property
    def watcher(self) -> Watcher:
        """Return the watcher of this engine."""
        return self.scheduler.jobs.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher) -> None:
        self.scheduler.jobs.watcher = watcher

    # -- driving ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: int) -> None:
        """A request arrives at ``now``; it can be in the next pass that starts."""
        scheduler = self.scheduler
        was_waiting = len(scheduler.waiting) > 0
        if job.facts.tenant and not self._timed:
            self._timed = True
            self._clock.sleep_until(now)
        scheduler.add(job, now)
        if not (was_waiting and scheduler.waiting.strict) or scheduler.reads_queue:
            # Otherwise, behind a job that couldn't be let in, it changes nothing.
            self.cut(now)

    def cancel(self, job: Job, now: int) -> None:
        """A request is given up at ``now``. If it is in a pass, it leaves when that ends."""
        if job.state.ended:
            return
        if self.ahead and self._start == now:
            # The pass in flight starts after what comes in now, with the job; those planned after it are without.
            self.cut(now)
        elif self._ends and (
            job.state in (JobState.PREFILL, JobState.DECODE)
            or (self._loads is not None and self._loads.in_line and bool(job.tables))
        ):
            self.cut(now)
            if self._ends:
                self._cancelled.append(job)
                return
        elif self._ends and (
            job.state is JobState.LOADING
            or job is next(iter(self.scheduler.waiting), None)
            or not self.scheduler.waiting.strict
            or self.scheduler.reads_queue
        ):
            self.cut(now)  # it may have been in the way of others
        self._set_time(now)
        if not self._ends:
            self.scheduler.jobs.free_ended(now)
        self.scheduler.jobs.cancel(job, now)

    def next_decision(self) -> int | None:
        """Return the time of the next decision, without outside input; ``None`` if there is nothing to do."""
        if self._ends:
            if self._delayed:
                return self._start
            # With passes decided ahead, the one after a plan's last is decided on when that starts.
            return self._ends[-2] if self.ahead and len(self._ends) > 1 else self._ends[-1]
        if self._loads is not None:
            return self._loads.earliest_deadline()  # though it be only for others to see
        return None

    def next_change(self) -> int | None:
        """Return the next time at which caches may visibly change, without outside input: the end of a pass that takes
        blocks. ``None`` if none is in flight. Calling ``advance`` before that instant reports nothing new.
        """
        ends = self._ends
        if not ends:
            return None
        if self.ahead or self.batcher is None or self.batcher.pending:
            return ends[0] if self.ahead else ends[self._done]
        scheduler = self.scheduler
        if scheduler.blocks.together and scheduler.blocks.evict_none(len(ends)):
            return ends[-1]
        touch = scheduler.batch.next_touch()
        if touch is None:
            return ends[-1]
        index = touch - self._first
        if index < self._done:
            index = self._done
        return ends[index] if index < len(ends) else ends[-1]

    @property
    def busy(self) -> bool:
        """Return true if a pass is in flight."""
        return bool(self._ends)

    def advance(self, now: int) -> None:
        """Carry out every pass that has ended by ``now``."""
        ends = self._ends
        if not ends:
            return
        if not self.ahead:
            if ends[self._done] <= now:
                if self._stores is not None:
                    self._save(self._stores, now)
                if ends[self._done] <= now:
                    self._commit(bisect_right(ends, now))
            return
        if len(ends) > 1:
            self._land_planned(now)
        if len(ends) == 1 and ends[0] <= now:
            self._land(ends[0])

    def _save(self, stores: Stores, now: int) -> None:
        """Store what the latest pass of the plan has computed, if it has ended by ``now``, and move its end to when that has
        left the device.
        """
        ends, batch = self._ends, self._batch
        assert batch is not None
        while (end := ends[-1]) <= now:
            if not self._saved:
                self._saved = True
                self._set_time(end)
                self.scheduler.jobs.save(batch, end)
            landing = stores.save_deadline(end)
            if landing is None:
                break
            ends[-1] = landing

    def begin(self, now: int) -> bool:
        """Start a pass at ``now`` unless one is in flight; returns true if one is then.

        Transfers that have ended take effect first.
        """
        if self.ahead:
            return self._begin_ahead(now)
        if self._ends:
            return True
        if not self._decide(now):
            return False
        following = self._decided[0]
        if following.begins > now:
            now = following.begins
        if following.chunks or following.drafted:
            # One pass by itself, which is most of them: no need for a vector.
            self._run(now, self._single(following, now))
        else:
            self.adopt(self._durations_of(following, now), now)
        return True

    def propose(self, now: int) -> Durations | None:
        """Decide what runs from ``now`` on. Return the durations of its passes, or ``None`` if there is nothing to run.

        ``begin`` does this and ``adopt``. Several ranks in step all propose, and then all adopt what the slowest takes.
        """
        if not self._decide(now):
            return None
        decided = self._decided[0]
        begins = max(now, decided.begins)
        durations = self._durations_of(decided, begins)
        if begins > now:
            durations = durations.copy()  # timing models may hand out the same array again
            durations[0] += begins - now
        return durations

    def adopt(self, durations: Durations, now: int) -> None:
        """Run what was proposed from ``now`` on, in passes of these lengths."""
        self._durations = durations
        if len(durations) > _SHORT:
            ends = durations.cumsum()
            ends += now
            self._run(now, array("q", ends.tobytes()))
            return
        instant = now
        instants: list[int] = []
        for duration in durations.tolist():
            instant += duration
            instants.append(instant)
        self._run(now, array("q", instants))

    # -- in step with other ranks ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Return the tokens that the pass in flight, or the proposed one, computes here; 0 without one."""
        batch = self._batch
        if batch is None:
            if not self._decided:
                return 0
            batch = self._decided[0]
        return batch.decoding + sum([new for _, new, _ in batch.chunks])

    def decide_ahead(self, now: int) -> None:
        """With passes decided ahead: decide the pass after the ranks' next one, which starts at ``now``, even if this rank has
        nothing to compute in the next one.
        """
        if not self._ends or self._start == now:
            self._decide(now)

    def start_decided(self, now: int) -> bool:
        """With passes decided ahead: start the pass that was decided on, unless it has started; returns true if one is in
        flight."""
        if not self._ends and self._decided:
            self._run(now, self._single(self._decided[0], now))
        return bool(self._ends)

    def wait_until(self, end: int) -> None:
        """Let the pass in flight, which must be a single one, end with those of the other ranks, at ``end``."""
        self._ends = array("q", (end,))

    # -- passes decided ahead ---------------------------------------------------------------------------------------

    def _begin_ahead(self, now: int) -> bool:
        """Decide the pass that starts at ``now``, if that is undecided, and the pass after it."""
        if not self._ends:
            if not self._decide(now):
                return False
            begins = max(now, self._decided[0].begins)
            self._run(begins, self._single(self._decided[0], begins))
            self._delayed = begins > now
        if len(self._ends) > 1:
            if self._formed == 1:
                self._form_planned()
        elif self._start == now and self._decide(now):
            # Where there was nothing to decide on, what comes in later waits for the pass to end.
            if self._decided[0].begins > self._ends[0]:
                self._ends[0] = self._decided[0].begins  # nobody looks at what the pass computed before that
            self._plan_ahead()
        if self._start <= now:
            self._delayed = False
        return True

    def _plan_ahead(self) -> None:
        """Turn the pass in flight and the decided one into a plan, if they are equal decode steps and those after them will
        be. In it, the pass after the one in flight is formed (``_formed`` is 2), but for the instant at which one starts.
        """
        running, decided = self._batch, self._decided[0]
        assert running is not None
        batch, launched = self.scheduler.batch, self.scheduler.jobs.in_flight[0]
        if decided.stable_for < 2 or running.decoding != decided.decoding or running.chunks or running.left_out:
            return
        if running.entering or decided.entering:
            return
        last = batch.next_end()
        if last is None or launched.ending or launched.owed or self._cancelled:
            return
        passes = min(decided.stable_for, last - batch.tick)  # those with a job's last token are formed by themselves
        if passes < 2:
            return
        end = self._ends[0]
        durations = self.timing.decode_ns(decided.decoding, decided.context, passes, decided.longest)
        self._durations = np.concatenate((np.array([end - self._start], dtype=np.int64), durations))
        self._ends.frombytes((durations.cumsum(dtype=np.int64) + end).tobytes())
        self._batch = decided
        self._decided.clear()
        self._formed = 2

    def _form_planned(self) -> None:
        """Decide on the plan's next pass: jobs get the blocks they need, and nothing else is to be done."""
        jobs = self.scheduler.jobs
        batch = jobs.batch
        touch = batch.next_touch()
        if touch is not None and touch <= batch.tick:
            self._set_time(self._start)
            for job in batch.due():
                if not jobs.blocks.take(job):
                    raise AssertionError(f"{job} was promised a block and there is none")
        batch.advance(1)
        jobs.add_in_flight(InFlightPass(jobs.in_flight[0].decided, [], [], jobs.in_flight[0].decoding))
        self._formed += 1

    def _land_planned(self, now: int) -> None:
        """End passes of the plan that have ended by ``now``, except the last one, and decide the next."""
        ends, start, landed = self._ends, self._start, 0
        in_flight = self.scheduler.jobs.in_flight
        jobs = self.decoders() if self.watcher.wants_tokens else []
        while landed < len(ends) - 1 and ends[landed] <= now:
            if self._formed == 1:
                self._form_planned()
            self._start = ends[landed]
            landed += 1
            in_flight.pop(0)
            self.scheduler.batch.num_in_flight -= 1
            self._formed -= 1
            self._announce(self._start)
        if landed:
            batch = self._batch
            assert batch is not None
            self.watcher.decoded(start, self._durations[:landed], batch.decoding, jobs)
            # The rest of the plan begins with longer contexts; what was decided on else stays.
            self._batch = Pass(
                batch.chunks,
                batch.decoding,
                batch.context + landed * batch.decoding,
                batch.longest and batch.longest + landed,
                batch.drafted,
                batch.stable_for,
                batch.left_out,
            )
            self.passes += landed
            self.busy_ns += self._start - start
            self._durations = self._durations[landed:]
            del ends[:landed]
        if self._formed == 1 and len(ends) > 1 and self._start < now:
            self._form_planned()

    def _cut_ahead(self, now: int) -> None:
        """Discard plans for everything after the passes that are decided on by ``now``."""
        if len(self._ends) > 1:
            self._land_planned(now)
        if len(self._ends) > 1:
            assert self._batch is not None
            if self._formed > 1:
                self._decided.append(self._batch)
            del self._ends[1:]

    def _land(self, end: int) -> None:
        """End the pass in flight at ``end``, and start the one that was decided on."""
        batch = self._batch
        assert batch is not None
        jobs = self.scheduler.jobs
        self._set_time(end)
        for job in self._cancelled:
            jobs.cancel(job, end)
        self._cancelled.clear()
        self._report(0, 1)
        self.passes += 1
        self.busy_ns += end - self._start
        self._ends = _NEVER
        self._batch = None
        self.scheduler.policy.computed(batch)
        jobs.retire(end)
        self._announce(end)
        if self._decided:
            self._run(end, self._single(self._decided[0], end))

    # -- plans ------------------------------------------------------------------------------------------------------

    def _decide(self, now: int) -> bool:
        """See that a pass is decided on that can start at ``now``; returns whether there is one."""
        if not self._decided:
            self._set_time(now)
            decided = self.scheduler.form(now, self._longest)
            if decided is None:
                if not self._ends:
                    self._announce(now)
                return False
            self._decided.append(decided)
            self.watcher.decided(decided, now)
            if self.ahead:
                self.scheduler.jobs.launch(decided)
        return True

    def _run(self, now: int, ends: Instants) -> None:
        """Start the next decided pass at ``now``; it and its equals end at ``ends``."""
        self._batch = self._decided.pop(0)
        self._start = now
        self._ends = ends
        self._saved = False
        self._done = self._reported = 0
        self._first = self.scheduler.batch.tick

    def _single(self, of: Pass, now: int) -> Instants:
        """Return the end of a pass that starts ``now``."""
        end = now + self._duration(of)
        return array("q", (end if end > of.until else of.until,))

    def _duration(self, of: Pass) -> int:
        return self.timing.pass_ns([(new, past) for _, new, past in of.chunks], of.decoding, of.context, of.longest)

    def _durations_of(self, of: Pass, now: int) -> Durations:
        if of.chunks or of.drafted:
            return np.array([max(self._duration(of), of.until - now)], dtype=np.int64)
        passes = of.stable_for if self._stores is None or not self._stores.saving else 1
        durations = self.timing.decode_ns(of.decoding, of.context, passes, of.longest)
        if self._loads is not None and passes > 1:
            deadline = self._loads.earliest_deadline()
            if deadline is not None:
                # The pass in flight when something lands is the last one that is certain.
                durations = durations[: int(durations.cumsum().searchsorted(deadline - now)) + 1]
        return durations

    def cut(self, now: int) -> None:
        """Discard plans for everything after the pass that is in flight at ``now``."""
        if not self._ends:
            return
        if self.ahead:
            self._cut_ahead(now)
            return
        keep = bisect_right(self._ends, now)
        if keep == 0 or self._ends[keep - 1] != now:
            keep += 1
        if keep <= self._done:
            # It ends right now and is carried out: the next one starts after what comes in now.
            self._close(keep)
        else:
            del self._ends[keep:]

    def freed(self, now: int) -> bool:
        """Release blocks that were computed here for another worker. Returns true if that is settled: they are free, or
        will be when the pass in flight ends. Otherwise call ``cut`` and ``begin``.
        """
        if self._ends:
            return len(self._ends) == 1 and self._ends[0] > now and not self.ahead
        if self.handovers is None or self.offload is not None or not self.scheduler.jobs.idle:
            return False
        self._set_time(now)
        self.scheduler.jobs.free_ended(now)
        return True

    def next_landing(self) -> int | None:
        """Return the next landing of a transfer here, if nothing else uses its link."""
        return self._loads.earliest_deadline() if self._loads is not None else None

    def uncertain_from(self, now: int) -> int | None:
        """Return the time from which things may differ from the plan: ``now``, if a shared tier has changed for a job here,
        else the next landing.
        """
        return now if self.scheduler.disturbed else self.next_landing()

    def trim(self, when: int | None, now: int, begun: bool = False) -> None:
        """Discard plans for everything after the pass that is in flight at ``when``. ``begun``: a pass that starts ``now``
        has."""
        if when is None or not self._ends:
            return
        if when <= now:
            self.cut(now + 1 if begun else now)
        else:
            del self._ends[bisect_left(self._ends, when) + 1 :]

    def _commit(self, count: int) -> None:
        """Carry out the plan's passes up to, not including, number ``count``."""
        dropping = len(self._cancelled) > 0 and count == len(self._ends)
        if dropping and count - self._done > 1:
            self._commit(count - 1)  # they were there until then
        together, batch, ends, done = self.scheduler.blocks.together, self._batch, self._ends, self._done
        assert batch is not None
        index = done
        while index < count:
            # The first pass of a plan got its blocks when it was decided on, unless those of all are taken together.
            until = self._take_blocks(index, count) if batch.decoding and (count > 1 or together) else count
            # Tokens taken together are reported together; otherwise the passes after this one report nothing.
            last = until - 1 if together else index
            if last + 1 < len(ends):
                self._announce(ends[last])
            index = until
        if dropping:
            self.report()  # of those before
            self._drop_cancelled(batch, count)
        if batch.decoding:
            lockstep = self.scheduler.batch
            lockstep.advance(self._first + count - lockstep.tick)
        if batch.entering and len(ends) > 1:
            # Those that enter have their first token of the plan's first pass, and are like the others from then on.
            self._report(0, 1)
            for job in batch.entering:
                self.watcher.produced(job, 1, ends[0])
            batch.entering = ()
            self._reported = 1
        self.passes += count - done
        self._done = count
        if count == len(ends):
            self._close(count)
        elif self.watcher.wants_tokens:
            self.report()

    def report(self) -> None:
        """Report all passes that are carried out to the watcher, which may not know of the latest yet."""
        if self._reported < self._done:
            self._report(self._reported, self._done)
            self._reported = self._done

    def _drop_cancelled(self, batch: Pass, count: int) -> None:
        """Remove jobs cancelled in the plan's last pass before its output is read: they get no token of it."""
        end = self._ends[count - 1]
        if batch.decoding:
            lockstep = self.scheduler.batch
            lockstep.advance(self._first + count - 1 - lockstep.tick)
        self._set_time(end)
        for job in self._cancelled:
            self.scheduler.jobs.cancel(job, end)
        self._cancelled.clear()

    def _take_blocks(self, done: int, count: int) -> int:
        """Take the blocks of the plan's pass ``done``, or of all passes before ``count``; returns the next that needs any."""
        if done:
            self._set_time(self._ends[done - 1])
        first = self._first
        return self.scheduler.blocks.carry_out(first + done, first + count) - first

    def occupy(self) -> None:
        """Give the pass in flight its blocks now, which it has had since it started: passes of a plan get theirs late, when
        they are carried out. Call it before reading what is held after ``advance``.
        """
        if self._ends and self._batch is not None and self._batch.decoding and not self.ahead:
            self._take_blocks(self._done, self._done + 1)

    def _close(self, count: int) -> None:
        """End the plan after ``count`` passes, with the jobs that end with it."""
        self.report()
        end = self._ends[count - 1]
        self.busy_ns += end - self._start
        batch = self._batch
        assert batch is not None
        self._ends = _NEVER
        self._batch = None
        self._set_time(end)
        self.scheduler.complete(batch, end)
        self._announce(end)

    def _report(self, done: int, count: int) -> None:
        batch = self._batch
        assert batch is not None
        start = self._ends[done - 1] if done else self._start
        # Those that enter have their first token of it, which ``produced`` reports.
        decoding = batch.decoding - len(batch.entering)
        if batch.chunks or batch.drafted:
            waiting = self.scheduler.batch.count
            if waiting and not batch.decoding and not self.ahead:
                self.watcher.paused(start, self._ends[0], waiting)
            self.watcher.passed(start, self._ends[0], batch.chunks, decoding)  # such a plan has one pass
            if batch.left_out:
                self.watcher.paused(start, self._ends[0], batch.left_out)
        else:
            jobs: Sequence[Job] = self.decoders() if self.watcher.wants_tokens else ()
            durations = self._durations[done:count]
            if self.ahead:
                durations = np.array([self._ends[0] - start], dtype=np.int64)
            if decoding:
                self.watcher.decoded(start, durations, decoding, jobs)

    def decoders(self) -> list[Job]:
        """Return the jobs that have a token of a decode pass, while a watcher receives it, except for those that enter with
        it: ``produced`` reports them. The watcher must want tokens.
        """
        entering = self._batch.entering if self._batch is not None else ()
        if self.ahead:
            launched = self.scheduler.jobs.in_flight[0]
            return [job for job in launched.decoding if not job.state.ended and job not in entering]
        jobs = self.scheduler.lockstep()
        return [job for job in jobs if job not in entering] if entering else jobs

    def _set_time(self, now: int) -> None:
        if self._timed:
            self._clock.sleep_until(now)

    def _announce(self, now: int) -> None:
        if self.batcher is not None:
            batch = self.batcher.end_iteration(now)
            if batch is not None:
                if self.offload is not None:
                    batch = self.offload.finish_batch(batch)
                self.watcher.announced(batch, now)

    # -- checks -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[tuple[int, Tier, list[Run]]]:
        """Return the contents of the device and of private lower tiers, per (group, tier)."""
        manager = self.scheduler.manager
        events = list(manager.pool.snapshot()) if manager.reuses else []
        if self.offload is not None:
            events += self.offload.snapshot()
        return events

    def check_integrity(self, alone: bool = True) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless invariants I1 to I4 and I6 to I9 hold here.

        I8 is of an engine as a whole: a rank that isn't ``alone`` may wait for the others. Of I4 only the numbers of blocks
        are compared: those announced and not taken back, and those in the maps.
        """
        self.scheduler.check_integrity()
        if isinstance(self.batcher, Batcher):
            self.batcher.check_announced(self.snapshot())
        if self.offload is not None:
            self.offload.check_integrity()
        if alone and not self.scheduler.jobs.idle:
            assert self.next_decision() is not None, "requests are unfinished and nothing is due to happen (I8)"
