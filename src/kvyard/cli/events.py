"""``kvyard events``: watch, record, play and check streams of KV-cache events."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.outputs import print_json
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_flags
from kvyard.clock import WallClock, from_seconds
from kvyard.errors import KvyardError
from kvyard.events.check import Checker, Finding, Severity, StreamReport, judge
from kvyard.events.faults import Faults
from kvyard.events.recording import About, Recording, RecordingWriter
from kvyard.events.transport import Subscriber
from kvyard.events.transport.endpoint import SCHEMES
from kvyard.events.transport.raw import raw_messages
from kvyard.events.transport.relay import FaultProxy, Player
from kvyard.events.transport.state import Origin, State, Update
from kvyard.events.transport.subscription import Subscription
from kvyard.events.types import Event, Removed, Stored
from kvyard.events.wire import WIRES
from kvyard.hashing import Key
from kvyard.hashing.keys import short_text
from kvyard.settings import settings_of

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Read and check streams of KV-cache events.")

Endpoint = Annotated[str, typer.Argument(help="Event endpoint of the engine, such as tcp://localhost:5557.")]
Topic = Annotated[str, typer.Option(help="Prefix of the topics to read.")]
Replay = Annotated[str | None, typer.Option(help="Replay endpoint of the engine, such as tcp://localhost:5558.")]
Rank = Annotated[int, typer.Option(help="Data-parallel rank, which is added to the ports.")]
Count = Annotated[int | None, typer.Option(min=1, help="Stop after this many batches.")]
Seconds = Annotated[float | None, typer.Option(min=0.0, help="Stop after this many seconds.")]

FAULTS = settings_of(Faults)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Let Ctrl-C end the block, not the command."""
    with suppress(KeyboardInterrupt):
        yield


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
    """Print events as they arrive, one line each. With --replay, also earlier and missed ones."""
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
    """Write a stream to a file, byte for byte and with its timing. With --replay, earlier events come first."""
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
    endpoint: Annotated[str, typer.Argument(help="Endpoint to publish at, such as tcp://*:5557.")],
    settings: Mapping[str, object],
    replay: Annotated[str | None, typer.Option(help="Endpoint that answers replays, such as tcp://*:5558.")] = None,
    speed: Annotated[
        float, typer.Option(min=0.0, help="Speed: 1 as recorded, 2 twice as fast, 0 without pauses.")
    ] = 1.0,
    subscribers: Annotated[int, typer.Option(min=0, help="Subscribers to wait for before the first batch.")] = 0,
    stay: Annotated[
        float, typer.Option(min=-1.0, help="Seconds for which replays are answered afterwards; -1: until interrupted.")
    ] = 0.0,
) -> None:
    """Publish a recording again, at any speed and with injected faults. Replays and snapshots have no faults."""
    faults = Faults(**FAULTS.parse(settings))
    recording = Recording(file)
    player = Player(endpoint, replay=replay, speed=speed, faults=faults)
    player.outlet.open()
    try:
        answers = f", answers at {player.outlet.replay_endpoint}" if player.outlet.replay_endpoint else ""
        typer.echo(f"playing {file} at {player.outlet.endpoint}{answers}", err=True)
        with until_interrupted():
            player.wait_for_subscribers(subscribers)
            player.play(recording)
            player.stay(None if stay < 0 else stay)
    finally:
        player.close()
    typer.echo(
        f"{player.messages} messages played, {player.outlet.counters.sent} sent{_faults_text(player.faults)}",
        err=True,
    )


@app.command()
@with_flags(FAULTS)
def proxy(
    upstream: Endpoint,
    endpoint: Annotated[str, typer.Argument(help="Endpoint to publish at, such as tcp://*:5567.")],
    settings: Mapping[str, object],
    replay: Annotated[str | None, typer.Option(help="Where to answer for it, such as tcp://*:5568.")] = None,
    duration: Seconds = None,
) -> None:
    """Forward an engine's events to its readers, with injected faults, to test a router."""
    faults = Faults(**FAULTS.parse(settings))
    clock = WallClock()
    with FaultProxy(upstream, endpoint, faults, replay=replay) as running:
        typer.echo(f"from {upstream} to {running.endpoint}", err=True)
        with until_interrupted():
            while duration is None or clock.now() < from_seconds(duration):
                clock.sleep_until(clock.now() + from_seconds(min(0.2, 1.0 if duration is None else duration)))
    typer.echo(f"{running.faults.frames} batches{_faults_text(running.faults)}", err=True)


