"""Actions on an engine's job, by name: carried out live, recorded, and carried out again from a recording."""

from collections.abc import Callable, Mapping

from kvyard.engine.handovers import EngineHandovers
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks


def submit(engine: Ranks, job: Job, now: int, rank: int) -> None:
    """Submit ``job``."""
    job.arrival = now
    engine.submit(job, now, rank)


def cancel(engine: Ranks, job: Job, now: int, rank: int) -> None:
    """Cancel ``job``."""
    engine.cancel(job, now, rank)


def landed(engine: Ranks, job: Job, now: int, rank: int) -> None:
    """Note that the prompt of ``job`` has arrived from another worker."""
    _loads(engine, rank).landed(job)
    engine.cut(now)


def release(engine: Ranks, job: Job, now: int, rank: int) -> None:
    """Release the prompt of ``job``, which was computed for another worker and isn't needed any more."""
    _loads(engine, rank).release(job.id)
    engine.cut(now)


def withdraw(engine: Ranks, job: Job, now: int, rank: int) -> None:
    """Cancel ``job``, whose prompt will not arrive, and free the blocks that were reserved for it."""
    engine.cancel(job, now, rank)
    landed(engine, job, now, rank)


ACTIONS: Mapping[str, Callable[[Ranks, Job, int, int], None]] = {
    one.__name__: one for one in (submit, cancel, landed, release, withdraw)
}


def _loads(engine: Ranks, rank: int) -> EngineHandovers:
    handovers = engine.cores[rank].handovers
    assert handovers is not None
    return handovers
