"""``kvyard replay``: a trace through a fleet, and the report on it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvyard.cli.app import INTERRUPTED, OUTPUT
from kvyard.cli.outputs import say_written, words_beside
from kvyard.cli.reading import CHAIN_IDS, Quiet, Slo, TraceFile, read_trace, with_reading
from kvyard.cli.serving import read_token
from kvyard.cli.settings import with_fields, with_settings
from kvyard.cli.study import Ray, executor
from kvyard.errors import KvyardError
from kvyard.files import STDOUT, check_outputs, is_regular, partial_name
from kvyard.replay.config import DrivingConfig
from kvyard.replay.settings import SETTINGS
from kvyard.settings import chosen, settings_of

if TYPE_CHECKING:
    from kvyard.lab.pools import PooledRun
    from kvyard.lab.rehearsal.run import Proof
    from kvyard.replay.run import ReplayOutcome


LIVE = "Live runs"


class Results(NamedTuple):
    """Destinations of a replay's results."""

    report: Annotated[Path | None, typer.Option(help="Write the report as JSON.", rich_help_panel=OUTPUT)] = None
    per_request: Annotated[
        Path | None, typer.Option(help="Write a row per request: .jsonl or .parquet.", rich_help_panel=OUTPUT)
    ] = None
    html: Annotated[Path | None, typer.Option(help="Write the report as an HTML page.", rich_help_panel=OUTPUT)] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the report as JSON to stdout, and no table.", rich_help_panel=OUTPUT)
    ] = False
    label: Annotated[str, typer.Option(help="Name of the run.", rich_help_panel=OUTPUT)] = ""
    quiet: Quiet = False

    @property
    def paths(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.report, self.per_request, self.html

    def checked(self, trace: Path) -> Results:
        """These with what ``--json`` stands for. Raises ``KvyardError`` for what couldn't be written after the run."""
        if self.as_json and self.report is not None:
            raise KvyardError("--json writes the report to stdout: leave it or --report out")
        results = self._replace(report=Path(STDOUT)) if self.as_json else self
        rows = results.per_request
        if rows is not None and rows.suffix not in (".jsonl", ".parquet") and is_regular(rows):
            raise KvyardError(f"--per-request {rows}: let its name end in .jsonl or .parquet")
        check_outputs(*results.paths, reads=[trace])
        return results


class LiveFlags(NamedTuple):
    """Options of a live run."""

    live: Annotated[
        str | None,
        typer.Option(
            metavar="URL|self",
            help="Send the trace to an OpenAI endpoint; self: to a gateway with a mock fleet, started for it.",
            rich_help_panel=LIVE,
        ),
    ] = None
    speed: Annotated[
        float | None,
        typer.Option(help="With --live: the --speed of the mock that answers.", rich_help_panel=LIVE),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(help="With --live: longest request, in seconds. [default: 600]", rich_help_panel=LIVE),
    ] = None
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="With --live URL: the model to request. [default: the first in /v1/models]", rich_help_panel=LIVE
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(help="With --live URL: file with the bearer token; or set KVYARD_TOKEN.", rich_help_panel=LIVE),
    ] = None
    any_length: Annotated[
        bool,
        typer.Option(
            "--any-length",
            help="With --live URL: let answers end before their recorded length.",
            rich_help_panel=LIVE,
        ),
    ] = False
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="With --live URL: upper bound of the token ids in prompts. [default: 32000]", rich_help_panel=LIVE
        ),
    ] = None
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="With --live self: repeat the run in virtual time and compare every decision.",
            rich_help_panel=LIVE,
        ),
    ] = False


