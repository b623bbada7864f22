"""Tallies: what a worker has done since the server started, for people who watch. They outlive the worker's deaths.

Metrics are for Prometheus and begin at 0 with each life, as a real engine's do. These are plain numbers that a look can read
in no time.
"""

from collections import deque

import msgspec

from kvyard.clock import MS, SECOND, WallClock
from kvyard.engine.job import Job, JobState
from kvyard.events.types import Tier
from kvyard.server.dashboard.view import MOST_DECISIONS, LatencyWindow
from kvyard.server.mock.choice import MockChoice

OUTCOMES = {JobState.FINISHED: "finished", JobState.CANCELLED: "cancelled"}


class Admission(msgspec.Struct, frozen=True, gc=False):
    """A job that began to run, and what was found of its prompt. Tokens."""

    number: int
    at: float
    id: str
    worker: str
    rank: int
    tokens: int
    tiers: tuple[int, ...]
    """Found, by tier."""
    waited_ms: float


class RecentWork:
    """The last admissions and first tokens of a whole fleet."""

    def __init__(self) -> None:
        self.admissions: deque[Admission] = deque(maxlen=MOST_DECISIONS)
        self.first_tokens = LatencyWindow()
        self.number = 0
        self._wall = WallClock.since_epoch()

    def admitted(self, worker: str, choice: MockChoice, now: int, cached: int, external: int) -> None:
        """Count a job that begins to run for the first time."""
        job = choice.job
        self.number += 1
        self.admissions.append(
            Admission(
                self.number,
                self._wall.now() / SECOND,
                job.id,
                worker,
                choice.rank,
                job.num_prompt_tokens,
                (cached, *job.tier_tokens),
                (now - choice.arrival) / MS,
            )
        )


class Sent(msgspec.Struct):
    """One rank's stream of events. Written by the publisher's thread."""

    seq: int = -1
    sent: int = 0
    withheld: int = 0
    at: int = -1
    """Nominal time at which the last one went out."""


class WorkerTally:
    """One worker's. Choices are counted, not requests: a request for three answers is three."""

    def __init__(self, worker: str, ranks: int, recent: RecentWork) -> None:
        self.recent = recent
        self.came = self.finished = self.failed = self.refused = self.cancelled = 0
        self.prompt_tokens = self.output_tokens = 0
        self.computed = 0
        self.tiers = [0] * len(Tier)
        """Prompt tokens found, by tier."""
        self.streams = [Sent() for _ in range(ranks)]
        self._worker = worker

    def admitted(self, choice: MockChoice, now: int, cached: int, external: int) -> None:
        """Count a job that begins to run for the first time."""
        job: Job = choice.job
        for level, tokens in enumerate((cached, *job.tier_tokens)):
            self.tiers[level] += tokens
        self.tiers[Tier.G4 - 1] += external - sum(job.tier_tokens)  # from another worker
        self.computed += job.num_prompt_tokens - cached - external
        self.prompt_tokens += job.num_prompt_tokens
        self.recent.admitted(self._worker, choice, now, cached, external)

    def ended(self, choice: MockChoice) -> None:
        """Count a choice that ended."""
        outcome = OUTCOMES.get(choice.job.state, "refused")
        setattr(self, outcome, getattr(self, outcome) + 1)

    def answered(self, path: str, status: int) -> None:
        """Count an answered request; successful ones are counted when they run."""
        if status >= 400 and path.endswith("/completions"):
            if status >= 500:
                self.failed += 1
            else:
                self.refused += 1
