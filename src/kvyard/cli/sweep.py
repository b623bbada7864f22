"""``kvyard sweep``: a trace over a grid of settings, on all cores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvyard.cli.app import OUTPUT
from kvyard.cli.grid import Bars, Jobs, Ray, executor, finish
from kvyard.cli.outputs import say_written
from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_settings
from kvyard.files import STDOUT
from kvyard.replay.settings import SETTINGS

if TYPE_CHECKING:
    from kvyard.lab.sweep import Sweep


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def sweep(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,...", help="A setting and its values, such as host_blocks=0,20k,80k; repeat it."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The folder of results; by default sweep-TRACE in this one.", rich_help_panel=OUTPUT
        ),
    ] = None,
    jobs: Jobs = None,
    ray: Ray = None,
    slo: Slo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Replay a trace at every combination of settings, and draw what they buy.

    Finished points are kept as files: the same command goes on where it was interrupted, and a larger grid only runs what
    is new. Results are a table (sweep.csv, sweep.json), a page of curves (sweep.html) and a report per point, which kvyard
    compare reads. Exit code 1 if a point failed, 130 if interrupted.
    """
    from kvyard.lab.sweep import parse_vary
    from kvyard.lab.sweep import sweep as run
    from kvyard.lab.sweep.table import write_json

    folder = out or Path(f"sweep-{trace.name.partition('.')[0]}")
    with executor(jobs, ray) as crew, Bars(quiet) as bars:
        done = run(
            trace,
            parse_vary(vary or []),
            folder=folder,
            config=settings,
            slo=slo,
            executor=crew,
            **reading,
            counted=bars.counted,
            progress=bars.told,
        )
    paths = done.save()
    if as_json:
        write_json(done, Path(STDOUT))
    elif not quiet:
        _show(done, paths)
    finish(done, quiet, "points")


def _show(done: Sweep, paths: list[Path]) -> None:
    if done.reports:
        done.show()
    if done.found:
        typer.echo(f"{done.found} of {len(done.grid.points)} points were there from an earlier run", err=True)
    say_written(paths)
