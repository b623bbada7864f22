"""``kvyard expect``: prefix-cache hits that an engine owes, beside those it counted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvyard.cli.app import OUTPUT
from kvyard.cli.outputs import print_json, say_written, words_beside
from kvyard.cli.reading import CHAIN_IDS, TraceFile, read_trace, with_reading
from kvyard.cli.replay import patient
from kvyard.cli.serving import read_token
from kvyard.cli.settings import with_fields, with_settings
from kvyard.errors import KvyardError
from kvyard.replay.settings import SETTINGS

if TYPE_CHECKING:
    from kvyard.lab.expect.counted import Counted
    from kvyard.lab.expect.traffic import Traffic

FLAGGED = 1
"""The exit code where a cause is named."""
COUNTS = "What the engine counted"
LIVE = "Live traffic"


class CountFlags(NamedTuple):
    """Sources of an engine's own counts."""

    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running engine: its configuration and counters.", rich_help_panel=COUNTS),
    ] = None
    metrics: Annotated[
        Path | None,
        typer.Option(help="Its /metrics page after the traffic, instead of --engine.", rich_help_panel=COUNTS),
    ] = None
    metrics_before: Annotated[
        Path | None,
        typer.Option(help="Its /metrics page before the traffic, which is subtracted.", rich_help_panel=COUNTS),
    ] = None
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Counts by request, JSON lines with request_id and cached (or an answer's usage). A gateway's recording has "
            "them in its rows.",
            rich_help_panel=COUNTS,
        ),
    ] = None
    events: Annotated[
        list[Path] | None,
        typer.Option(help="Recordings of the workers' KV events, to compare their hashes.", rich_help_panel=COUNTS),
    ] = None
    tolerance: Annotated[
        float, typer.Option(min=0, help="Percent of prompt tokens by which counts may differ.", rich_help_panel=COUNTS)
    ] = 2.0
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the engine's API key; or set KVYARD_TOKEN.", rich_help_panel=COUNTS)
    ] = None

    @property
    def files(self) -> list[Path]:
        """Files with counts, events aside."""
        return [path for path in (self.metrics, self.metrics_before, self.answers) if path is not None]


class WatchFlags(NamedTuple):
    """Following of a recording that grows."""

    watch: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Compare the end of a growing recording every TIME, such as 60s, and serve the results as metrics.",
            rich_help_panel=LIVE,
        ),
    ] = None
    window: Annotated[
        int,
        typer.Option(min=1, help="With --watch: compare this many of the latest requests.", rich_help_panel=LIVE),
    ] = 2000
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --watch: the gateway that records. Its dashboard shows results, and looks take at most 2 % of its "
            "processor time; its admin token is KVYARD_ADMIN_TOKEN.",
            rich_help_panel=LIVE,
        ),
    ] = None
    host: Annotated[str, typer.Option(help="With --watch: address of /metrics.", rich_help_panel=LIVE)] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="With --watch: port of /metrics; 0: any free port.", rich_help_panel=LIVE)
    ] = 9109


