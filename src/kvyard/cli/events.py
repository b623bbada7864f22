"""``kvyard events``: watch, record, play and check streams of KV-cache events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from kvyard.cli.events_show import lines, report_lines, report_value, summary, values
from kvyard.cli.settings import with_flags
from kvyard.clock import WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.check import Checker, judge
from kvyard.events.faults import Faults
from kvyard.events.recording import About, Recording, RecordingWriter
from kvyard.events.transport import Subscriber
from kvyard.events.transport.endpoint import SCHEMES
from kvyard.events.transport.raw import raw_messages
from kvyard.events.transport.relay import FaultProxy, Player
from kvyard.events.transport.state import Origin
from kvyard.events.wire import WIRES
from kvyard.settings import settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Read and check streams of KV-cache events.")

Endpoint = Annotated[str, typer.Argument(help="Where the engine publishes, such as tcp://localhost:5557.")]
Topic = Annotated[str, typer.Option(help="Only topics that begin like this.")]
Replay = Annotated[str | None, typer.Option(help="Where it replays, such as tcp://localhost:5558.")]
Rank = Annotated[int, typer.Option(help="The data-parallel rank, which moves the ports.")]
Count = Annotated[int | None, typer.Option(min=1, help="Stop after this many batches.")]
Seconds = Annotated[float | None, typer.Option(min=0.0, help="Stop after this many seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]

FAULTS = settings_of(Faults)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Lets Ctrl-C end a block, not the command."""
    try:
        yield
    except KeyboardInterrupt:
        pass


@app.command()
def tail(
    endpoint: Endpoint,
    topic: Topic = "",
    replay: Replay = None,
    rank: Rank = 0,
    count: Count = None,
    duration: Seconds = None,
    as_json: Json = False,
) -> None:
    """Show events as they come, one line each. With --replay, also what came before and what was missed."""
    subscriber = Subscriber(endpoint, replay=replay, topic=topic, rank=rank)

    async def show() -> None:
        seen = 0
        async with subscriber:
            while count is None or seen < count:
                update = await subscriber.receive()
                if update is None:
                    continue
                for line in map(json.dumps, values(update)) if as_json else lines(update):
                    typer.echo(line)
                seen += update.origin in (Origin.LIVE, Origin.REPLAY, Origin.SNAPSHOT)

    with until_interrupted(), suppress(TimeoutError):
        asyncio.run(show() if duration is None else asyncio.wait_for(show(), duration))
    for line in summary(subscriber.subscription):
        typer.echo(line, err=True)


@app.command()
def record(
    endpoint: Endpoint,
    file: Annotated[Path, typer.Argument(help="A new file; compressed if its name ends in .gz.")],
    topic: Topic = "",
    replay: Replay = None,
    rank: Rank = 0,
    count: Count = None,
    duration: Seconds = None,
) -> None:
    """Write a stream to a file, byte for byte and with its timing. With --replay, what came before goes first."""
    clock = WallClock()
    until = None if duration is None else from_seconds(duration)
    about = About(endpoint=endpoint, topic=topic, started=WallClock.since_epoch().now())
    messages = raw_messages(endpoint, until=until, topic=topic, rank=rank, replay=replay, clock=clock)
    with RecordingWriter(file, about) as writer, until_interrupted():
        for message in messages:
            if message is None:
                writer.flush()
                continue
            writer.write(*message)
            if writer.messages == count:
                break
    typer.echo(f"{file}: {writer.messages} messages, {writer.bytes} bytes", err=True)


