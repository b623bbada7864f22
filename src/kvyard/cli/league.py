"""``kvyard league``: routing policies side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.app import OUTPUT
from kvyard.cli.grid import Bars, Jobs, Ray, executor, finish
from kvyard.cli.outputs import say_written
from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_settings
from kvyard.errors import KvyardError
from kvyard.files import STDOUT
from kvyard.replay.settings import SETTINGS
from kvyard.settings import duration, number


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def league(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    policies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Who plays; by default all that need no session.")
    ] = None,
    loads: Annotated[str, typer.Option(metavar="1,2,...", help="Speed-ups of arrivals, a table each.")] = "1",
    seeds: Annotated[str, typer.Option(metavar="0,1,...", help="Each policy plays with each; means are shown.")] = "0",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The folder of results; by default league-TRACE in this one.", rich_help_panel=OUTPUT
        ),
    ] = None,
    jobs: Jobs = None,
    ray: Ray = None,
    slo: Slo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Replay a trace under every routing policy, and say who does what best.

    With --jitter 3s each load is played twice, with arrivals as recorded and with those of one tick spread over 3 s: ticks
    flatter policies that react to bursts. Results are a table per load (league.csv, league.json), a page (league.html)
    and a report per run, which kvyard compare reads; the same command goes on where it was interrupted. Exit code 1 if a
    run failed, 130 if interrupted.
    """
    from kvyard.lab.league import league as run
    from kvyard.lab.league.table import write_json

    given = dict(settings)
    jitter = given.pop("jitter", None)
    with executor(jobs, ray) as crew, Bars(quiet) as bars:
        done = run(
            trace,
            folder=out or Path(f"league-{trace.name.partition('.')[0]}"),
            policies=_parts("--policies", policies) if policies is not None else None,
            loads=[number("--loads", one) for one in _parts("--loads", loads)],
            seeds=[_seed(one) for one in _parts("--seeds", seeds)],
            jitters=["0", str(jitter)] if jitter is not None and duration("jitter", jitter) else ["0"],
            config=given,
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
        if done.cells:
            done.show()
        say_written(paths)
    finish(done.sweep, quiet, "runs")


def _parts(option: str, text: str) -> list[str]:
    parts = [one.strip() for one in text.split(",")]
    if not all(parts):
        raise KvyardError(f"{option} {text!r}: names or numbers with commas between them")
    return parts


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise KvyardError(f"--seeds {text!r}: a seed is a whole number")
    return int(text)
