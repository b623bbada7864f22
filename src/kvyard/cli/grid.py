"""What commands share that replay a trace over a grid: jobs, a bar for the whole, and how they end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvyard.cli.app import INTERRUPTED
from kvyard.errors import KvyardError

if TYPE_CHECKING:
    from kvyard.lab.jobs import Executor
    from kvyard.lab.sweep import Sweep

Jobs = Annotated[int | None, typer.Option("--jobs", "-j", help="Replays at a time; by default one per core.")]


Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|ADDRESS",
        help="Run on a Ray cluster: the one of this machine, or at an address; --jobs is its number of CPUs then.",
    ),
]


def executor(jobs: int | None, ray: str | None) -> Executor:
    """Those who run the replays of a command. Raises ``KvyardError``."""
    from kvyard.lab.jobs import LocalExecutor

    if ray is None:
        return LocalExecutor(count_jobs(jobs))
    from kvyard.lab.jobs.cluster import RayExecutor

    return RayExecutor(ray, None if jobs is None else count_jobs(jobs))


def count_jobs(jobs: int | None) -> int:
    """How many replays at a time. Raises ``KvyardError`` for less than one."""
    if jobs is not None and jobs < 1:
        raise KvyardError(f"--jobs {jobs}: at least 1, or leave it out for one per core")
    return jobs or os.cpu_count() or 1


def finish(done: Sweep, quiet: bool, what: str) -> None:
    """End the command: 130 where it was interrupted with ``what`` to go, 1 where a point failed."""
    if done.interrupted:
        typer.echo(f"Interrupted with {done.missing} {what} to go; the same command goes on from there.", err=True)
        raise typer.Exit(INTERRUPTED)
    if done.failures:
        for failure in done.failures if quiet else []:
            typer.echo(f"{failure.point.label}: {failure.why}", err=True)
        raise typer.Exit(1)


class Bars:
    """One bar for a grid, with what is under way; nothing without a terminal."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("points"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[under_way]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._shown = not quiet and self._progress.console.is_terminal
        fields: dict[str, Any] = {"under_way": ""}
        self._task = self._progress.add_task("sweep", total=None, **fields)
        self._through: dict[str, int] = {}

    def counted(self, total: int, through: int) -> None:
        """How many points there are, and how many are through."""
        self._progress.update(self._task, total=total, completed=through)

    def told(self, key: str, through: int, now: int) -> None:
        """How far a point is."""
        self._through[key] = through
        text = f"{sum(self._through.values()):,} requests replayed"
        self._progress.update(self._task, under_way=text)

    def __enter__(self) -> Bars:
        if self._shown:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()
