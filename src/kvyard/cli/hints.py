"""``kvyard hints``: what a hint would be worth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.grid import Bars, Jobs, count_jobs, finish
from kvyard.cli.outputs import say_written
from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, with_reading
from kvyard.cli.settings import with_settings
from kvyard.errors import KvyardError
from kvyard.replay.settings import SETTINGS
from kvyard.settings import number


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def hints(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    hint: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="session-end, or ttl:seconds=60,then=first; repeat it for more."),
    ] = None,
    recalls: Annotated[
        str, typer.Option(metavar="A,B,...", help="Shares of places where it is given.")
    ] = "0,0.25,0.5,0.7,1",
    falses: Annotated[str, typer.Option(metavar="A,B,...", help="Shares of other places where it is.")] = "0,0.1,0.3",
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="Who gives it, drawn anew; means are shown.")] = "0,1",
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Quick: session ends on caches alone, without a clock.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder of results; by default hints-TRACE in this one.")
    ] = None,
    jobs: Jobs = None,
    slo: Slo = None,
    quiet: Quiet = False,
) -> None:
    """Say what a retention hint would be worth before it is built: reuse and TTFT by recall and false rate.

    Hints are made from the trace's own future and replayed on the fleet that the settings describe, beside none at all. A
    recall is the share of conversations that say that they are over (or of tool calls that say for how long); a false rate is
    the share of all other requests that say so too. Results are a table (hints.csv, hints.json), a page of curves (hints.html)
    and a report per run; the same command goes on where it was interrupted. Exit code 1 if a run failed, 130 if interrupted.
    """
    from kvyard.lab.hints import quick_study, study

    at_a_time = count_jobs(jobs)
    folder = out or Path(f"hints-{trace.name.partition('.')[0]}")
    qualities: dict[str, Any] = {
        "recalls": [number("--recalls", one) for one in recalls.split(",")],
        "falses": [number("--falses", one) for one in falses.split(",")],
        "seeds": [_seed(one) for one in seeds.split(",")],
    }
    if no_timing:
        if hint not in (None, [], ["session-end"]):
            raise KvyardError("--no-timing is for session-end: a time to live needs a clock")
        quick = quick_study(trace, folder=folder, config=settings, **qualities, **reading)
        paths = quick.save()
        if not quiet:
            quick.show()
            say_written(paths)
        return
    with Bars(quiet) as bars:
        done = study(
            trace,
            folder=folder,
            hints=hint or ["session-end"],
            **qualities,
            config=settings,
            slo=slo,
            jobs=at_a_time,
            **reading,
            counted=bars.counted,
            progress=bars.told,
        )
    paths = done.save()
    assert done.sweep is not None
    if not quiet:
        if done.points:
            done.show()
        say_written(paths)
    finish(done.sweep, quiet, "runs")


def _seed(text: str) -> int:
    if not text.strip().isdecimal():
        raise KvyardError(f"--seeds {text!r}: a seed is a whole number")
    return int(text)
