"""``kvyard replay``: a trace through a fleet, and the report on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvyard.cli.interrupt import patient
from kvyard.cli.settings import with_settings
from kvyard.errors import KvyardError

if TYPE_CHECKING:
    from kvyard.replay.run import Run

INTERRUPTED = 130


@with_settings
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace, packed or not; kvyard trace formats names the formats.")],
    settings: Mapping[str, object],
    format_name: Annotated[str | None, typer.Option("--format", help="Its format, if not told by its start.")] = None,
    trace_block_size: Annotated[int | None, typer.Option(min=1, help="Tokens an id of the trace stands for.")] = None,
    sort: Annotated[
        bool, typer.Option("--sort", help="Put requests in order of arrival, holding all of them.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad rows and go on.")] = False,
    slo: Annotated[str | None, typer.Option(help="What a good request is, in ms, such as ttft=500,itl=20.")] = None,
    bounds: Annotated[bool, typer.Option("--bounds", help="Also say what caches could have reached at best.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    per_request: Annotated[Path | None, typer.Option(help="Write a row per request: .jsonl or .parquet.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page, one file.")] = None,
    label: Annotated[str, typer.Option(help="What to call the run.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bar, no table: only files and errors.")] = False,
) -> None:
    """Replay a trace through a fleet of simulated workers, and say what its users would have seen.

    Nothing needs a GPU, and virtual time passes as fast as it can. The same command gives the same report, byte for byte.
    Ctrl-C ends the run early, with a report on what happened until then and exit code 130.
    """
    from kvyard.replay.run import read_slo
    from kvyard.replay.run import replay as run
    from kvyard.replay.settings import make_config
    from kvyard.replay.traces import open_trace

    check_outputs(report, per_request, html)
    read_slo(slo)
    made = make_config(settings)
    source = open_trace(trace, format_name, block_size=trace_block_size, skip_bad=skip_bad, sort=sort)
    if source.grouped and made.concurrency is None:
        typer.echo(
            "Sessions of this trace have no common clock, so all of them start at once: --concurrency N lets N run.",
            err=True,
        )
    with patient() as wish:
        if quiet:
            done = run(source, config=made, slo=slo, label=label, bounds=bounds, progress=lambda *_: wish.obey())
        else:
            from kvyard.replay.progress import Bar

            with Bar(source, made.limit) as bar:

                def told(came: int, through: int, now: int) -> None:
                    bar.told(came, through, now)
                    wish.obey()

                done = run(source, config=made, slo=slo, label=label, bounds=bounds, progress=told)
    done.save(report, per_request, html)
    if not quiet:
        done.show()
        _say_more(done)
        for path in (report, per_request, html):
            if path is not None:
                typer.echo(f"written: {path}", err=True)
    if not done.complete:
        typer.echo("Interrupted: the report covers what had happened until then.", err=True)
        raise typer.Exit(INTERRUPTED)


def check_outputs(report: Path | None, per_request: Path | None, html: Path | None) -> None:
    """Raise ``KvyardError`` now for what couldn't be written after the run."""
    if per_request is not None and per_request.suffix not in (".jsonl", ".parquet"):
        raise KvyardError(f"--per-request {per_request}: let its name end in .jsonl or .parquet")
    for path in (report, per_request, html):
        if path is not None and not path.absolute().parent.is_dir():
            raise KvyardError(f"can't write {path}: there is no directory {path.parent}; make it first")
        if path is not None and path.is_dir():
            raise KvyardError(f"can't write {path}: it is a directory")


def _say_more(done: Run) -> None:
    """What the trace left out, and why requests were turned away."""
    if done.trace is not None:
        tally = done.trace.tally
        if tally.skipped:
            typer.echo(f"{tally.skipped:,} bad rows skipped, the first: {tally.examples[0]}", err=True)
        for reason, count in tally.left_out.items():
            typer.echo(f"{count:,} rows left out: {reason}", err=True)
    rejected = [record for record in done.records if record.status == "rejected"]
    if rejected:
        typer.echo(
            f"{len(rejected):,} requests were rejected, the first, {rejected[0].id}, because {rejected[0].reason}.",
            err=True,
        )
