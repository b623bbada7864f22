"""The recorder of a worker with a role: what it does is a part of a request, and the record is of the whole."""

from collections.abc import Callable

from kvyard.engine.job import Job, JobState
from kvyard.replay.gaps import Gaps
from kvyard.replay.record import Record
from kvyard.replay.recorder import Recorder
from kvyard.replay.seen import Seen

PREFILL = ":prefill"
"""What the name of a job that computes a prompt for another worker ends with, so that one worker may have both parts."""


class SplitRecorder(Recorder):
    """Watches one worker of a fleet with roles."""

    def __init__(
        self,
        number: int,
        records: dict[str, Record],
        seen: Seen,
        gaps: Gaps,
        block_size: int,
        *,
        first_token: Callable[[Job, int], object],
        ended: Callable[[Job, int], object],
        computed: Callable[[Job, int], object],
        at_once: bool,
    ) -> None:
        """``computed`` is called with a job that has computed its prompt for another worker. ``at_once``: ``first_token`` is
        called when one comes, and not just at some time after it.
        """
        super().__init__(number, records, seen, gaps, block_size, first_token=first_token, ended=ended)
        self._handed = computed
        self.waits_for_first_tokens = at_once

    def record(self, job: Job) -> Record:
        name = job.id
        return self.records[name.removesuffix(PREFILL) if job.handed_over else name]

    def loading(self, job: Job, now: int, tokens: int) -> None:
        if not job.received:  # what it waits for then has stamps of its own
            super().loading(job, now, tokens)

    def produced(self, job: Job, count: int, end: int) -> None:
        if not job.handed_over:  # of those the client sees no token
            super().produced(job, count, end)

    def ended(self, job: Job, now: int, reason: str) -> None:
        if job.handed_over and job.state is JobState.FINISHED:
            self._handed(job, now)
        else:
            super().ended(job, now, reason)
