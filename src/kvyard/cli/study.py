"""Shared by commands that run studies: their options, a bar for all replays, results, and how they end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvyard.cli.app import INTERRUPTED, OUTPUT
from kvyard.cli.outputs import say_written
from kvyard.errors import KvyardError
from kvyard.files import STDOUT, write_whole

if TYPE_CHECKING:
    from kvyard.lab.jobs import Executor
    from kvyard.lab.study import Result, Study

Jobs = Annotated[int | None, typer.Option("--jobs", "-j", help="Replays at a time; by default one per core.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|ADDRESS",
        help="Run on a Ray cluster: the one of this machine, or at an address; --jobs is its number of CPUs then.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="The folder of results; by default COMMAND-TRACE in this one.", rich_help_panel=OUTPUT
    ),
]


MOST_JOBS = 1024
UNMET = 1
"""The exit code where nothing keeps the SLO, or other limits that were given."""


def executor(jobs: int | None, ray: str | None) -> Executor:
    """Return the executor for a command's replays: local processes, or a Ray cluster. Raises ``KvyardError``."""
    from kvyard.lab.jobs import LocalExecutor

    if ray is None:
        return LocalExecutor(count_jobs(jobs))
    from kvyard.lab.jobs.cluster import RayExecutor

    return RayExecutor(ray, None if jobs is None else count_jobs(jobs))


def count_jobs(jobs: int | None) -> int:
    """Return how many replays run at a time. Raises ``KvyardError`` for a number out of range."""
    if jobs is not None and jobs < 1:
        raise KvyardError(f"--jobs {jobs}: at least 1, or leave it out for one per core")
    if jobs is not None and jobs > MOST_JOBS:
        raise KvyardError(f"--jobs {jobs}: at most {MOST_JOBS:,}, each is a process of its own")
    return jobs or os.cpu_count() or 1


def listed(option: str, text: str) -> list[str]:
    """Return the parts of a list with commas. Raises ``KvyardError`` for empty ones."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise KvyardError(f"{option} {text!r}: names or numbers with commas between them")
    return parts


def listed_seeds(text: str) -> list[int]:
    """Return the seeds of a list with commas. Raises ``KvyardError``."""
    parts = listed("--seeds", text)
    for part in parts:
        if not part.isdecimal():
            raise KvyardError(f"--seeds {part!r}: a seed is a whole number")
    return list(map(int, parts))


def folder_of(out: Path | None, command: str, trace: Path) -> Path:
    """Return the folder of a command's results."""
    return out or Path(f"{command}-{trace.name.partition('.')[0]}")


def present(result: Result, folder: Path, quiet: bool, as_json: bool = False, earlier: str = "") -> None:
    """Write a result into ``folder`` and print it, or its JSON; ``earlier`` is a line about results of an earlier run."""
    paths = result.save(folder)
    if as_json:
        write_whole(STDOUT, result.json())
    elif not quiet:
        if not result.empty:
            result.show()
        if earlier:
            typer.echo(earlier, err=True)
        say_written(paths)


def refuse_unmet(result: Result, quiet: bool) -> None:
    """End the command with ``UNMET`` if no point meets the SLO; if ``quiet``, say what would."""
    if result.met is False:
        if quiet:
            typer.echo(result.advice[0], err=True)
        raise typer.Exit(UNMET)


def finish(study: Study, quiet: bool, what: str) -> None:
    """End the command: 130 if it was interrupted with ``what`` to go, 1 if a point failed."""
    if study.interrupted:
        typer.echo(f"Interrupted with {study.missing} {what} to go; the same command goes on from there.", err=True)
        raise typer.Exit(INTERRUPTED)
    if study.failed:
        for point, why in study.failed if quiet else []:
            typer.echo(f"{point.label}: {why}", err=True)
        raise typer.Exit(1)


class Bars:
    """Progress of all replays of a study: a bar on a terminal, lines elsewhere, nothing if ``quiet``."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from kvyard.replay.progress import ProgressLines

        self._progress = Progress(
            TextColumn("points"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[in_flight]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._quiet = quiet
        self._shown = not quiet and self._progress.console.is_terminal
        self._lines = None if quiet or self._shown else ProgressLines()
        fields: dict[str, Any] = {"in_flight": ""}
        self._task = self._progress.add_task("sweep", total=None, **fields)
        self._through: dict[str, int] = {}

    def say(self, text: str) -> None:
        """Write a line above the bar, unless ``quiet``."""
        if not self._quiet:
            self._progress.console.print(text, soft_wrap=not self._shown, highlight=False, markup=False)

    def counted(self, total: int, through: int) -> None:
        """Update the number of points, and how many are done."""
        self._progress.update(self._task, total=total, completed=through)
        self._say()

    def advance(self, key: str, through: int, now: int) -> None:
        """Update the number of requests replayed of one point."""
        self._through[key] = through
        text = f"{sum(self._through.values()):,} requests replayed"
        self._progress.update(self._task, in_flight=text)
        self._say()

    def _say(self) -> None:
        if self._lines is not None:
            task = self._progress.tasks[0]
            total = "?" if task.total is None else f"{task.total:.0f}"
            self._lines.say(
                lambda: f"{task.completed:.0f} of {total} points, {task.fields['in_flight'] or 'none replayed'}"
            )

    def __enter__(self) -> Bars:
        if self._shown:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()
