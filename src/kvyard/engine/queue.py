"""Waiting queues: who is next. ``fcfs`` keeps the order of arrival, ``priority`` goes by (priority, arrival), lower first.

By arrival, preempted and freshly loaded jobs go back to the front.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from mypy_extensions import mypyc_attr

from kvyard.engine.job import Job


class Queue(Protocol):
    """Jobs that wait, next one first."""

    strict: bool
    """True if a later job never overtakes."""

    def push(self, job: Job) -> None:
        """Add a job that has arrived."""

    def push_front(self, job: Job) -> None:
        """Put a job back before all others, unless they have an order of their own."""

    def peek(self) -> Job:
        """Return the next one. Raises ``IndexError`` when none waits."""

    def pop(self) -> Job:
        """Take the next one out. Raises ``IndexError`` when none waits."""

    def remove(self, job: Job) -> None:
        """Take ``job`` out wherever it stands. Raises ``ValueError`` if it doesn't."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Job]: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class ArrivalQueue:
    """First come, first served."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self._jobs: deque[Job] = deque()
        self.push = self._jobs.append
        self.push_front = self._jobs.appendleft
        self.pop = self._jobs.popleft
        self.remove = self._jobs.remove

    def peek(self) -> Job:
        return self._jobs[0]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)


class PriorityQueue:
    """Lower priority value first, earlier arrival first among equals, then by id; one that comes back has the place it had."""

    strict = False

    def __init__(self) -> None:
        self._jobs: list[tuple[int, int, str, Job]] = []

    def push(self, job: Job) -> None:
        insort(self._jobs, (job.priority, job.arrival, job.id, job), key=lambda entry: entry[:3])

    def push_front(self, job: Job) -> None:
        self.push(job)

    def peek(self) -> Job:
        return self._jobs[0][3]

    def pop(self) -> Job:
        return self._jobs.pop(0)[3]

    def remove(self, job: Job) -> None:
        for index, entry in enumerate(self._jobs):
            if entry[3] is job:
                del self._jobs[index]
                return
        raise ValueError(f"{job} does not wait")

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return (entry[3] for entry in self._jobs)


def make_queue(policy: str, *, strict: bool = True) -> Queue:
    """Return the queue of a ``scheduling_policy``; unless it is ``strict``, a job may be skipped for a later one."""
    return PriorityQueue() if policy == "priority" else ArrivalQueue(strict=strict)
