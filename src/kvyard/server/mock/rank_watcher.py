"""The watcher: watches one rank for a worker, and hands what it produces to the choices that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.watcher import Watcher
from kvyard.events.types import EventBatch
from kvyard.server.mock.choice import MockChoice, RequestFlow
from kvyard.server.mock.tally import WorkerTally

if TYPE_CHECKING:
    from kvyard.engine.timing import Durations
    from kvyard.server.mock.handovers import WorkerHandovers
    from kvyard.server.mock.measures import RankMeasures


class MockRankWatcher(Watcher):
    """One rank's watcher. Flows that have news are gathered in ``news``, and notified all at once."""

    core: EngineCore
    wants_tokens = True

    def __init__(
        self, rank: int, measures: RankMeasures, tally: WorkerTally, announce: Callable[[EventBatch, int], None] | None
    ) -> None:
        self.rank = rank
        self.choices: dict[str, MockChoice] = {}
        """Choices in flight, by the ids of their jobs."""
        self.news: list[RequestFlow] = []
        self._measures = measures
        self._tally = tally
        self._announce = announce
        self.handovers: WorkerHandovers | None = None
        """Hand-overs of prompts from and to other workers."""

    def settle(self) -> None:
        """Tell every flow that has news."""
        self._measures.settle()
        flows, self.news = self.news, []
        for flow in flows:
            flow.dirty = False
            flow.tell()
            if flow.unread:
                flow.release()

    def _more(self, choice: MockChoice, count: int, end: int) -> None:
        choice.produced += count
        self._measures.produced(choice, count, end)
        self._tally.output_tokens += count
        if choice.first < 0:
            choice.first = end
            self._tally.recent.first_tokens.add(end, end - choice.arrival)
        choice.last = end
        self._mark(choice)

    def _mark(self, choice: MockChoice) -> None:
        flow = choice.flow
        if not flow.dirty:
            flow.dirty = True
            self.news.append(flow)

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        choice = self.choices.get(job.id)
        if choice is not None and choice.admitted < 0:
            choice.admitted = now
            self._measures.admitted(job, cached, external, self.core.offload is not None or self.handovers is not None)
            self._tally.admitted(choice, now, cached, external)

    def passed(self, start: int, end: int, chunks: Sequence[tuple[Job, int, int]], decoding: int) -> None:
        if decoding:
            self._step(self.core.decoders(), end)

    def decoded(self, start: int, durations: Durations, decoding: int, jobs: Sequence[Job]) -> None:
        end = start
        for duration in durations.tolist():
            end += duration
            self._step(jobs, end)

    def _step(self, jobs: Sequence[Job], end: int) -> None:
        """Give every one of ``jobs`` one more token."""
        choices = self.choices
        for job in jobs:
            choice = choices.get(job.id)
            if choice is not None:
                self._more(choice, 1, end)

    def produced(self, job: Job, count: int, end: int) -> None:
        choice = self.choices.get(job.id)
        if choice is not None:
            self._more(choice, count, end)

    def preempted(self, job: Job, now: int) -> None:
        self._measures.preempted()

    def ended(self, job: Job, now: int, reason: str) -> None:
        kept = None if self.handovers is None else self.handovers.ended(job, self.rank, now)
        choice = self.choices.pop(job.id, None)
        if choice is not None:
            choice.ended = now
            choice.reason = reason
            choice.kept = kept
            self._measures.ended(choice, now)
            self._tally.ended(choice)
            self._mark(choice)

    def announced(self, batch: EventBatch, now: int) -> None:
        if self._announce is not None:
            self._announce(batch, now)
