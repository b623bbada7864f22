"""SGLang's waiting queue: in the order in which it was last sorted."""

from collections.abc import Iterator

from kvyard.engine.job import Job


class WaitingQueue:
    """Jobs in the order in which they were last sorted; who comes, or comes back, goes to the end."""

    def __init__(self) -> None:
        self.strict = False
        self.jobs: list[Job] = []
        self.entries: dict[Job, int] = {}
        """Serial number of each job's latest entry into the queue."""
        self._entered = 0
        self.processed = 0
        """Prompt tokens computed so far, the axis by which ``hrrn`` ages requests."""
        self.arrivals: dict[Job, int] = {}
        """Jobs that had been computed when each job came."""

    def push(self, job: Job) -> None:
        self._note(job)
        self.jobs.append(job)

    def push_front(self, job: Job) -> None:
        self._note(job)
        self.jobs.insert(0, job)

    def _note(self, job: Job) -> None:
        self._entered += 1
        self.entries[job] = self._entered
        self.arrivals[job] = self.processed

    def peek(self) -> Job:
        return self.jobs[0]

    def pop(self) -> Job:
        job = self.jobs[0]
        self.remove(job)
        return job

    def remove(self, job: Job) -> None:
        self.jobs.remove(job)
        del self.entries[job], self.arrivals[job]

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)
