"""``kvyard tune``: a search of any settings for goals under an SLO."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvyard.cli.app import INTERRUPTED
from kvyard.cli.reading import CHAIN_IDS, Quiet, TraceFile, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_settings
from kvyard.cli.study import UNMET, Bars, Out, Ray, executor, folder_of, present
from kvyard.errors import KvyardError
from kvyard.lab.study.cost import TUNE_SETTINGS, parted

TOGETHER = 8
"""Points that are looked at together on a cluster: more of them learn less from each other."""


@with_settings(TUNE_SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def tune(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW..HIGH,NAME=A|B,router.*",
            help="Settings to search: ranges and choices; router.* is the policy and its options. May be repeated.",
        ),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            metavar="'min METRIC'",
            help="min cost, min ttft_p99, max reuse, ...; several, with commas, give a Pareto front.",
        ),
    ] = "min cost",
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=LIMIT,...",
            help="Limits that a point must meet, such as ttft_p99=1000,itl_p99=50ms or cost<20.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Most points to replay.")] = 60,
    test: Annotated[
        float, typer.Option(help="Last share of the trace that isn't searched on, to test the answer; 0: none.")
    ] = 0.3,
    out: Out = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", help=f"Points to replay at a time; 1 by default, {TOGETHER} on a cluster."),
    ] = None,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search for the settings of a fleet that meet an SLO and are best by a goal.

    Points are replayed on the first part of the trace; the best one is tested on the rest. Results are a table (tune.csv,
    tune.json), a page (tune.html) and settings (tune.toml) that kvyard replay and kvyard gateway take with --config. The same
    command continues an interrupted search, also with more --trials. One goal is searched with Optuna's TPE, several with
    NSGA-II. The same --seed and --jobs give the same search. Exit code 1 if no point meets the SLO, 130 if interrupted.
    """
    from kvyard.lab.tune import parse_goals, parse_limits
    from kvyard.lab.tune import tune as run

    if not search:
        raise KvyardError("say what to search, as in --search 'router.*,host_bytes=0..1TiB,workers=2..32'")
    base, prices = parted(settings)
    goals, limits = parse_goals(goal), parse_limits(slo)
    folder = folder_of(out, "tune", trace)
    at_a_time = jobs if jobs is not None else 1 if ray is None else TOGETHER
    with executor(at_a_time, ray) as crew, Bars(quiet) as bars:
        done = run(
            trace,
            search,
            goals,
            limits,
            folder=folder,
            trials=trials,
            test=test,
            prices=prices,
            config=base,
            executor=crew,
            **reading,
            counted=bars.counted,
            progress=bars.advance,
        )
    if [chosen_goal.name for chosen_goal in goals] == ["cost"] and not limits and not quiet:
        typer.echo(
            "Without --slo the cheapest fleet is the smallest: say what it must keep, such as ttft_p99=1s,itl_p99=50ms.",
            err=True,
        )
    earlier = f"{done.found} points were there from an earlier run" if done.found else ""
    present(done.result(), folder, quiet, as_json, earlier)
    if done.interrupted:
        typer.echo(
            f"Interrupted after {done.replayed} of {trials} points; the same command goes on from there.", err=True
        )
        raise typer.Exit(INTERRUPTED)
    if not done.met:
        if quiet or done.answer is None:
            failed = next((f" The first because {trial.why}" for trial in done.trials if trial.state == "failed"), "")
            typer.echo(done.sentences()[0] + ("" if done.answer else failed), err=True)
        raise typer.Exit(UNMET)