class PoolFlags(NamedTuple):
    """Distribution of pools over this machine or a cluster."""

    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", help="With [[pools]]: pools to replay at a time; by default one per core."),
    ] = None
    ray: Ray = None


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
@with_fields("results", Results)
@with_fields("endpoint", LiveFlags)
@with_fields("at_a_time", PoolFlags)
def replay(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    results: Results,
    endpoint: LiveFlags,
    at_a_time: PoolFlags,
    slo: Slo = None,
    bounds: Annotated[
        bool, typer.Option("--bounds", help="Also report where reuse was lost, from an endless cache down to the run.")
    ] = False,
) -> None:
    """Replay a trace through a simulated fleet and report latencies, throughput and reuse.

    It needs no GPU and runs in virtual time. The same command gives the same report, byte for byte. Ctrl-C ends the run early:
    the report covers what happened until then, and the exit code is 130.

    With --live URL the trace is sent to a real endpoint in real time. Prompts are generated so that they share the prefixes
    that the trace's prompts share. --live self starts mock engines and a gateway for it.
    """
    from kvyard.replay.progress import ProgressBar
    from kvyard.replay.report.slo import read_slo
    from kvyard.replay.settings import make_config

    live = endpoint.live
    check_flags(endpoint, settings, bounds)
    results = results.checked(trace)
    read_slo(slo)
    if settings.get("pools") is not None:
        if live is not None or bounds:
            flag = "--live" if live is not None else "--bounds"
            raise KvyardError(f"{flag} is for a fleet without pools: leave it out, or replay one pool by itself")
        _finish(_replay_pools(trace, settings, reading, slo, results, at_a_time), results)
        return
    for name, value in (("--jobs", at_a_time.jobs), ("--ray", at_a_time.ray)):
        if value is not None:
            raise KvyardError(f"{name} is for fleets of pools, which a file names in [[pools]]: leave it out")
    replay_config = make_config(settings)
    source = read_trace(trace, reading)
    if source.grouped and replay_config.concurrency is None:
        typer.echo(
            "Sessions of this trace have no common clock, so all of them start at once: --concurrency N lets N run.",
            err=True,
        )
    label = results.label
    passed = "simulated in" if live is None else "passed, in"
    with nullcontext() if results.quiet else ProgressBar(source, replay_config.limit, passed=passed) as bar:
        if live is None:
            from kvyard.replay.run import replay as run

            with patient() as obey:

                def advance(arrived: int, through: int, now: int) -> None:
                    if bar is not None:
                        bar.update(arrived, through, now)
                    obey()

                rows = results.per_request
                done: ReplayOutcome = run(
                    source,
                    config=replay_config,
                    slo=slo,
                    label=label,
                    bounds=bounds,
                    progress=advance,
                    per_request=rows,
                )
        else:
            given = {"speed": endpoint.speed, "timeout_s": endpoint.timeout}
            pace: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
            progress = None if bar is None else bar.update
            if live == SELF:
                from kvyard.lab.rehearsal.run import rehearse

                rehearsed = rehearse(
                    source, replay_config, **pace, proven=endpoint.prove, slo=slo, label=label, progress=progress
                )
                done = rehearsed.run
            else:
                from kvyard.replay.live.config import LiveConfig
                from kvyard.replay.live.run import replay_live

                driving = chosen(DrivingConfig, SETTINGS.parse(settings))
                if endpoint.vocabulary is not None:
                    pace["vocabulary"] = endpoint.vocabulary
                model, exact = endpoint.served_model_name, not endpoint.any_length
                config = LiveConfig(model=model, exact=exact, **pace, **driving)
                token = read_token(endpoint.token_file)
                done = replay_live(source, live, config, token=token, slo=slo, label=label, progress=progress)
    _finish(done, results)
    if endpoint.prove:
        with words_beside(*results.paths):
            say_proof(rehearsed.proof)


