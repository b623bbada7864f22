"""``kvyard hints``: what a hint would be worth."""

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
    out: Out = None,
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
                typer.echo(f"{count} of {all_} qualities of the hint judged", err=True)

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
