"""A study: many replays of one trace, each report kept in a file of one folder, so that a study can be interrupted and go on.

``vary`` is for studies of a grid, ``point`` and ``replay`` for those that choose the next point by the results of the last.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvyard.errors import KvyardError
from kvyard.lab.jobs import Executor, LocalExecutor, Progress, Task, TracePart
from kvyard.lab.study.grid import Grid, Point, fingerprint, make_grid, point_key
from kvyard.lab.study.result import Result
from kvyard.lab.study.runs import notes, times, write_runs
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report import Report, Slo
from kvyard.replay.report.files import read_report
from kvyard.replay.report.slo import read_slo
from kvyard.replay.settings import SETTINGS
from kvyard.replay.traces import open_trace

POINTS = "points"
"""Folder of the reports, below that of the study."""
Counted = Callable[[int, int], None]
"""Receives the number of points and how many of them are over, whenever that changes."""
View = Callable[["Study"], Result]
OPTIONS = (
    *("slo", "jobs", "executor", "progress", "counted"),
    *("format", "skip_bad", "sort", "trace_block_size", "chain_ids"),
)
"""Keyword arguments of ``Study``; other ones that a study receives are settings of its replays."""


class Study:
    """Replays of one trace. A definition gives it points and a ``view``, which turns reports into a ``Result``."""

    def __init__(
        self,
        trace: str | Path,
        folder: str | Path,
        view: View | None = None,
        *,
        slo: Slo | Mapping[str, float] | str | None = None,
        jobs: int = 1,
        executor: Executor | None = None,
        progress: Progress | None = None,
        counted: Counted | None = None,
        format: str | None = None,
        skip_bad: bool = False,
        sort: bool = False,
        trace_block_size: int | None = None,
        chain_ids: bool = False,
        **reading: Any,
    ) -> None:
        """``jobs`` processes share the replays, with one they run in this process; or ``executor`` runs them.

        ``progress`` receives the steps of each replay. ``format`` and what follows it is how the trace is read, as
        ``open_trace`` takes it. Raises ``KvyardError`` for a trace that can't be read; nothing is written yet.
        """
        self.executor = executor or LocalExecutor(jobs)
        self.slo = read_slo(slo)
        self.reading = {
            "format": format,
            "skip_bad": skip_bad,
            "sort": sort,
            "trace_block_size": trace_block_size,
            **reading,
        }
        if chain_ids:
            self.reading["chain_ids"] = True
        self.source = open_trace(trace, **self.reading)
        self.source.first  # noqa: B018 - refuses an empty trace
        self._path = str(trace)
        self.trace = Path(trace).name
        self.folder = Path(folder)
        read = {"block_size" if name == "trace_block_size" else name: value for name, value in self.reading.items()}
        self.about = {"trace": fingerprint(trace), "reading": {**read, "format": self.source.format}}
        """Inputs that reports depend on besides settings and SLO."""
        self._view = view
        self._progress = progress
        self.counted = counted or (lambda total, over: None)
        self.grid = Grid({}, [])
        self.reports: dict[str, Report] = {}
        """Reports of ``vary`` by key of their point."""
        self.failures: dict[str, str] = {}
        """Reasons by key of the points that have no report."""
        self.found = 0
        """Points of ``vary`` that were there from an earlier one."""
        self.interrupted = False

    @property
    def points(self) -> list[Point]:
        """All points of ``vary``."""
        return self.grid.points

    @property
    def done(self) -> list[tuple[Point, Report]]:
        """Points with their reports, in the grid's order."""
        return [(point, self.reports[point.key]) for point in self.points if point.key in self.reports]

    @property
    def failed(self) -> list[tuple[Point, str]]:
        """Points that failed with the reason, in the grid's order."""
        return [(point, self.failures[point.key]) for point in self.points if point.key in self.failures]

    @property
    def missing(self) -> int:
        """Number of points that have neither a report nor a failure."""
        return sum(point.key not in self.reports and point.key not in self.failures for point in self.points)

    def vary(
        self,
        axes: Mapping[str, Sequence[object]],
        config: str | Path | Mapping[str, object] | None,
        settings: Mapping[str, Any],
    ) -> None:
        """Replay every combination of ``axes``, the rest by ``config`` and ``settings`` as for ``replay``.

        Raises ``KvyardError`` before anything runs for settings that make no sense, at any point. A point that fails later is
        among ``failures``. A KeyboardInterrupt ends it: ``interrupted`` is set, and what is finished is kept.
        """
        self.grid = grid = make_grid(SETTINGS.merge(config, settings), axes, {**self.about, "slo": self.slo})
        self.reports = self._kept(grid.points)
        self.found = sum(point.key in self.reports for point in grid.points)
        self._count()
        try:
            self.replay([point for point in grid.points if point.key not in self.reports], self._ended)
        except KeyboardInterrupt:
            self.interrupted = True
            # A report may have been written just before its end was reported.
            self.reports |= self._kept([point for point in grid.points if point.key not in self.reports])

    def point(self, varied: Mapping[str, object], config: ReplayConfig, part: TracePart) -> Point:
        """Return a point outside of a grid, on a part of the trace."""
        about = {**self.about, "part": part} if self.slo is None else {**self.about, "part": part, "slo": self.slo}
        return Point({name: str(value) for name, value in varied.items()}, config, point_key(config, about), part)

    def replay(
        self, points: Sequence[Point], ended: Callable[[str, Report | None], None] | None = None
    ) -> dict[str, Report]:
        """Return the reports of ``points`` by key, replaying those that aren't kept yet.

        ``ended`` receives the key of each replay that is over, with its report if it has one; reasons of the others are in
        ``failures``. A KeyboardInterrupt goes on.
        """
        self.make_folder()
        reports = self._kept(points)
        tasks: dict[str, Task] = {}
        for point in points:
            if point.key not in reports:
                path = str(self._file(point.key))
                part = point.part or TracePart()
                task = Task(self._path, self.reading, point.config, self.slo, point.label, path, point.key, part)
                tasks.setdefault(point.key, task)

        def over(key: str, why: str | None) -> None:
            if why is None:
                reports[key] = read_report(self._file(key))
            else:
                self.failures[key] = why
            if ended is not None:
                ended(key, reports.get(key))

        if tasks:
            self.executor.run(list(tasks.values()), over, self._progress)
        return reports

    def result(self) -> Result:
        """Return what the view made of the reports, with what holds for every study: points that are missing, where times come
        from, the first point's configuration, and pages of single runs if its tables link to them.
        """
        assert self._view is not None
        result = self._view(self)
        result.notes = [*result.notes, *notes(self)]
        result.times = times(self, f"{result.kind}.csv")
        if self.done:
            result.config = ("Configuration of the first point", self.done[0][1].config)
        if any(row.link for table in result.tables for row in table.rows):
            result.pages = lambda: write_runs(self, f"{result.kind}.html", f"All runs of the {result.kind}")
        return result

    def show(self) -> None:
        """Print the tables and the advice."""
        self.result().show()

    def save(self) -> list[Path]:
        """Write the tables, the page and a page per run into the folder; returns where. Raises ``KvyardError``."""
        return self.result().save(self.folder)

    def _kept(self, points: Sequence[Point]) -> dict[str, Report]:
        """Reports of an earlier run. One that is damaged or of another version is made again."""
        reports: dict[str, Report] = {}
        for point in points:
            path = self._file(point.key)
            if point.key not in reports and path.is_file():
                try:
                    reports[point.key] = read_report(path)
                except KvyardError:
                    continue
        return reports

    def _file(self, key: str) -> Path:
        return self.folder / POINTS / f"{key}.json"

    def make_folder(self) -> None:
        """Make the folder of the reports. Raises ``KvyardError``."""
        try:
            (self.folder / POINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KvyardError(f"can't make the folder {self.folder / POINTS}: {error.strerror}") from None

    def _ended(self, key: str, report: Report | None) -> None:
        if report is not None:
            self.reports[key] = report
        self._count()

    def _count(self) -> None:
        self.counted(len(self.points), len(self.points) - self.missing)


def own_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``Study`` among ``given``, and the others, which are settings of replays."""
    own = {name: value for name, value in given.items() if name in OPTIONS}
    return own, {name: value for name, value in given.items() if name not in OPTIONS}
