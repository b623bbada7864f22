"""``kvyard league``: routing policies side by side."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_settings
from kvyard.cli.study import (
    Bars,
    Jobs,
    Out,
    Ray,
    executor,
    finish,
    folder_of,
    listed,
    listed_seeds,
    present,
    refuse_unmet,
)
from kvyard.replay.settings import SETTINGS
from kvyard.settings import duration, number


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def league(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    policies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Policies to compare. [default: all that need no session]")
    ] = None,
    loads: Annotated[str, typer.Option(metavar="1,2,...", help="Speed-ups of arrivals, one table per value.")] = "1",
    seeds: Annotated[
        str, typer.Option(metavar="0,1,...", help="Seeds to run each policy with; the table shows means.")
    ] = "0",
    out: Out = None,
    jobs: Jobs = None,
    ray: Ray = None,
    slo: Slo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Replay a trace under every routing policy, and recommend one.

    With --jitter 3s each load is run twice: with arrivals as recorded, and with arrivals of one time stamp spread over 3 s.
    Coarse time stamps make bursts that never happened, and some policies profit from them. Results are a table per load
    (league.csv, league.json), a page (league.html) and a report per run, which kvyard compare reads. The same command continues
    an interrupted league. Exit code 1 if a run failed or no policy meets the SLO, 130 if interrupted.
    """
    from kvyard.lab.league import league as run

    given = dict(settings)
    jitter = given.pop("jitter", None)
    folder = folder_of(out, "league", trace)
    with executor(jobs, ray) as crew, Bars(quiet) as bars:
        study = run(
            trace,
            folder=folder,
            policies=listed("--policies", policies) if policies is not None else None,
            loads=[number("--loads", load) for load in listed("--loads", loads)],
            seeds=listed_seeds(seeds),
            jitters=["0", str(jitter)] if jitter is not None and duration("jitter", jitter) else ["0"],
            config=given,
            slo=slo,
            executor=crew,
            **reading,
            counted=bars.counted,
            progress=bars.advance,
        )
    result = study.result()
    present(result, folder, quiet, as_json)
    finish(study, quiet, "runs")
    refuse_unmet(result, quiet)
