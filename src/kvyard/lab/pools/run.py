"""A replay of independent pools: each by itself, one after the other or on several processes, and then one report."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvyard.errors import KvyardError
from kvyard.lab.jobs import Executor, LocalExecutor, Task, TracePart
from kvyard.lab.pools.merge import levels_of, merged_records, merged_report
from kvyard.lab.pools.pool import of_all, read_pools
from kvyard.lab.pools.shard import PoolRun, read_pool
from kvyard.replay.report import Slo
from kvyard.replay.report.files import request_rows
from kvyard.replay.report.slo import read_slo
from kvyard.replay.run import ReplayOutcome, describe
from kvyard.replay.traces import open_trace


class PooledRun(ReplayOutcome):
    """A replay of pools that is over."""


def replay_pools(
    trace: str | Path,
    settings: Mapping[str, Any],
    *,
    slo: Slo | Mapping[str, float] | str | None = None,
    label: str = "",
    executor: Executor | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    per_request: str | Path | None = None,
    **reading: Any,
) -> PooledRun:
    """Replay each pool of ``settings`` (``[[pools]]`` in a file) with the requests of ``trace`` that ask for its model.

    The report is the same byte for byte, whoever runs the pools: ``executor``, this process if there is none. ``reading`` is
    how the trace is read, as in ``open_trace``. Raises ``KvyardError``, for a request without a pool too. A KeyboardInterrupt
    goes on: of a part there is no report.
    """
    wanted = read_slo(slo)
    pools = read_pools(settings)
    reading = {**reading, "limit": of_all(settings, "limit")}
    part = TracePart(max_tokens=of_all(settings, "max_tokens"))
    source = part.of(open_trace(trace, **reading))
    source.first  # noqa: B018 - refuses an empty one before anything is built
    through: dict[str, int] = {}
    failed: dict[str, str] = {}

    def advance(key: str, done: int, now: int) -> None:
        through[key] = done
        if progress is not None:
            count = sum(through.values())
            progress(count, count, now)

    def ended(key: str, why: str | None) -> None:
        if why is not None:
            failed[key] = why

    with tempfile.TemporaryDirectory(prefix="kvyard-") as folder:
        paths = {name: Path(folder, str(number)) for number, name in enumerate(pools)}
        tasks = [
            Task(
                str(trace), reading, config, wanted, label, str(paths[name]), name, part, pool=name, pools=tuple(pools)
            )
            for name, config in pools.items()
        ]
        (executor or LocalExecutor()).run(tasks, ended, advance)
        for name in pools:
            if name in failed:
                raise KvyardError(f"pool {name!r}: {failed[name]}")
        runs: dict[str, PoolRun] = {name: read_pool(path.read_bytes()) for name, path in paths.items()}
    source.tally = next(iter(runs.values())).tally
    if per_request is None:
        records = merged_records(runs)
    else:
        with request_rows(per_request, levels=levels_of(runs)) as write:
            records = merged_records(runs, write)
    report = merged_report(runs, records, label=label, trace=describe(source), slo=wanted)
    return PooledRun(report, records, True, source)
