"""``kvyard hints``: the gain of a retention hint."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, with_reading
from kvyard.cli.settings import with_settings
from kvyard.cli.study import Bars, Jobs, Out, count_jobs, finish, folder_of, listed_seeds, present
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
        typer.Option(
            metavar="KIND", help="Hint to study: session-end, ttl:seconds=60,then=first, or own-ttl; may be repeated."
        ),
    ] = None,
    recalls: Annotated[
        str, typer.Option(metavar="A,B,...", help="Shares of fitting requests that give the hint.")
    ] = "0,0.25,0.5,0.7,1",
    falses: Annotated[
        str, typer.Option(metavar="A,B,...", help="Shares of all other requests that give it wrongly.")
    ] = "0,0.1,0.3",
    seeds: Annotated[
        str, typer.Option(metavar="0,1,...", help="Seeds of which requests give it; the table shows means.")
    ] = "0,1",
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Replay caches alone, without a clock: quick, for session-end only.")
    ] = False,
    out: Out = None,
    jobs: Jobs = None,
    slo: Slo = None,
    quiet: Quiet = False,
) -> None:
    """Estimate the gain of a retention hint before it is built: reuse and TTFT by recall and false rate.

    Hints are generated from the trace's own future and replayed on the configured fleet, beside a run without hints. Recall is
    the share of conversations that announce their end (or of tool calls that announce their duration); the false rate is the
    share of all other requests that give the hint too. Results are a table (hints.csv, hints.json), a page of curves
    (hints.html) and a report per run. The same command continues an interrupted study. Exit code 1 if a run failed, 130 if
    interrupted.
    """
    from kvyard.lab.hints import hints as run
    from kvyard.lab.hints import quick_hints

    at_a_time = count_jobs(jobs)
    folder = folder_of(out, "hints", trace)
    qualities: dict[str, Any] = {
        "recalls": [number("--recalls", share) for share in recalls.split(",")],
        "falses": [number("--falses", share) for share in falses.split(",")],
        "seeds": listed_seeds(seeds),
    }
    if no_timing:
        if hint not in (None, [], ["session-end"]):
            raise KvyardError("--no-timing is for session-end: a time to live needs a clock")

        def judged(count: int, all_: int) -> None:
            if not quiet:
                typer.echo(f"{count} of {all_} hint qualities replayed", err=True)

        present(quick_hints(trace, config=settings, progress=judged, **qualities, **reading), folder, quiet)
        return
    with Bars(quiet) as bars:
        study = run(
            trace,
            folder=folder,
            hints=hint or ["session-end"],
            **qualities,
            config=settings,
            slo=slo,
            jobs=at_a_time,
            **reading,
            counted=bars.counted,
            progress=bars.advance,
        )
    present(study.result(), folder, quiet)
    finish(study, quiet, "runs")