@app.command()
@with_flags(FAULTS)
def play(
    file: Annotated[Path, typer.Argument(help="A recording, or JSON lines of TensorRT-LLM's events.")],
    endpoint: Annotated[str, typer.Argument(help="Where to publish, such as tcp://*:5557.")],
    settings: Mapping[str, object],
    replay: Annotated[str | None, typer.Option(help="Where to answer for it, such as tcp://*:5558.")] = None,
    speed: Annotated[float, typer.Option(min=0.0, help="1 is as recorded, 2 twice as fast, 0 without pauses.")] = 1.0,
    subscribers: Annotated[int, typer.Option(min=0, help="Wait for this many before the first batch.")] = 0,
    stay: Annotated[float, typer.Option(min=-1.0, help="Seconds to answer afterwards; -1 until interrupted.")] = 0.0,
) -> None:
    """Publish a recording again, in its own time or another, with faults if wanted. Replay and snapshots are without."""
    faults = Faults(**FAULTS.parse(settings))
    recording = Recording(file)
    player = Player(endpoint, replay=replay, speed=speed, faults=faults)
    player.open()
    try:
        answers = f", answers at {player.replay_endpoint}" if player.replay_endpoint else ""
        typer.echo(f"playing {file} at {player.endpoint}{answers}", err=True)
        with until_interrupted():
            player.wait_for_subscribers(subscribers)
            player.play(recording)
            player.stay(None if stay < 0 else stay)
    finally:
        player.close()
    typer.echo(
        f"{player.counters.messages} messages played, {player.outlet.counters.sent} sent{_done(player.faults)}",
        err=True,
    )


@app.command()
@with_flags(FAULTS)
def proxy(
    upstream: Endpoint,
    endpoint: Annotated[str, typer.Argument(help="Where to publish, such as tcp://*:5567.")],
    settings: Mapping[str, object],
    replay: Annotated[str | None, typer.Option(help="Where to answer for it, such as tcp://*:5568.")] = None,
    duration: Seconds = None,
) -> None:
    """Stand between an engine and its readers and make faults happen. Does your router survive them?"""
    faults = Faults(**FAULTS.parse(settings))
    clock = WallClock()
    with FaultProxy(upstream, endpoint, faults, replay=replay) as running:
        typer.echo(f"from {upstream} to {running.endpoint}", err=True)
        with until_interrupted():
            while duration is None or clock.now() < from_seconds(duration):
                clock.sleep_until(clock.now() + from_seconds(min(0.2, 1.0 if duration is None else duration)))
    typer.echo(f"{running.faults.frames} batches{_done(running.faults)}", err=True)


@app.command()
def check(
    source: Annotated[str, typer.Argument(metavar="FILE|ENDPOINT", help="A recording, JSON lines, or a live stream.")],
    duration: Annotated[float, typer.Option(min=0.0, help="Seconds to listen to a live stream.")] = 10.0,
    engine: Annotated[str, typer.Option(help=f"{', '.join(WIRES.names())}; or auto to guess.")] = "auto",
    blocks: Annotated[int | None, typer.Option(min=1, help="How many blocks each device has.")] = None,
    topic: Topic = "",
    replay: Replay = None,
    rank: Rank = 0,
    as_json: Json = False,
) -> None:
    """Say what is normal about a stream, what is wrong with it, and what a consumer would lose.

    Exits with 0 if nothing is wrong, with 1 if something is.
    """
    checker = Checker()
    judge(checker.facts(), engine)  # refuses an unknown engine before a long wait, not after it
    truncated = False
    with until_interrupted():
        if source.startswith(SCHEMES):
            for message in raw_messages(source, until=from_seconds(duration), topic=topic, rank=rank, replay=replay):
                if message is not None:
                    checker.message(message[1])
        else:
            recording = Recording(source)
            for recorded in recording:
                checker.message(recorded.parts)
            truncated = recording.truncated
    facts = checker.facts()
    if not facts.messages:
        raise KvyardError(f"nothing to check: no message came from {source}")
    report = judge(facts, engine, device_blocks=blocks)
    if as_json:
        typer.echo(json.dumps({**report_value(report, source), "truncated": truncated}, indent=2))
    else:
        for line in report_lines(report, source):
            typer.echo(line)
        if truncated:
            typer.echo("The file ends in the middle of a message; what came before it was checked.", err=True)
    raise typer.Exit(0 if report.clean else 1)


def _done(counters: object) -> str:
    """The faults that happened."""
    names = ("dropped", "duplicated", "reordered", "truncated", "corrupted", "restarts", "stalls", "lost_in_stalls")
    found = {name: getattr(counters, name) for name in names}
    return "".join(f", {name.replace('_', ' ')} {count}" for name, count in found.items() if count)
