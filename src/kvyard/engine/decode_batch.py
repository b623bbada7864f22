"""The decode batch: jobs that decode in lockstep. All take one step in every pass, so one counter of passes serves them all.

No work is done per job and pass. Two heaps hold the passes that need work: the pass in which a job needs its block manager
(a block to take, to register or to free), and the pass after which it has its last token. In between, a pass is one
addition to the counter and one to the summed context.
"""

from heapq import heapify, heappop, heappush, heapreplace

from kvyard.engine.job import Job, JobState


class DecodeBatch:
    """Jobs that decode in lockstep. ``tick`` counts passes; a pass in progress has the number ``tick``."""

    __slots__ = (
        "_ends",
        "_lengths",
        "_ranks_lengths",
        "_touches",
        "context",
        "count",
        "ends",
        "exact",
        "num_in_flight",
        "resting",
        "tick",
    )

    def __init__(self, *, needs_longest: bool = False) -> None:
        """``needs_longest`` if ``longest`` is called for each pass."""
        self.tick = 0
        self.count = 0
        self.exact = 0
        """Number of jobs that complete blocks which others may ask for, so that each must be registered in its own pass."""
        self.num_in_flight = 0
        """Passes that are counted and whose tokens are not known yet: with asynchronous scheduling."""
        self.resting = False
        """True if the pass in flight computes prompts only, while decoding jobs rest, as SGLang does."""
        self.context = 0
        """The sum of the jobs' lengths in the pass ``tick``, the token being computed included."""
        self.ends = 0
        """The sum of the passes after which the jobs have their last tokens."""
        self._touches: list[tuple[int, int, Job]] = []
        self._ends: list[tuple[int, int, Job]] = []
        self._ranks_lengths = needs_longest
        self._lengths: list[tuple[int, int, Job]] = []
        """Heap of jobs, longest first, by ``joined - base``: length without the passes that all jobs share."""

    def join(self, job: Job) -> None:
        """Let ``job`` take part from pass ``tick`` on. It has computed all its known tokens but the last, which it just
        produced, or will produce in the pass in flight (``awaits``).
        """
        job.state = JobState.DECODE
        job.joined = self.tick
        job.base = job.num_computed_tokens
        self.count += 1
        self.exact += not job.defers
        self.context += job.num_computed_tokens + 1
        job.end = self.tick + job.max_tokens - job.output - job.awaits
        self.ends += job.end
        heappush(self._ends, (job.end, job.serial, job))
        if self._ranks_lengths:
            heappush(self._lengths, (job.joined - job.base, job.serial, job))
        self.watch(job, self.tick)

    def abort(self, job: Job) -> None:
        """Cancel ``job``, whose last token is that of the pass ``tick``."""
        forgone = job.end - self.tick - 1
        job.aborted = True
        job.forgone += forgone
        job.max_tokens -= forgone
        job.end -= forgone
        self.ends -= forgone
        heappush(self._ends, (job.end, job.serial, job))

    def watch(self, job: Job, earliest: int) -> None:
        """Work out when ``job`` next needs its block manager: the first pass from ``earliest`` on that isn't quiet
        (see ``blocks.step``).
        """
        tokens = job.fits_until if job.defers else job.quiet_until
        tick = job.joined + tokens - job.base
        job.touch = touch = int(tick) if tick > earliest else earliest
        heappush(self._touches, (touch, job.serial, job))

    def in_flight(self, job: Job) -> int:
        """Return how many of the tokens of ``job`` are not known yet."""
        if self.resting:
            return job.awaits if job.joined == self.tick else 0
        return min(self.num_in_flight, self.tick - job.joined + job.awaits)

    def leave(self, job: Job) -> None:
        """Remove ``job``, with its counts as of ``tick``. Its heap entries are void from now on."""
        if self.num_in_flight:
            job.catch_up_known(self.tick, self.in_flight(job))
        else:
            job.catch_up(self.tick)
        self.count -= 1
        self.exact -= not job.defers
        self.context -= job.num_computed_tokens + 1
        self.ends -= job.end
        job.touch = job.end = -1
        if len(self._ends) > 64 and len(self._ends) > 4 * self.count:
            self._sweep()

    def due(self) -> list[Job]:
        """Remove and return the jobs that need their block manager in the pass ``tick``, in order of admission, caught up."""
        touches, tick = self._touches, self.tick
        jobs: list[Job] = []
        late = False
        while touches and touches[0][0] <= tick:
            when, serial, job = heappop(touches)
            late = late or when < tick
            # A preempted job may have an older entry for this pass, with its former serial.
            if job.touch == when and job.serial == serial and job.state is JobState.DECODE:
                job.touch = -1  # a job that left and rejoined may have a second entry for this pass
                if self.num_in_flight:
                    job.catch_up_known(tick, self.in_flight(job))
                    if tick > job.joined:
                        job.num_in_flight_tokens = 1
                else:
                    job.catch_up(tick)
                jobs.append(job)
        if late:  # a job that joined after the pass before was formed comes first in the heap
            jobs.sort(key=_serial)
        return jobs

    def due_before(self, tick: int, size: int) -> list[Job]:
        """Return the jobs that need a block in passes before ``tick``, in the order of passes and, in a pass, of admission,
        each as often as it needs one, which lasts ``size`` passes. Notes that they have it.
        """
        touches = self._touches
        jobs: list[Job] = []
        while touches and touches[0][0] < tick:
            when, serial, job = touches[0]
            if job.touch == when and job.serial == serial and job.state is JobState.DECODE:
                jobs.append(job)
                job.touch = when + size
                heapreplace(touches, (when + size, serial, job))
            else:
                heappop(touches)
        return jobs

    def next_touch(self) -> int | None:
        """Return the next pass in which a job needs its block manager."""
        touches = self._touches
        while touches:
            when, _, job = touches[0]
            if job.touch == when and job.state is JobState.DECODE:
                return when
            heappop(touches)
        return None

    def next_end(self) -> int | None:
        """Return the number of passes after which the next job has all its tokens."""
        ends = self._ends
        while ends:
            when, _, job = ends[0]
            if job.end == when and job.state is JobState.DECODE:
                return when
            heappop(ends)
        return None

    def longest(self) -> int:
        """Return the length of the longest job in the pass ``tick``, the token being computed included; 0 if that
        isn't kept.
        """
        lengths = self._lengths
        while lengths:
            behind, _, job = lengths[0]
            if job.end >= 0 and job.joined - job.base == behind and job.state is JobState.DECODE:
                return self.tick - behind + 1
            heappop(lengths)
        return 0

    def advance(self, passes: int) -> None:
        """Count ``passes`` passes as over."""
        self.tick += passes
        self.context += passes * self.count

    def finished(self) -> list[Job]:
        """Remove and return the jobs that have all their tokens now, in order of admission."""
        done: list[Job] = []
        while self.next_end() == self.tick:
            job = heappop(self._ends)[2]
            self.leave(job)
            done.append(job)
        return done

    def _sweep(self) -> None:
        """Drop void entries: preempted and cancelled jobs leave them behind."""
        self._ends = [e for e in self._ends if e[2].end == e[0] and e[2].state is JobState.DECODE]
        self._touches = [e for e in self._touches if e[2].touch == e[0] and e[2].state is JobState.DECODE]
        heapify(self._ends)
        heapify(self._touches)


def _serial(job: Job) -> int:
    return job.serial
