"""``kvyard sweep``: a trace over a grid of settings, on all cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, with_reading
from kvyard.cli.settings import with_settings
from kvyard.errors import KvyardError
from kvyard.replay.settings import SETTINGS

if TYPE_CHECKING:
    from kvyard.replay.sweep import Sweep

INTERRUPTED = 130


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def sweep(
    trace: Annotated[Path, typer.Argument(help="A trace, packed or not; kvyard trace formats names the formats.")],
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,...", help="A setting and its values, such as host_blocks=0,20k,80k; repeat it."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder of results; by default sweep-TRACE in this one.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Replays at a time; by default one per core.")
    ] = None,
    slo: Slo = None,
    quiet: Quiet = False,
) -> None:
    """Replay a trace at every combination of settings, and draw what they buy.

    Finished points are kept as files: the same command goes on where it was interrupted, and a larger grid only runs what
    is new. Results are a table (sweep.csv, sweep.json), a page of curves (sweep.html) and a report per point, which kvyard
    compare reads. Exit code 1 if a point failed, 130 if interrupted.
    """
    from kvyard.replay.sweep import parse_vary
    from kvyard.replay.sweep import sweep as run

    if jobs is not None and jobs < 1:
        raise KvyardError(f"--jobs {jobs}: at least 1, or leave it out for one per core")
    folder = out or Path(f"sweep-{trace.name.partition('.')[0]}")
    with Bars(quiet) as bars:
        done = run(
            trace,
            parse_vary(vary or []),
            folder=folder,
            config=settings,
            slo=slo,
            jobs=jobs or os.cpu_count() or 1,
            **reading,
            counted=bars.counted,
            progress=bars.told,
        )
    paths = done.save()
    if not quiet:
        _show(done, paths)
    if done.interrupted:
        typer.echo(f"Interrupted with {done.missing} points to go; the same command goes on from there.", err=True)
        raise typer.Exit(INTERRUPTED)
    if done.failures:
        for failure in done.failures if quiet else []:
            typer.echo(f"{failure.point.label}: {failure.why}", err=True)
        raise typer.Exit(1)


def _show(done: Sweep, paths: list[Path]) -> None:
    if done.reports:
        done.show()
    if done.found:
        typer.echo(f"{done.found} of {len(done.grid.points)} points were there from an earlier run", err=True)
    for path in paths:
        typer.echo(f"written: {path}", err=True)


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
