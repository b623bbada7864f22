"""One replay as a value that can be sent to another process or machine. Running it returns the bytes of a report."""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report import Slo
from kvyard.replay.traces import Trace, open_trace


class TracePart(msgspec.Struct, frozen=True):
    """Requests of a trace that are replayed; all of them by default."""

    since: int = 0
    """Nanoseconds since the trace began: those that arrive then or later ..."""
    until: int | None = None
    """... and before this."""
    skip: int = 0
    """Number of these that are left out ..."""
    first: int | None = None
    """... and number that are taken."""
    max_tokens: int | None = None
    """Requests of more tokens, prompt and answer together, are left out before that."""

    def of(self, trace: Trace) -> Trace:
        """Return this part of ``trace``, its first arrival at 0. Raises ``KvyardError`` as ``sliced`` does."""
        from kvyard.replay.traces.changes import sliced

        if self == TracePart():
            return trace
        return sliced(
            trace, since=self.since, until=self.until, skip=self.skip, first=self.first, max_tokens=self.max_tokens
        )


class Task(NamedTuple):
    """One replay to run."""

    trace: str
    reading: Mapping[str, Any]
    """Arguments of ``open_trace``."""
    config: ReplayConfig
    slo: Slo | None
    label: str
    path: str
    """Path of its report."""
    key: str
    """Name in reports of its progress and end."""
    part: TracePart = TracePart()
    pool: str = ""
    """Pool whose requests are replayed, in a fleet of pools ..."""
    pools: tuple[str, ...] = ()
    """... and the names of all pools. Then the bytes are those of a ``kvyard.lab.pools.shard.PoolRun``."""


def perform(task: Task, progress: Callable[[int, int], None] | None = None) -> bytes:
    """Run one replay in this process; returns its report as JSON, or the result of a pool. ``progress`` receives the number of
    ended requests and the virtual time.

    Raises ``KvyardError``, and ``KeyboardInterrupt`` if interrupted.
    """
    from kvyard.replay.report.files import to_json
    from kvyard.replay.run import replay

    source = task.part.of(open_trace(task.trace, **task.reading))
    report_progress = None if progress is None else lambda arrived, ended, now: progress(ended, now)
    if task.pool:
        from kvyard.lab.pools.shard import perform_pool

        return perform_pool(source, task.pool, task.pools, task.config, task.slo, report_progress)
    run = replay(source, config=task.config, slo=task.slo, label=task.label, progress=report_progress)
    if not run.complete:
        raise KeyboardInterrupt
    return to_json(run.report)


def outcome(task: Task, progress: Callable[[int, int], None] | None = None) -> tuple[bytes, str | None]:
    """Like ``perform``, but return an error as text instead of raising it, so that other replays go on."""
    try:
        return perform(task, progress), None
    except KvyardError as error:
        return b"", str(error)
    except MemoryError:
        return b"", "there isn't enough memory for it: run fewer at a time"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return b"", f"{type(error).__name__} in {where}: {error}; that is a defect of kvyard, please report it"
