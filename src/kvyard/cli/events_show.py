"""Events and reports about them, as text for people and as values for JSON. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import msgspec

from kvyard.events.check import Finding, Severity, StreamReport
from kvyard.events.transport.state import Origin, State, Update
from kvyard.events.transport.subscription import Subscription
from kvyard.events.types import Event, Removed, Stored
from kvyard.hashing import Key

WIDTH = 110
FEW = 4
"""Hashes shown of a long list."""


def lines(update: Update) -> Iterator[str]:
    """An update for people: a line per event, per problem, and for a change of state."""
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
    """An update for programs: an object per event, per problem, and for a change of state."""
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
    """What was seen, when it is over."""
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
        said = "".join(f", {name} {count}" for name, count in odd.items() if count)
        name = f"{status.topic or status.stream}"
        state = "" if status.state == State.FRESH else f"{_because(status.reason)}"
        yield f"{name}: {counters.batches} batches, {counters.events} events{said}; {status.state}{state}"
    if malformed:
        yield f"{malformed} messages were no batches"
    if not statuses:
        yield "nothing was heard"


def report_lines(report: StreamReport, source: str) -> Iterator[str]:
    """A conformance report for people."""
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
    for severity, title in (
        (Severity.PROBLEM, "Problems"),
        (Severity.NORMAL, f"Normal for {report.title}, and to be expected by every consumer"),
        (Severity.NOTE, "Notes"),
    ):
        yield from finding_lines(title, [one for one in report.findings if one.severity == severity], several=False)
    if report.cautions:
        yield f"\nWhat no check of a stream can see, with {report.title}"
        yield from (f"  - {caution}" for caution in report.cautions)
    problems = sum(finding.severity == Severity.PROBLEM for finding in report.findings)
    yield "\nNothing is wrong." if report.clean else f"\n{problems} {'problem' if problems == 1 else 'problems'} found."


def report_value(report: StreamReport, source: str) -> dict[str, Any]:
    """A conformance report for programs."""
    value: dict[str, Any] = msgspec.to_builtins(report)
    return {"source": source, "clean": report.clean, **value}


def finding_lines(title: str, findings: Sequence[Finding], several: bool) -> Iterator[str]:
    """Findings under a title, with where they were made if there are several places; nothing where there are none."""
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
        parent = "" if event.parent is None else f" after {_key(event.parent)}"
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
    shown = " ".join(_key(key) for key in keys[:FEW])
    return shown if len(keys) <= FEW else f"{shown} … {_key(keys[-1])}"


def _key(key: Key) -> str:
    return key.hex()[:16] if isinstance(key, bytes) else f"{key:016x}"


def _value(key: Key) -> int | str:
    return key.hex() if isinstance(key, bytes) else key


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _counted(counts: dict[str, int], noun: str = "s") -> list[str]:
    return [f"{count:,} {name}{noun}" for name, count in sorted(counts.items()) if count]
