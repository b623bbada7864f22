"""Listeners: the parts of a fleet that are notified of what happens to requests.

The engine of a rank reports to its ``RankWatcher``. Passes go on to the rank's recorder alone. What happens to a request goes
to the recorder and then to the fleet's listeners, in the order of their list:

1. the recorder writes the request's record, so that everyone after it can read that; 2. the placement updates the routers'
bookings, and takes a computed prompt on to its decode worker; 3. the autoscaler, in a fleet that has one, counts first tokens
and notes when workers became idle; 4. the intake closes the record and lets those requests arrive that waited for this one.

A listener must not drive the engine that reports.
"""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kvyard.engine.job import Job, JobState
from kvyard.engine.timing import Durations
from kvyard.engine.watcher import Watcher
from kvyard.replay.record import Record
from kvyard.replay.recorder import Recorder, record_of


@mypyc_attr(allow_interpreted_subclasses=True)  # the autoscaler isn't compiled
class RequestListener:
    """Ignores everything; a listener has the verbs that it needs. Workers are given by their numbers."""

    def first_token(self, record: Record, now: int) -> None:
        """Receive a request whose client gets its first token."""

    def computed(self, worker: int, job: Job, record: Record, now: int) -> None:
        """Receive a prompt that ``worker`` has computed for another worker."""

    def ended(self, worker: int, job: Job, record: Record, now: int) -> None:
        """Receive a request that ended; its record says how."""


class RankWatcher(Watcher):
    """Watches one rank's engine, for its recorder and the fleet's listeners."""

    def __init__(
        self,
        worker: int,
        jobs: dict[str, Job],
        recorder: Recorder,
        listeners: Sequence[RequestListener],
        first_tokens_at_once: bool = True,
    ) -> None:
        """``jobs`` are those of the worker. A job that isn't among them any more was withdrawn: its request goes on elsewhere,
        so its end is reported to nobody. For ``first_tokens_at_once`` see ``Watcher.waits_for_first_tokens``.
        """
        self._worker = worker
        self._jobs = jobs
        self._recorder = recorder
        self._listeners = listeners
        self.waits_for_first_tokens = first_tokens_at_once

    # -- requests -----------------------------------------------------------------------------------------------------

    def produced(self, job: Job, count: int, end: int) -> None:
        if job.handed_over:
            return  # the client sees no token of it
        record = record_of(job)
        is_first = record.first_token < 0
        self._recorder.produced(job, count, end)
        if is_first:
            for listener in self._listeners:
                listener.first_token(record, end)

    def ended(self, job: Job, now: int, reason: str) -> None:
        if self._jobs.get(job.id) is not job:
            return
        del self._jobs[job.id]
        record = record_of(job)
        if job.handed_over and job.state is JobState.FINISHED:
            for listener in self._listeners:
                listener.computed(self._worker, job, record, now)
            return
        self._recorder.ended(job, now, reason)
        for listener in self._listeners:
            listener.ended(self._worker, job, record, now)

    # -- passes -------------------------------------------------------------------------------------------------------

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        self._recorder.admitted(job, now, cached, external)

    def passed(self, start: int, end: int, chunks: Sequence[tuple[Job, int, int]], decoding: int) -> None:
        self._recorder.passed(start, end, chunks, decoding)

    def paused(self, start: int, end: int, decoding: int) -> None:
        self._recorder.paused(start, end, decoding)

    def decoded(self, start: int, durations: Durations, decoding: int, jobs: Sequence[Job]) -> None:
        self._recorder.decoded(start, durations, decoding, jobs)

    def preempted(self, job: Job, now: int) -> None:
        self._recorder.preempted(job, now)

    def loading(self, job: Job, now: int, tokens: int) -> None:
        self._recorder.loading(job, now, tokens)
