"""The interface between a list of replays and its executors. Reports are equal byte for byte with every executor."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvyard.lab.jobs.task import Task

Progress = Callable[[str, int, int], None]
"""Called now and then with the key of a replay, its requests through, its virtual time in nanoseconds."""
Ended = Callable[[str, str | None], None]
"""Called when a replay ended and its report is where its task says: its key, and why it failed if it did."""
ATTEMPTS = 3
"""Attempts at a replay whose process or machine is lost."""


class Executor(Protocol):
    """Runs replays, ``jobs`` of them at a time. Use it in a ``with``."""

    jobs: int

    def run(self, tasks: Sequence[Task], ended: Ended, progress: Progress | None = None) -> None:
        """Run all of ``tasks``. One that fails doesn't take the others with it; one whose process is lost is run again.

        Reports are written by the calling process. On a KeyboardInterrupt, ends the tasks in flight and re-raises it.
        """
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        return None
