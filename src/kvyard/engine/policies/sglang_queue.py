"""SGLang's waiting queue: in the order in which it was last sorted."""

from collections.abc import Iterator

from kvyard.engine.job import Job


class WaitingQueue:
    """Jobs in the order in which they were last sorted; who comes, or comes back, goes to the end.

    With ``holds`` those that come stay outside until the engine looks for them (``receive``).
    """

    def __init__(self) -> None:
        self.strict = False
        self.jobs: list[Job] = []
        self.holds = False
        self.outside: list[Job] = []
        """Jobs that have come and that the engine doesn't know of."""
        self.entries: dict[Job, int] = {}
        """Serial number of each job's latest entry into the queue."""
        self._entered = 0
        self.processed = 0
        """Prompt tokens computed so far, the axis by which ``hrrn`` ages requests."""
        self.arrivals: dict[Job, int] = {}
        """Jobs that had been computed when each job came."""

    def push(self, job: Job) -> None:
        if self.holds and not job.preemptions:
            self.outside.append(job)
            return
        self._note(job)
        self.jobs.append(job)

    def receive(self) -> None:
        """Let in the jobs that have come."""
        for job in self.outside:
            self._note(job)
            self.jobs.append(job)
        self.outside.clear()

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
        if job in self.outside:
            self.outside.remove(job)
            return
        self.jobs.remove(job)
        del self.entries[job], self.arrivals[job]

    def __len__(self) -> int:
        return len(self.jobs) + len(self.outside)

    def __iter__(self) -> Iterator[Job]:
        return iter([*self.jobs, *self.outside]) if self.outside else iter(self.jobs)
