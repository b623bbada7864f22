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
    counters = case.subscription.counters
    seconds = (case.ended - case.began) / SECOND
    if case.topics:
        names = ", ".join(repr(name) for name in sorted(case.topics)[:4])
        yield broken(
            "topic",
            case.name,
            f"{case.topics.total()} messages came, none with a topic that begins with {case.topic!r}, but with {names}.",
            "A subscriber with this topic hears nothing.",
            "Subscribe to one of those topics, or to all by an empty one.",
        )
    elif not case.live:
        yield broken(
            "no-events",
            case.name,
            "The recording holds no message.",
            "Nothing was published while it was made.",
            "Record while requests are running.",
        )
    elif not counters.connections:
        yield broken(
            "unreachable",
            case.name,
            f"No publisher could be connected to in {seconds:.1f} s.",
            "No publisher is there, or something in between is closed.",
            "Compare the address with the engine's --kv-events-config (endpoint), and look at ports and firewalls. Rank "
            "r of a data-parallel engine is r ports further.",
        )
    else:
        yield broken(
            "no-events",
            case.name,
            f"The publisher is there, but no message came in {seconds:.1f} s.",
            "Either nothing was computed meanwhile, or events or prefix caching are off.",
            "Send a request while watching. Then see that enable_kv_cache_events is true in --kv-events-config, and that "
            "prefix caching is on.",
        )
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
        yield note(
            "refused",
            case.name,
            f"Some announced blocks can't be named: {reason}.",
            "They belong to prompts with keys that the wire doesn't explain; they match no request.",
            "Update the engine, or leave such prompts out of routing by cache.",
        )


def trust(case: Case, expected: Expected) -> Iterator[Finding]:
    """Whether what came before, and what was missed, could be had."""
    streams = case.checker.facts().streams.values()
    joined = [one for one in streams if one.first]
    stale = [status for status in case.statuses() if status.state == State.STALE]
    if joined and case.replay is None:
        found = any(match.tokens for match in case.matches())
        yield (note if found else broken)(
            "stale",
            case.name,
            f"The stream was joined at batch {joined[0].first}, and there is no replay endpoint to ask for those before.",
            "What the engine cached before that is unknown: a prompt from then can't match.",
            "Start the index before the engine, or give the engine a replay_endpoint and name it with --replay.",
        )
    elif stale and not joined and not any(one.gap_count for one in streams):
        yield broken(
            "stale",
            case.name,
            f"The stream is stale: {stale[0].reason}.",
            "Nothing it says earns credit until it is whole again.",
            "Give the engine a replay_endpoint and name it with --replay.",
        )
    yield from _replay(case)


def _replay(case: Case) -> Iterator[Finding]:
    if case.replay is None or not case.live:
        return
    counters = [status.counters for status in case.statuses()]
    brought = sum(one.replayed + one.snapshots for one in counters)
    timeouts = sum(one.timeouts for one in counters)
    if case.replay_answers is False or (timeouts and not brought and not case.replay_answers):
        asked = f"{timeouts} requests to {case.replay} were" if timeouts else f"A request to {case.replay} was"
        yield broken(
            "replay-silent",
            case.name,
            f"{asked} not answered.",
            "What is missed can't be fetched, and what was before can't be learnt.",
            "Compare it with replay_endpoint in the engine's --kv-events-config; it is another port than the endpoint.",
        )


def clears(case: Case, expected: Expected) -> Iterator[Finding]:
    count = len(case.clears)
    minutes = max((case.ended - case.began) / SECOND / 60, 1 / 60)
    if count >= 3 and count / minutes > STORM:
        yield broken(
            "clear-storm",
            case.name,
            f"The cache was cleared {count} times in {minutes * 60:.0f} s, {case.cleared_blocks} blocks in all.",
            "What was cached is gone before it can be used again.",
            "Find who resets the prefix cache: weight updates, sleep mode, a health check that calls reset_prefix_cache, "
            "or a publisher that announces everything again because its queue overflows.",
        )
