"""A choice: one job at the engine and the answer it produces, as far as it has come. And a flow: a request's choices together.

Times are nominal nanoseconds.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from kvyard.engine.job import Job, JobState
from kvyard.server.mock.answers import MadeAnswer


class MockChoice(msgspec.Struct, eq=False):
    """State that the watcher writes and a reply reads."""

    index: int
    job: Job
    answer: MadeAnswer
    rank: int
    flow: "RequestFlow"
    produced: int = 0
    """Tokens that are out."""
    arrival: int = 0
    admitted: int = -1
    first: int = -1
    last: int = -1
    ended: int = -1
    reason: str = ""
    kept: dict[str, Any] | None = None
    """Location of its prompt, if it was computed for another worker: vLLM's ``kv_transfer_params``."""

    @property
    def siblings(self) -> "list[MockChoice]":
        """The choices for the same prompt, itself included."""
        first = self.index - self.index % self.flow.n
        return self.flow.choices[first : first + self.flow.n]

    @property
    def asked(self) -> int:
        """The tokens that it may have at most."""
        return self.flow.most[self.index // self.flow.n]

    @property
    def refused(self) -> str:
        """Why the engine turned it away; empty where it didn't."""
        return self.reason if self.job.state is JobState.REJECTED else ""


class RequestFlow:
    """Choices of one request, and a signal for new output."""

    def __init__(self, n: int = 1) -> None:
        self.choices: list[MockChoice] = []
        self.n = n
        """Choices for each prompt; those of one prompt stand together."""
        self.most: list[int] = []
        """Token limit of each prompt's answers."""
        self.dirty = False
        self.unread = False
        """True if no reply reads the choices any more."""
        self.broken = ""
        """Why nothing more will come, where the worker died."""
        self._news = asyncio.Event()

    @property
    def done(self) -> bool:
        """Return true if nothing more will come."""
        return bool(self.broken) or all(choice.ended >= 0 for choice in self.choices)

    def tell(self) -> None:
        """Signal new output."""
        self._news.set()

    async def news(self) -> None:
        """Wait until there is something new."""
        await self._news.wait()
        self._news.clear()

    def release(self) -> None:
        """Drop the choices once they have ended: no reply reads them any more. They refer to the flow, and would otherwise wait
        for a garbage collection.
        """
        self.unread = True
        if self.done:
            self.choices.clear()

    def cached_tokens(self, firsts: Sequence[int]) -> int:
        """Return prompt tokens that needed no computing, by the choices numbered ``firsts``, one for each prompt."""
        jobs = [self.choices[index].job for index in firsts]
        return sum(max(0, job.cached_tokens) + job.external_tokens for job in jobs)
