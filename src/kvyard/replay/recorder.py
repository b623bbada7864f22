"""The recorder: records what a report needs of one rank's engine.

One record per request; gaps between tokens as durations with weights, since a pass of n decoding requests is n equal gaps. Of a
request that two workers share, both recorders write the one record.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvyard.engine.job import Job, JobState
from kvyard.engine.timing import Durations
from kvyard.engine.watcher import Watcher
from kvyard.replay.gaps import Gaps
from kvyard.replay.jobs import FleetJob
from kvyard.replay.record import Record
from kvyard.replay.seen import Seen

_NOTHING = np.zeros(1, dtype=np.int64)
_STATUS: Final = {state: state.name.lower() for state in JobState}


class Recorder(Watcher):
    """Records one rank; ``gaps`` and ``seen`` are the fleet's."""

    def __init__(self, number: int, seen: Seen, gaps: Gaps, block_size: int) -> None:
        self.number = number
        self.seen = seen
        self.block_size = block_size
        self.gaps = gaps
        self.computed = 0
        """Prompt tokens computed, again ones included."""
        self.steps = 0
        """Decode steps, one per request and pass."""
        self._silent: dict[str, int] = {}
        """Since when preempted jobs have produced nothing."""
        self._since: dict[str, int] = {}
        """Since when jobs wait for loads."""
        self._paused: list[tuple[int, int]] = []
        """(jobs, nanoseconds): how long decoding jobs have been kept waiting for prompts, longest first."""

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        record = record_of(job)
        if record.admitted < 0:
            record.admitted = now
            record.cached = cached
            record.loaded = job.tier_tokens
            record.pulled = job.pulled
            request = record.request
            record.gone = self.seen.gone(job, cached + external, self.number)
            record.miss, record.lost, record.elsewhere, record.own = self.seen.reason(
                job, cached + external, self.number, self.block_size, request.root or request.session
            )
            if job.left:
                _note_left(record, job.left)
        if job.id in self._since:
            record.loading += now - self._since.pop(job.id)

    def passed(self, start: int, end: int, chunks: Sequence[tuple[Job, int, int]], decoding: int) -> None:
        if decoding:
            if self._paused:
                self._add_gaps(np.array([end - start], dtype=np.int64), decoding)
            else:
                self.gaps.add_one(end - start, decoding)
            self.steps += decoding
        for chunk in chunks:
            self.computed += chunk[1]

    def paused(self, start: int, end: int, decoding: int) -> None:
        self._paused = [(count, spent + end - start) for count, spent in self._paused]
        fresh = decoding - sum(count for count, _ in self._paused)
        if fresh > 0:
            self._paused.append((fresh, end - start))

    def _add_gaps(self, durations: Durations, decoding: int) -> None:
        """Lengthen the first gap of requests that were kept waiting."""
        if self._paused:
            first, durations = durations[:1], durations[1:]
            left = decoding
            for count, spent in self._paused:
                self.gaps.add(first + spent, min(count, left))
                left -= min(count, left)
            self.gaps.add(first, left)
            self._paused = []
        self.gaps.add(durations, decoding)

    def decoded(self, start: int, durations: Durations, decoding: int, jobs: Sequence[Job]) -> None:
        self._add_gaps(durations, decoding)
        self.steps += decoding * len(durations)

    def produced(self, job: Job, count: int, end: int) -> None:
        record = record_of(job)
        if count > 1:
            self.gaps.add(_NOTHING, count - 1)  # accepted drafts leave together
        if job.id in self._silent:
            self.gaps.add(np.array([end - self._silent.pop(job.id)], dtype=np.int64), 1)
        if record.first_token < 0:
            record.first_token = end

    def loading(self, job: Job, now: int, tokens: int) -> None:
        if not job.received:  # a prompt from another worker has stamps of its own
            self._since.setdefault(job.id, now)

    def preempted(self, job: Job, now: int) -> None:
        record_of(job).preemptions += 1
        if job.output:
            self._silent.setdefault(job.id, now)  # its last token came with the pass that just ended

    def ended(self, job: Job, now: int, reason: str) -> None:
        record = record_of(job)
        record.ended = now
        record.output = job.output
        record.status = _STATUS[job.state]
        record.reason = reason
        self._silent.pop(job.id, None)


def record_of(job: Job) -> Record:
    """Return the record that ``job``, which is a fleet's, belongs to."""
    assert isinstance(job, FleetJob)
    return job.record


def _note_left(record: Record, tokens: int) -> None:
    """Count ``tokens`` as left in a lower tier, and no longer as lost or as only elsewhere."""
    record.left = min(tokens, record.lost + record.elsewhere)
    mine = min(record.left, record.lost)
    record.lost -= mine
    record.elsewhere -= record.left - mine
    if record.left:
        record.miss = "left"
