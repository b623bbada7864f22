"""``kvyard replay``: a trace through a fleet, and the report on it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvyard.cli.interrupt import patient
from kvyard.cli.reading import ChainIds, FormatName, IdBlockSize, Quiet, SkipBad, Slo, Sort
from kvyard.cli.replay_live import SELF, check_flags, say_proof
from kvyard.cli.serving import read_token
from kvyard.cli.settings import with_settings
from kvyard.errors import KvyardError
from kvyard.replay.config import DrivingConfig
from kvyard.replay.settings import SETTINGS
from kvyard.settings import chosen

if TYPE_CHECKING:
    from kvyard.replay.run import ReplayOutcome

INTERRUPTED = 130


@with_settings(SETTINGS)
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace, packed or not; kvyard trace formats names the formats.")],
    settings: Mapping[str, object],
    format_name: FormatName = None,
    trace_block_size: IdBlockSize = None,
    sort: Sort = False,
    skip_bad: SkipBad = False,
    chain_ids: ChainIds = False,
    slo: Slo = None,
    bounds: Annotated[bool, typer.Option("--bounds", help="Also say what caches could have reached at best.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    per_request: Annotated[Path | None, typer.Option(help="Write a row per request: .jsonl or .parquet.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page, one file.")] = None,
    label: Annotated[str, typer.Option(help="What to call the run.")] = "",
    live: Annotated[
        str | None,
        typer.Option(
            metavar="URL|self",
            help="Drive an OpenAI endpoint with the trace, or a mock fleet with a gateway before it.",
        ),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="With --live: how fast the endpoint's time passes, if it is a mock's.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="With --live: seconds that a request may take, 600 by default.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="With --live URL: the model to ask for, unless the first it serves.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="With --live URL: a file with the bearer token; or set KVYARD_TOKEN.")
    ] = None,
    any_length: Annotated[
        bool,
        typer.Option(
            "--any-length", help="With --live URL: let answers end when they like, up to the recorded length."
        ),
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="With --live self: repeat the run in virtual time, and compare decisions.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Replay a trace through a fleet of simulated workers, and say what its users would have seen.

    Nothing needs a GPU, and virtual time passes as fast as it can. The same command gives the same report, byte for byte.
    Ctrl-C ends the run early, with a report on what happened until then and exit code 130.

    With --live URL the trace drives a real endpoint instead, in real time: prompts are made up so that they share what the
    trace says they share. With --live self a mock fleet and a gateway are started for it.
    """
    from kvyard.replay.progress import Bar
    from kvyard.replay.run import read_slo
    from kvyard.replay.settings import make_config
    from kvyard.replay.traces import open_trace

    own = {"speed": speed, "timeout": timeout, "served_model_name": served_model_name, "token_file": token_file}
    check_flags(live, settings, {**own, "any_length": any_length, "prove": prove, "bounds": bounds})
    check_outputs(report, per_request, html)
    read_slo(slo)
    made = make_config(settings)
    source = open_trace(
        trace, format_name, block_size=trace_block_size, skip_bad=skip_bad, sort=sort, chain_ids=chain_ids
    )
    if source.grouped and made.concurrency is None:
        typer.echo(
            "Sessions of this trace have no common clock, so all of them start at once: --concurrency N lets N run.",
            err=True,
        )
    passed = "simulated in" if live is None else "passed, in"
    with nullcontext() if quiet else Bar(source, made.limit, passed=passed) as bar:
        if live is None:
            from kvyard.replay.run import replay as run

            with patient() as interruption:

                def told(came: int, through: int, now: int) -> None:
                    if bar is not None:
                        bar.told(came, through, now)
                    interruption.obey()

                done: ReplayOutcome = run(source, config=made, slo=slo, label=label, bounds=bounds, progress=told)
        else:
            given = {"speed": speed, "timeout_s": timeout}
            pace: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
            progress = None if bar is None else bar.told
            if live == SELF:
                from kvyard.server.rehearsal.run import rehearse

                rehearsed = rehearse(source, made, **pace, proven=prove, slo=slo, label=label, progress=progress)
                done = rehearsed.run
            else:
                from kvyard.replay.live.config import LiveConfig
                from kvyard.replay.live.run import replay_live

                driving = chosen(DrivingConfig, SETTINGS.parse(settings))
                config = LiveConfig(model=served_model_name, exact=not any_length, **pace, **driving)
                token = read_token(token_file)
                done = replay_live(source, live, config, token=token, slo=slo, label=label, progress=progress)
    _finish(done, report, per_request, html, quiet)
    if prove:
        say_proof(rehearsed.proof)


def _finish(done: ReplayOutcome, report: Path | None, per_request: Path | None, html: Path | None, quiet: bool) -> None:
    """Write files and print the table; exits with ``INTERRUPTED`` where it didn't go to the end."""
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


def _say_more(done: ReplayOutcome) -> None:
    """What the trace left out, and why requests were turned away."""
    if done.trace is not None:
        for note in done.trace.tally.notes():
            typer.echo(note, err=True)
    rejected = [record for record in done.records if record.status == "rejected"]
    if rejected:
        typer.echo(
            f"{len(rejected):,} requests were rejected, the first, {rejected[0].id}, because {rejected[0].reason}.",
            err=True,
        )
