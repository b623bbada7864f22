"""``kvyard sweep``: a trace over a grid of settings, on all cores."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_settings
from kvyard.cli.study import Bars, Jobs, Out, Ray, executor, finish, folder_of, present, refuse_unmet
from kvyard.replay.settings import SETTINGS


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def sweep(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,...", help="A setting and its values, such as host_blocks=0,20k,80k; may be repeated."
        ),
    ] = None,
    out: Out = None,
    jobs: Jobs = None,
    ray: Ray = None,
    slo: Slo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Replay a trace at every combination of settings, and compare the results.

    Finished points are kept as files: the same command continues an interrupted sweep, and a larger grid runs only new points.
    Results are a table (sweep.csv, sweep.json), a page of curves (sweep.html) and a report per point, which kvyard compare
    reads. Exit code 1 if a point failed or none meets the SLO, 130 if interrupted.
    """
    from kvyard.lab.study import parse_vary
    from kvyard.lab.sweep import sweep as run

    folder = folder_of(out, "sweep", trace)
    with executor(jobs, ray) as crew, Bars(quiet) as bars:
        study = run(
            trace,
            parse_vary(vary or []),
            folder=folder,
            config=settings,
            slo=slo,
            executor=crew,
            **reading,
            counted=bars.counted,
            progress=bars.advance,
        )
    earlier = f"{study.found} of {len(study.points)} points were there from an earlier run" if study.found else ""
    result = study.result()
    present(result, folder, quiet, as_json, earlier)
    finish(study, quiet, "points")
    refuse_unmet(result, quiet)
