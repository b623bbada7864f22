"""A sweep: every point of a grid replayed once, its report kept in a file, and what is there already left alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.lab.jobs import Executor, LocalExecutor, Task, Told
from kvyard.lab.sweep.grid import Grid, GridPoint, fingerprint, make_grid
from kvyard.replay.report import Report, Slo
from kvyard.replay.report.files import read_report
from kvyard.replay.report.slo import read_slo
from kvyard.replay.settings import SETTINGS
from kvyard.replay.traces import open_trace

POINTS = "points"
"""The folder, below that of the sweep, with one report per point."""


class Failure(msgspec.Struct, frozen=True):
    """A point without a report, and why."""

    point: GridPoint
    why: str


class Sweep(msgspec.Struct):
    """What came of a sweep so far. ``reports`` are by key of a point."""

    grid: Grid
    trace: str
    folder: Path
    slo: Slo | None = None
    reports: dict[str, Report] = msgspec.field(default_factory=dict)
    failures: list[Failure] = msgspec.field(default_factory=list)
    found: int = 0
    """Points that were there from an earlier run."""
    interrupted: bool = False

    @property
    def done(self) -> list[tuple[GridPoint, Report]]:
        """Points with their reports, in the grid's order."""
        return [(point, self.reports[point.key]) for point in self.grid.points if point.key in self.reports]

    @property
    def missing(self) -> int:
        """Points that have neither a report nor a failure."""
        failed = {failure.point.key for failure in self.failures}
        return sum(point.key not in self.reports and point.key not in failed for point in self.grid.points)

    def show(self) -> None:
        """Print the table."""
        from kvyard.lab.sweep.table import print_sweep

        print_sweep(self)

    def save(self) -> list[Path]:
        """Write the table as ``sweep.csv`` and ``sweep.json`` and the curves as ``sweep.html``; returns where."""
        from kvyard.lab.sweep.page import page
        from kvyard.lab.sweep.runs import write_runs
        from kvyard.lab.sweep.table import write_csv, write_json

        paths = [self.folder / f"sweep.{kind}" for kind in ("csv", "json", "html")]
        write_csv(self, paths[0])
        write_json(self, paths[1])
        if self.reports:
            write_runs(self, paths[2].name, "All points of the sweep")
            write_whole(paths[2], page(self))
        return paths if self.reports else paths[:2]


def sweep(
    trace: str | Path,
    vary: Mapping[str, Sequence[object]],
    *,
    folder: str | Path,
    config: str | Path | Mapping[str, object] | None = None,
    slo: Slo | Mapping[str, float] | str | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    format: str | None = None,
    skip_bad: bool = False,
    sort: bool = False,
    trace_block_size: int | None = None,
    chain_ids: bool = False,
    progress: Told | None = None,
    counted: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Sweep:
    """Replay ``trace`` at every combination of ``vary``, the rest by ``config`` and ``settings`` as for ``replay``.

    Reports go into ``folder``; those of equal points that lie there from an earlier run are taken as they are. ``jobs``
    processes share the work, with one it is done right here; or ``executor`` does it. ``counted`` is told how many points
    there are and how many of them are through, whenever that changes; ``progress`` the steps of each point. A
    KeyboardInterrupt ends it; what is finished stays. Raises ``KvyardError`` before anything runs for settings that make no
    sense, at any point. A point that fails later, because no request fits, say, is among ``failures``.
    """
    crew = executor or LocalExecutor(jobs)
    wanted = read_slo(slo)
    reading: dict[str, Any] = {
        "format": format,
        "skip_bad": skip_bad,
        "sort": sort,
        "trace_block_size": trace_block_size,
    }
    if chain_ids:
        reading["chain_ids"] = True
    source = open_trace(trace, **reading)
    source.first  # noqa: B018 - refuses an empty one
    about = {"trace": fingerprint(trace), "reading": {**reading, "format": source.format}, "slo": wanted}
    base = SETTINGS.merge(config, settings)
    made = Sweep(make_grid(base, vary, about), Path(trace).name, Path(folder), wanted)
    kept = made.folder / POINTS
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvyardError(f"can't make the folder {kept}: {error.strerror}") from None
    tasks: dict[str, Task] = {}
    for point in made.grid.points:
        report = kept_report(kept / f"{point.key}.json")
        if report is not None:
            made.reports[point.key] = report
        else:
            tasks.setdefault(
                point.key,
                Task(
                    str(trace), reading, point.config, wanted, point.label, str(kept / f"{point.key}.json"), point.key
                ),
            )
    made.found = sum(point.key in made.reports for point in made.grid.points)
    by_key = {point.key: point for point in made.grid.points}

    def count() -> None:
        if counted is not None:
            counted(len(made.grid.points), len(made.grid.points) - made.missing)

    def ended(key: str, why: str | None) -> None:
        if why is None:
            made.reports[key] = read_report(kept / f"{key}.json")
        else:
            made.failures.append(Failure(by_key[key], why))
        count()

    count()
    try:
        crew.run(list(tasks.values()), ended, progress)
    except KeyboardInterrupt:
        made.interrupted = True
        for key in tasks:  # one may have been written just before its end could be told
            report = made.reports.get(key) or kept_report(kept / f"{key}.json")
            if report is not None:
                made.reports[key] = report
    made.failures.sort(key=lambda failure: made.grid.points.index(failure.point))
    return made


def kept_report(path: Path) -> Report | None:
    """The report of an earlier run, unless it is missing, damaged or of another version: then it is made again."""
    if not path.is_file():
        return None
    try:
        return read_report(path)
    except KvyardError:
        return None
