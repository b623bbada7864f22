"""``kvyard league``: routing policies side by side."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, with_reading
from kvyard.cli.settings import with_settings
from kvyard.cli.sweep import INTERRUPTED, Bars
from kvyard.errors import KvyardError
from kvyard.replay.settings import SETTINGS
from kvyard.settings import duration, number


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def league(
    trace: Annotated[Path, typer.Argument(help="A trace, packed or not; kvyard trace formats names the formats.")],
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    policies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Who plays; by default all that need no session.")
    ] = None,
    loads: Annotated[str, typer.Option(metavar="1,2,...", help="Speed-ups of arrivals, a table each.")] = "1",
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="Each policy plays with each; means are shown.")] = "0",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder of results; by default league-TRACE in this one.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Replays at a time; by default one per core.")
    ] = None,
    slo: Slo = None,
    quiet: Quiet = False,
) -> None:
    """Replay a trace under every routing policy, and say who does what best.

    With --jitter 3s each load is played twice, with arrivals as recorded and with those of one tick spread over 3 s: ticks
    flatter policies that react to bursts. Results are a table per load (league.csv, league.json), a page (league.html)
    and a report per run, which kvyard compare reads; the same command goes on where it was interrupted. Exit code 1 if a
    run failed, 130 if interrupted.
    """
    from kvyard.replay.league import league as run

    if jobs is not None and jobs < 1:
        raise KvyardError(f"--jobs {jobs}: at least 1, or leave it out for one per core")
    given = dict(settings)
    jitter = given.pop("jitter", None)
    with Bars(quiet) as bars:
        done = run(
            trace,
            folder=out or Path(f"league-{trace.name.partition('.')[0]}"),
            policies=_parts("--policies", policies) if policies is not None else None,
            loads=[number("--loads", one) for one in _parts("--loads", loads)],
            seeds=[_seed(one) for one in _parts("--seeds", seeds)],
            jitters=["0", str(jitter)] if jitter is not None and duration("jitter", jitter) else ["0"],
            config=given,
            slo=slo,
            jobs=jobs or os.cpu_count() or 1,
            **reading,
            counted=bars.counted,
            progress=bars.told,
        )
    paths = done.save()
    if not quiet:
        if done.cells:
            done.show()
        for path in paths:
            typer.echo(f"written: {path}", err=True)
    if done.sweep.interrupted:
        typer.echo(f"Interrupted with {done.sweep.missing} runs to go; the same command goes on from there.", err=True)
        raise typer.Exit(INTERRUPTED)
    if done.sweep.failures:
        for failure in done.sweep.failures if quiet else []:
            typer.echo(f"{failure.point.label}: {failure.why}", err=True)
        raise typer.Exit(1)


def _parts(option: str, text: str) -> list[str]:
    parts = [one.strip() for one in text.split(",")]
    if not all(parts):
        raise KvyardError(f"{option} {text!r}: names or numbers with commas between them")
    return parts


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise KvyardError(f"--seeds {text!r}: a seed is a whole number")
    return int(text)
