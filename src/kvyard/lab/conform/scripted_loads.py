"""Loads by a script, scheduled as by vLLM with a KV connector, for logs of such a scheduler.

The script has the loadable part of each prompt and the duration of its load. When a load begins, the room that it leaves to
others, the order after it and when blocks are freed follow vLLM. ``Loads`` differs: lower tiers have copies that other jobs
wait for too, and there a loaded job goes before all that wait, preempted ones included.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvyard.blocks import BlockManager, Hit
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.load_source import AT_ONCE, NO_HELP, NO_ROOM, LoadSource
from kvyard.engine.queue import Queue


class LoadScript(NamedTuple):
    """Blocks of one request elsewhere, and what becomes of its own."""

    tokens: int
    """Number of its first tokens there."""
    load_ns: int | None
    """Time that they take to come, while others run; ``None``: they come with the pass that needs them."""
    send_ns: int | None
    """Time for which its blocks are read after its last token; ``None``: not at all."""


class HoldersFirst:
    """A queue in which jobs that hold loaded blocks come first: by priority, or in the order in which their loads began."""

    def __init__(self, others: Queue, started: Mapping[str, int], *, by_priority: bool) -> None:
        """``started`` numbers the loads by the ids of their jobs."""
        self.strict = others.strict
        self._others = others
        self._started = started
        self._by_priority = by_priority
        self._holders: list[Job] = []

    def push(self, job: Job) -> None:
        self._others.push(job)

    def push_front(self, job: Job) -> None:
        if job.tables:
            insort(self._holders, job, key=self._place)
        else:
            self._others.push_front(job)

    def _place(self, job: Job) -> tuple[int, int, str]:
        return (job.priority, job.arrival, job.id) if self._by_priority else (self._started[job.id], 0, "")

    def peek(self) -> Job:
        return self._holders[0] if self._holders else self._others.peek()

    def pop(self) -> Job:
        return self._holders.pop(0) if self._holders else self._others.pop()

    def remove(self, job: Job) -> None:
        if job in self._holders:
            self._holders.remove(job)
        else:
            self._others.remove(job)

    def __len__(self) -> int:
        return len(self._holders) + len(self._others)

    def __iter__(self) -> Iterator[Job]:
        yield from self._holders
        yield from self._others


class ScriptedLoads(LoadSource):
    """Loads by a script, for the jobs of one engine."""

    def __init__(self, manager: BlockManager, config: EngineConfig, scripts: Mapping[str, LoadScript]) -> None:
        """``scripts`` has every job's, by id."""
        super().__init__()
        self.in_line = True
        self._manager = manager
        self._whole = config.scheduler_reserve_full_isl
        self._by_priority = config.scheduling_policy == "priority"
        self._scripts = scripts
        self._jobs: dict[str, Job] = {}
        """Jobs that load."""
        self._loads: dict[str, int] = {}
        """End of the load of each of them, and of those that were cancelled meanwhile."""
        self._sends: dict[str, int] = {}
        """Time at which the blocks of each finished job are freed."""
        self._started: dict[str, int] = {}
        """The number of each job's last load."""
        self._count = 0
        self._landed: set[str] = set()
        """Jobs that wait and whose loaded blocks aren't registered yet."""

    def queue(self, waiting: Queue) -> Queue:
        """Return ``waiting`` with those first that hold loaded blocks."""
        return HoldersFirst(waiting, self._started, by_priority=self._by_priority)

    # -- prompts ----------------------------------------------------------------------------------------------------

    def ask(self, job: Job, hit: Hit, now: int, others_run: bool, backlog: int) -> int:
        script = self._scripts[job.id]
        job.loaded = max(0, script.tokens - hit.tokens)
        if not job.loaded:
            return NO_HELP
        if script.load_ns is None:
            return AT_ONCE
        taken = self._manager.allocate(
            job,
            0,
            hit,
            external=job.loaded,
            delay_caching=True,
            must_fit=self._whole,
            reserved=self.reserved(),
            has_running=others_run,
        )
        if taken is None:
            return NO_ROOM
        job.num_computed_tokens = hit.tokens + job.loaded
        job.state = JobState.LOADING
        self._jobs[job.id] = job
        self._loads[job.id] = now + script.load_ns
        self._count += 1
        self._started[job.id] = self._count
        return job.loaded

    def reserved(self) -> int:
        """Return the blocks that a load in the background must leave free, since its own can't be taken from it: those that
        unfinished prompts and other loads still need.
        """
        return sum(
            self._manager.remaining(holder)
            for holder in self._manager.requests.values()
            if isinstance(holder, Job) and holder.state in (JobState.WAITING, JobState.LOADING, JobState.PREFILL)
        )

    def land(self, now: int) -> list[Job]:
        self.free_ended(now)
        back: list[Job] = []
        for id_ in _due(self._loads, now):
            del self._loads[id_]
            job = self._jobs.pop(id_)
            job.state = JobState.WAITING
            self._landed.add(id_)
            back.append(job)
        return back

    def earliest_deadline(self) -> int | None:
        return min([*self._loads.values(), *self._sends.values()], default=None)

    def receive(self, job: Job) -> None:
        """Register loaded blocks; of a whole prompt the last token is computed again."""
        if job.id in self._landed:
            self._landed.remove(job.id)
            self._manager.cache(job, job.num_computed_tokens)
            if job.num_computed_tokens == job.num_tokens:
                job.num_computed_tokens -= 1
                job.loaded -= 1

    # -- the ways out -----------------------------------------------------------------------------------------------

    def ended(self, job: Job, now: int) -> bool:
        return bool(job.tables) and self.keeps(job, now)

    def keeps(self, job: Job, now: int) -> bool:
        """True if the blocks of a ``job`` that holds some are read or filled beyond its end."""
        self._landed.discard(job.id)
        self._manager.drop_stale(job, job.num_computed_tokens)
        send_ns = self._scripts[job.id].send_ns
        if job.id not in self._loads:
            if job.state is not JobState.FINISHED or send_ns is None:
                return False
            self._sends[job.id] = now + send_ns
        self.leaving[job.id] = job
        return True

    def free_ended(self, now: int) -> None:
        for transfers in (self._loads, self._sends):
            for id_ in _due(transfers, now):
                if id_ in self.leaving:
                    del transfers[id_]
                    self._jobs.pop(id_, None)
                    self._manager.free(self.leaving.pop(id_))


def scripted(
    manager: BlockManager, waiting: Queue, config: EngineConfig, scripts: Mapping[str, LoadScript]
) -> tuple[LoadSource, Queue]:
    """Loads by ``scripts``, and the queue that goes with them: a ``source`` of ``make_core``."""
    loads = ScriptedLoads(manager, config, scripts)
    return loads, loads.queue(waiting)


def _due(transfers: dict[str, int], now: int) -> list[str]:
    """Return the transfers that are done by ``now``, in order of their ends."""
    return sorted([id_ for id_, end in transfers.items() if end <= now], key=transfers.__getitem__)