@with_settings(SETTINGS)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
@with_fields("live", WatchFlags)
@with_fields("counts", CountFlags)
def expect(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    counts: CountFlags,
    live: WatchFlags,
    serve: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="The command that starts the engine, such as 'vllm serve MODEL ...'."),
    ] = None,
    per_request: Annotated[
        Path | None,
        typer.Option(help="Write what each request is owed, and its count, as JSON lines.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write JSON instead of the table.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Replay traffic by an engine's own rules, and report which prefix-cache hits it owes and why it counted fewer.

    Name the engine by --serve, by --engine, or by settings of kvyard replay (--model and --gpu, or --block-size and
    --num-gpu-blocks). Without the engine's counts the command reports the hits to expect and what limits them. Exit code 0 if
    nothing is wrong, 1 if a cause is named, 2 if refused. --watch follows the recording of a live gateway (kvyard gateway
    --record).
    """
    import msgspec

    from kvyard.files import STDOUT, check_outputs, write_whole
    from kvyard.lab.expect.evidence import from_events
    from kvyard.lab.expect.expectation import expect as work_out
    from kvyard.lab.expect.traffic import read_traffic
    from kvyard.lab.expect.view import print_expectation

    if counts.tolerance != counts.tolerance:
        raise KvyardError("--tolerance is not a number: give percent of prompt tokens, such as 2")
    check_outputs(per_request, STDOUT if as_json else None, reads=[trace, *counts.files])
    given, page, notes = _engine(serve, counts)
    engine = {**given, **settings}
    if not engine.keys() & {"model", "block_size", "groups"}:
        raise KvyardError(
            "which engine? Name it by --serve or --engine, by --model and --gpu, or by --block-size and --num-gpu-blocks"
        )
    if counts.engine is not None and not engine.keys() & {"model", "groups"}:
        notes.append(
            "The engine doesn't say which attention its model has, and the model is no preset: full attention is assumed. "
            "For a hybrid, name --model."
        )
    if live.watch is not None:
        if counts.files or per_request is not None or as_json or counts.events:
            raise KvyardError(
                "--watch compares the counts of a recording: leave out metrics, answers, events and results"
            )
        _watch(trace, reading, engine, live, counts.tolerance / 100)
        return
    if live.gateway is not None:
        raise KvyardError("--gateway goes with --watch: without it, name the gateway's recording alone")
    traffic = read_traffic(read_trace(trace, reading), **_part(engine))
    traffic.notes += notes
    counted = _counted(traffic, counts, page)
    if counted is not None and counted.backend and "backend" not in engine:
        engine["backend"] = counted.backend
    with patient() as obey:
        expectation = work_out(
            traffic,
            engine,
            counted,
            evidence=from_events(counts.events or ()),
            tolerance=counts.tolerance / 100,
            progress=lambda arrived, through, now: obey(),
        )
    if per_request is not None:
        write_whole(per_request, b"".join(msgspec.json.encode(row) + b"\n" for row in expectation.rows))
    if as_json:
        whole = msgspec.structs.asdict(expectation)
        del whole["rows"]
        print_json({"flagged": expectation.flagged, **whole})
    else:
        with words_beside(per_request):
            print_expectation(expectation)
    say_written([per_request])
    raise typer.Exit(FLAGGED if expectation.flagged else 0)


def _engine(serve: str | None, counts: CountFlags) -> tuple[dict[str, object], str | None, list[str]]:
    """Return settings by the command line and by the running engine, the engine's page of metrics, and notes for readers."""
    settings: dict[str, object] = {}
    notes: list[str] = []
    if serve is not None:
        from kvyard.lab.expect.command_line import read_serve_line

        line = read_serve_line(serve)
        settings |= line.settings
        if line.unmodelled:
            notes.append(
                f"Not modelled, though hits depend on it: {', '.join(line.unmodelled)}. Give what it comes to by settings of "
                "kvyard replay, which win over the command line."
            )
        if line.ignored:
            notes.append(f"Flags that aren't read: {', '.join(line.ignored)}.")
    if counts.engine is None:
        return settings, None, notes
    from kvyard.lab.expect.engine_visit import visit_engine

    seen = visit_engine(counts.engine, read_token(counts.token_file))
    return {**seen.settings, **settings}, seen.page, notes


def _watch(
    trace: Path, reading: Mapping[str, Any], settings: Mapping[str, object], live: WatchFlags, tolerance: float
) -> None:
    import os

    from kvyard.clock import SECOND
    from kvyard.lab.expect.expectation import Expectation
    from kvyard.lab.expect.gateway_link import GatewayLink
    from kvyard.lab.expect.tail import read_latest
    from kvyard.lab.expect.view import summary, verdict
    from kvyard.lab.expect.watch import ExpectWatch
    from kvyard.server.gateway.config import ADMIN_VARIABLE
    from kvyard.server.running import Running, listen
    from kvyard.settings import duration

    shown = ""

    def report(expectation: Expectation) -> None:
        nonlocal shown
        if verdict(expectation) != shown:
            shown = verdict(expectation)
            typer.echo(f"{summary(expectation)}. {shown}", err=True)

    watcher = ExpectWatch(
        lambda rows: read_latest(trace, rows, lambda path: read_trace(path, reading)),
        settings,
        every_s=duration("--watch", str(live.watch)) / SECOND,
        requests=live.window,
        tolerance=tolerance,
        report=report,
        gateway=None if live.gateway is None else GatewayLink(live.gateway, os.environ.get(ADMIN_VARIABLE)),
    )
    with listen(live.host, live.port) as bound:
        ready = lambda url: typer.echo(f"metrics at {url}/metrics", err=True)  # noqa: E731
        Running(watcher.application(), bound, around=watcher, ready=ready).run()


def _part(settings: Mapping[str, object]) -> dict[str, int | None]:
    """Return which requests are asked about, as ``read_traffic`` takes it."""
    names = ("limit", "max_tokens")
    given = SETTINGS.parse({name: settings.get(name) for name in names})
    return {name: given.get(name) for name in names}


def _counted(traffic: Traffic, counts: CountFlags, page: str | None) -> Counted | None:
    from kvyard.lab.expect.counted import Counted, read_page

    metrics, before = counts.metrics, counts.metrics_before
    if before is not None and metrics is None and page is None:
        raise KvyardError("--metrics-before needs a page after the traffic: --metrics FILE, or --engine URL")
    by_request = traffic.cached if counts.answers is None else _answers(traffic, counts.answers)
    text = page or None if metrics is None else _text(metrics)
    if page == "" and text is None:
        traffic.notes.append("The engine has no /metrics (SGLang: --enable-metrics).")
    if text is None:
        return Counted(source="cached_tokens of answers", by_request=by_request) if by_request else None
    counted = read_page(text, "its /metrics" if metrics is None else str(metrics))
    if before is not None:
        counted = counted.since(read_page(_text(before), str(before)))
    counted.by_request = by_request
    return counted


def _answers(traffic: Traffic, path: Path) -> dict[str, int]:
    """Return counts by request. Raises ``KvyardError`` if none of them is of a request of ``traffic``."""
    from kvyard.lab.expect.counted import read_answers

    cached = read_answers(path)
    others = len(cached.keys() - {request.id for request in traffic.requests})
    if others == len(cached):
        raise KvyardError(f"no row of {path} has the id of a request: the first request is {traffic.requests[0].id!r}")
    if others:
        traffic.notes.append(f"{others:,} of {len(cached):,} rows of {path} are of no request of this traffic.")
    return cached


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