def _replay_pools(
    trace: Path,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    slo: str | None,
    results: Results,
    at_a_time: PoolFlags,
) -> PooledRun:
    """Replay a fleet of pools; exits with ``INTERRUPTED`` on Ctrl-C, with nothing written."""
    from kvyard.lab.pools import of_all, replay_pools
    from kvyard.replay.progress import ProgressBar

    bar = nullcontext() if results.quiet else ProgressBar(read_trace(trace, reading), of_all(settings, "limit"))
    try:
        with _ended_by(signal.default_int_handler), executor(at_a_time.jobs, at_a_time.ray) as crew, bar as shown:
            report_progress = None if shown is None else shown.update
            return replay_pools(
                trace,
                settings,
                slo=slo,
                label=results.label,
                executor=crew,
                progress=report_progress,
                per_request=results.per_request,
                **reading,
            )
    except KeyboardInterrupt:
        typer.echo("Interrupted: nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _finish(done: ReplayOutcome, results: Results) -> None:
    """Write files and print the table; exits with ``INTERRUPTED`` where it didn't go to the end."""
    from kvyard.lab.pools import PooledRun
    from kvyard.replay.run import SimulatedRun

    streamed = isinstance(done, SimulatedRun | PooledRun)  # then requests were written while it ran
    done.save(results.report, None if streamed else results.per_request, results.html)
    if not results.quiet and not results.as_json:
        with words_beside(*results.paths):
            done.show()
    if not results.quiet:
        _say_more(done)
        rows = results.per_request
        if rows is not None and not done.complete and is_regular(rows):
            rows = partial_name(rows.resolve() if rows.is_symlink() else rows)  # a link is written through
        say_written([results.report, rows, results.html])
    if not done.complete:
        typer.echo("Interrupted: the report covers what had happened until then.", err=True)
        raise typer.Exit(INTERRUPTED)


def _say_more(done: ReplayOutcome) -> None:
    """Print what the trace left out, and why requests were rejected."""
    if done.trace is not None:
        for note in done.trace.tally.notes():
            typer.echo(note, err=True)
    rejected = done.first_rejected()
    if rejected is not None:
        count = done.report.requests["rejected"]
        typer.echo(f"{count:,} requests were rejected, the first, {rejected.id}, because {rejected.reason}.", err=True)


@contextmanager
def patient() -> Iterator[Callable[[], None]]:
    """While this lasts, Ctrl-C waits for a good moment: what is given raises it between two steps. A second one acts at once.
    SIGTERM, by which containers and batch systems end what they run, is the same.

    In the main thread only.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        for ending in ENDING:
            signal.signal(ending, signal.default_int_handler)

    def obey() -> None:
        if asked:
            raise KeyboardInterrupt

    with _ended_by(ask):
        yield obey


@contextmanager
def _ended_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the context, ``handler`` receives the signals that end a process. In the main thread only."""
    before = {ending: signal.signal(ending, handler) for ending in ENDING}
    try:
        yield
    finally:
        for ending, earlier in before.items():
            signal.signal(ending, earlier)


ENDING = (signal.SIGINT, signal.SIGTERM)
SELF = "self"
AT_AN_ENDPOINT = ("served_model_name", "token_file", "any_length", "vocabulary")
"""Flags for ``--live URL`` only."""
NOT_LIVE = {
    "event_lag": "events take the time that sockets take",
    "digest_every": "a gateway follows events",
    "digest_error": "a gateway follows events",
    "plans": "a live engine computes one pass at a time",
    "samples": "a live report has no timeline of the fleet",
    "client": "kvyard itself sends the requests of a live run",
    "client_options": "kvyard itself sends the requests of a live run",
    "turnaround": "kvyard sends the next request of a live run at once",
    "warm_up": "run the warm-up first, with a command of its own",
    "peer_pull": "workers of a live fleet know nothing of each other's caches",
    "autoscale": "a live fleet has the workers that it was started with",
}
"""Settings that only a simulation has."""
DIFFERS = 1
"""The exit code where live and offline differ."""


def check_flags(endpoint: LiveFlags, settings: Mapping[str, object], bounds: bool) -> None:
    """Raise ``KvyardError``, naming it, for a flag that makes no sense with or without ``--live``."""
    live = endpoint.live
    used = {name for name, value in endpoint._asdict().items() if value is not None and value is not False}
    if live is None:
        for name in ("speed", "timeout", *AT_AN_ENDPOINT, "prove"):
            if name in used:
                raise KvyardError(f"--{name.replace('_', '-')} is for live runs: add --live URL, or --live self")
        return
    if bounds:
        raise KvyardError("--bounds needs a simulated run: leave it out with --live")
    for name in settings:
        if name in NOT_LIVE:
            raise KvyardError(f"{name} can't be set with --live: {NOT_LIVE[name]}")
        if live != SELF and name not in settings_of(DrivingConfig):
            raise KvyardError(
                f"{name} is the endpoint's own business: leave it out with --live URL, or use --live self for a fleet with it"
            )
    for name in AT_AN_ENDPOINT:
        if live == SELF and name in used:
            raise KvyardError(f"--{name.replace('_', '-')} is for --live URL: the fleet of --live self needs none")
    if live != SELF:
        from kvyard.replay.live.endpoint import check_url

        check_url(live, ", or self")
    if live != SELF and "prove" in used:
        raise KvyardError("--prove needs to see the engines' clocks: it goes with --live self only")


def say_proof(proof: Proof | None) -> None:
    """Print what the proof found; exits with ``DIFFERS`` where live and offline do, in decisions or beyond the tolerance."""
    if proof is None:
        typer.echo("Interrupted: there is nothing to prove.", err=True)
        return
    typer.echo(str(proof))
    if not proof.equal or not proof.close:
        raise typer.Exit(DIFFERS)