@app.command()
def check(
    source: Annotated[str, typer.Argument(metavar="FILE|ENDPOINT", help="A recording, JSON lines, or a live stream.")],
    duration: Annotated[float, typer.Option(min=0.0, help="Seconds to listen to a live stream.")] = 10.0,
    engine: Annotated[
        str, typer.Option(help=f"Engine that sent the stream: {', '.join(WIRES.names())}, or auto to guess.")
    ] = "auto",
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of each device (vLLM's num_gpu_blocks), to find leaks.")
    ] = None,
    topic: Topic = "",
    replay: Replay = None,
    rank: Rank = 0,
    as_json: Json = False,
) -> None:
    """Check a stream: report what is normal, what is wrong, and what a reader would lose.

    Exit code 0: nothing is wrong, 1: something is.
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
        print_json({**report_value(report, source), "truncated": truncated})
    else:
        for line in report_lines(report, source):
            typer.echo(line)
        if truncated:
            typer.echo("The file ends in the middle of a message; what came before it was checked.", err=True)
    raise typer.Exit(0 if report.clean else 1)


def _faults_text(counters: object) -> str:
    """Return the injected faults as text."""
    names = ("dropped", "duplicated", "reordered", "truncated", "corrupted", "restarts", "stalls", "lost_in_stalls")
    counts = {name: getattr(counters, name) for name in names}
    return "".join(f", {name.replace('_', ' ')} {count}" for name, count in counts.items() if count)


WIDTH = 110
FEW = 4
"""Hashes shown of a long list."""


def lines(update: Update) -> Iterator[str]:
    """Yield an update for people: a line per event, per problem, and for a change of state."""
    if update.origin == Origin.STATE:
        yield f"-- {update.state}{_because(update.reason)}"
        return
    if update.origin == Origin.RESET:
        yield f"-- restart {update.epoch}{_because(update.reason)}"
    head = f"{update.seq:>8}  {update.origin:<8}  "
    rank = "" if update.rank is None else f"  rank {update.rank}"
    if not update.events and not update.problems:
        yield f"{head}nothing{rank}"
    for event in update.events:
        yield f"{head}{_event(event)}{rank}"
    for problem in update.problems:
        yield f"{head}! {problem.kind}: {problem.reason}"


def values(update: Update) -> Iterator[dict[str, Any]]:
    """Yield an update for programs: an object per event, per problem, and for a change of state."""
    common: dict[str, Any] = {
        "stream": update.stream,
        "topic": update.topic,
        "epoch": update.epoch,
        "seq": update.seq,
        "origin": update.origin.value,
        "state": update.state.value,
    }
    if update.origin in (Origin.STATE, Origin.RESET):
        yield {**common, "event": update.origin.value, "reason": update.reason}
        if update.origin == Origin.STATE:
            return
    common |= {"ts": update.ts, "rank": update.rank}
    for event in update.events:
        fields = {name: value for name, value in _fields(event).items() if value is not None}
        yield {**common, "event": type(event).__name__.lower(), **fields}
    for problem in update.problems:
        yield {**common, "event": "problem", "kind": problem.kind, "reason": problem.reason, "index": problem.index}


def summary(subscription: Subscription) -> Iterator[str]:
    """Yield a summary of the stream at its end."""
    statuses, malformed = subscription.statuses(), subscription.counters.malformed
    for status in statuses:
        counters = status.counters
        odd = {
            "gaps": counters.gaps,
            "batches missing at first": counters.missed,
            "replayed": counters.replayed,
            "snapshots": counters.snapshots,
            "duplicates": counters.duplicates,
            "late": counters.late,
            "damaged": counters.damaged,
            "restarts": counters.restarts,
        }
        oddities = "".join(f", {name} {count}" for name, count in odd.items() if count)
        name = f"{status.topic or status.stream}"
        state = "" if status.state == State.FRESH else f"{_because(status.reason)}"
        yield f"{name}: {counters.batches} batches, {counters.events} events{oddities}; {status.state}{state}"
    if malformed:
        yield f"{malformed} messages were no batches"
    if not statuses:
        yield "nothing was received"


def report_lines(report: StreamReport, source: str) -> Iterator[str]:
    """Yield a conformance report for people."""
    facts, guess = report.facts, report.facts.guess
    batches = sum(stream.batches for stream in facts.streams.values())
    yield f"{source}: {batches:,} batches, {sum(facts.events.values()):,} events, {facts.payload_bytes:,} bytes of payload"
    written = [*_counted(guess.encodings), *_counted(guess.hashes, " hashes")]
    looks = "looks like" if report.guessed else "checked as"
    how = f" ({', '.join(written)})" if written else ""
    yield f"  {looks} {report.title}{how}"
    for stream in facts.streams.values():
        ranks = sorted(str(rank) for rank in stream.ranks if rank is not None)
        numbers = "no numbers" if stream.first is None else f"batches {stream.first} to {stream.last}"
        yield f"  stream {stream.topic!r}: {numbers}" + (f", rank {', '.join(ranks)}" if ranks else "")
    for group, kind in sorted(facts.groups.items()):
        sizes = ", ".join(map(str, sorted(facts.block_sizes.get(group, [])))) or "unknown"
        name = "no group named" if group == "none" else f"group {group}"
        yield f"  {name}: {kind or 'kind unknown'}, blocks of {sizes} tokens"
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in sorted(facts.tiers.items()))
    media = f" (written {', '.join(sorted(guess.media))})" if guess.media else ""
    yield f"  blocks stored {facts.stored_blocks:,}: {tiers or 'none'}{media}; removed {facts.removed_blocks:,}"
    yield f"  blocks held at the end {facts.held:,}"
    if not report.capacity_checked:
        yield "  capacity wasn't checked: give the number of blocks on each device with --blocks"
    for severity, title in (
        (Severity.PROBLEM, "Problems"),
        (Severity.NORMAL, f"Normal for {report.title}, and to be expected by every consumer"),
        (Severity.NOTE, "Notes"),
    ):
        yield from finding_lines(
            title, [finding for finding in report.findings if finding.severity == severity], several=False
        )
    if report.cautions:
        yield f"\nWhat no check of a stream can see, with {report.title}"
        yield from (f"  - {caution}" for caution in report.cautions)
    problems = sum(finding.severity == Severity.PROBLEM for finding in report.findings)
    yield "\nNothing is wrong." if report.clean else f"\n{problems} {'problem' if problems == 1 else 'problems'} found."


def report_value(report: StreamReport, source: str) -> dict[str, Any]:
    """Return a conformance report for programs."""
    value: dict[str, Any] = msgspec.to_builtins(report)
    return {"source": source, "clean": report.clean, **value}


def finding_lines(title: str, findings: Sequence[Finding], several: bool) -> Iterator[str]:
    """Yield findings under a title, with where they were made if there are several places; nothing if there are none."""
    if findings:
        yield f"\n{title}"
    for finding in findings:
        where = f" at {finding.where}" if several and finding.where else ""
        yield from wrap(f"{finding.code}{where}: {finding.seen}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        examples = "; ".join(example[:160] for example in finding.examples)
        for name, text in (("means", finding.means), ("fix", finding.fix), ("for example", examples)):
            if text:
                yield from wrap(f"{name}: {text}", WIDTH, initial_indent="      ", subsequent_indent="        ")


def _event(event: Event) -> str:
    if isinstance(event, Stored):
        count = len(event.hashes)
        tokens = "" if event.tokens is not None else ", no tokens"
        size = f" of {event.block_size}" if event.block_size else ""
        parent = "" if event.parent is None else f" after {short_text(event.parent)}"
        more = "".join(
            f"  {name} {value}"
            for name, value in (("lora", event.lora_name), ("salt", event.salt), ("kind", event.kind))
            if value is not None
        )
        return f"stored   {_place(event)}  {_blocks(count)}{size}{tokens}: {_keys(event.hashes)}{parent}{more}"
    if isinstance(event, Removed):
        reason = f"  {event.reason}" if event.reason else ""
        return f"removed  {_place(event)}  {_blocks(len(event.hashes))}: {_keys(event.hashes)}{reason}"
    return f"cleared  {'everything' if event.tier is None else event.tier.name}"


def _fields(event: Event) -> dict[str, Any]:
    if isinstance(event, Stored | Removed):
        fields: dict[str, Any] = msgspec.to_builtins(
            msgspec.structs.replace(event, tokens=None) if isinstance(event, Stored) else event
        )
        fields["hashes"] = [_value(key) for key in event.hashes]
        if isinstance(event, Stored):
            fields["parent"] = None if event.parent is None else _value(event.parent)
            fields["tokens"] = None if event.tokens is None else list(event.tokens)
    else:
        fields = {"tier": event.tier}
    fields["tier"] = None if event.tier is None else event.tier.name
    return fields


def _place(event: Stored | Removed) -> str:
    return event.tier.name if event.group is None else f"{event.tier.name} group {event.group}"


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


def _keys(keys: Sequence[Key]) -> str:
    shown = " ".join(short_text(key) for key in keys[:FEW])
    return shown if len(keys) <= FEW else f"{shown} … {short_text(keys[-1])}"


def _value(key: Key) -> int | str:
    return key.hex() if isinstance(key, bytes) else key


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _counted(counts: dict[str, int], noun: str = "s") -> list[str]:
    return [f"{count:,} {name}{noun}" for name, count in sorted(counts.items()) if count]
