"""What is wrong with a stream, whatever the prompt: no publisher, nothing sent, not readable, not whole,
cleared too often. What a stream by itself shows is judged by ``kvyard.events.check``."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvyard.clock import SECOND
from kvyard.events.check import Finding, Severity, judge
from kvyard.events.transport import State
from kvyard.server.doctor.case import Case
from kvyard.server.doctor.finding import Expected, broken, note

STORM = 6.0
"""Clears a minute that no operator makes by hand."""
MORE = "`kvyard events check` says more about such streams."
SHOWN = ("encoding", "gap", "ranks", "restart", "orphan-parent", "repeated-remove", "empty-remove", "over-capacity")
"""Findings about the stream that matter when a prompt doesn't match."""
MEANT = {"message": "encoding", "unknown-kind": "encoding", "bad-gap": "gap", "bad-restart": "restart"}
"""Where there is no need to tell them apart."""
HARMLESS = ("restart", "orphan-parent", "repeated-remove")
"""Those that kvyard's own index copes with."""


def silence(case: Case) -> Iterator[Finding]:
    seconds = (case.ended - case.began) / SECOND
    if case.topics:
        names = ", ".join(repr(name) for name in sorted(case.topics)[:4])
        yield broken("topic", case.name, messages=case.topics.total(), topic=case.topic, names=names)
    elif not case.live:
        yield broken("no-events.recording", case.name)
    elif not case.subscription.counters.connections:
        yield broken("unreachable", case.name, seconds=seconds)
    else:
        yield broken("no-events.stream", case.name, seconds=seconds)
    yield from _replay(case)


def stream(case: Case, expected: Expected) -> Iterator[Finding]:
    """What ``kvyard events check`` says, as far as it keeps prompts from matching."""
    statuses = case.statuses()
    whole = bool(statuses) and not any(status.state == State.STALE for status in statuses)
    report = judge(case.checker.facts(), recovered=whole)
    for found in report.findings:
        code = MEANT.get(found.code, "encoding" if found.code.startswith("bad-") else found.code)
        if code not in SHOWN or (not found.broken and code != "gap"):
            continue
        found = msgspec.structs.replace(found, code=code, where=case.name, fix=found.fix or MORE)
        if code == "encoding":
            means = "This isn't an encoding of KV events that is known."
            found = msgspec.structs.replace(
                found,
                means=found.means or "They are lost." if report.facts.stored_blocks else means,
                fix="See that the endpoint is the engine's KV event socket and no other, and that the engine's version is "
                "known to its readers. " + MORE,
            )
        elif code in HARMLESS:
            found = msgspec.structs.replace(found, severity=Severity.NOTE)
        yield found
    for reason in case.refused():
        yield note("refused", case.name, reason=reason)


def trust(case: Case, expected: Expected) -> Iterator[Finding]:
    """Whether what came before, and what was missed, could be had."""
    streams = case.checker.facts().streams.values()
    joined = [one for one in streams if one.first]
    stale = [status for status in case.statuses() if status.state == State.STALE]
    if joined and case.replay is None:
        found = any(match.tokens for match in case.matches())
        yield (note if found else broken)("stale.joined", case.name, first=joined[0].first)
    elif stale and not joined and not any(one.gap_count for one in streams):
        yield broken("stale.lost", case.name, reason=stale[0].reason)
    yield from _replay(case)


def _replay(case: Case) -> Iterator[Finding]:
    if case.replay is None or not case.live:
        return
    counters = [status.counters for status in case.statuses()]
    brought = sum(one.replayed + one.snapshots for one in counters)
    timeouts = sum(one.timeouts for one in counters)
    if case.replay_answers is False or (timeouts and not brought and not case.replay_answers):
        asked = f"{timeouts} requests to {case.replay} were" if timeouts else f"A request to {case.replay} was"
        yield broken("replay-silent", case.name, asked=asked)


def clears(case: Case, expected: Expected) -> Iterator[Finding]:
    count = len(case.clears)
    minutes = max((case.ended - case.began) / SECOND / 60, 1 / 60)
    if count >= 3 and count / minutes > STORM:
        yield broken("clear-storm", case.name, count=count, seconds=minutes * 60, blocks=case.cleared_blocks)
