"""What is wrong with a stream, whatever the prompt: nobody there, nothing sent, not readable, not whole, cleared too often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvyard.clock import SECOND
from kvyard.events.findings import Severity
from kvyard.events.norms import judge
from kvyard.events.transport import State
from kvyard.server.doctor.case import Case
from kvyard.server.doctor.finding import Expected, Finding

STORM = 6.0
"""Clears a minute that no operator makes by hand."""


def silence(case: Case) -> Iterator[Finding]:
    counters = case.subscription.counters
    seconds = (case.ended - case.began) / SECOND
    if case.topics:
        names = ", ".join(repr(name) for name in sorted(case.topics)[:4])
        yield Finding(
            code="topic",
            where=case.name,
            broken=True,
            seen=f"{case.topics.total()} messages came, none with a topic that begins with {case.topic!r}, but with {names}.",
            means="Whoever subscribes with this topic hears nothing.",
            fix="Subscribe to one of those topics, or to all by an empty one.",
        )
    elif not case.live:
        yield Finding(
            code="no-events",
            where=case.name,
            broken=True,
            seen="The recording holds no message.",
            means="Nothing was published while it was made.",
            fix="Record while requests are running.",
        )
    elif not counters.connections:
        yield Finding(
            code="unreachable",
            where=case.name,
            broken=True,
            seen=f"No publisher could be connected to in {seconds:.1f} s.",
            means="Nobody publishes there, or something in between is closed.",
            fix="Compare the address with the engine's --kv-events-config (endpoint), and look at ports and firewalls. Rank "
            "r of a data-parallel engine is r ports further.",
        )
    else:
        yield Finding(
            code="no-events",
            where=case.name,
            broken=True,
            seen=f"The publisher is there, but no message came in {seconds:.1f} s.",
            means="Either nothing was computed meanwhile, or events or prefix caching are off.",
            fix="Send a request while watching. Then see that enable_kv_cache_events is true in --kv-events-config, and that "
            "prefix caching is on.",
        )
    yield from _replay(case)


def encoding(case: Case, expected: Expected) -> Iterator[Finding]:
    report = judge(case.checker.facts())
    for found in report.findings:
        if found.code in ("message", "unknown-kind") or (found.code.startswith("bad-") and found.code != "bad-batch"):
            nothing = not report.facts.stored_blocks
            yield Finding(
                code="encoding",
                where=case.name,
                broken=found.severity == Severity.PROBLEM,
                seen=f"{found.what.rstrip('.')} ({found.count})." + _example(found.examples),
                means="This isn't an encoding of KV events that is known."
                if nothing
                else found.loss or "They are lost.",
                fix="See that the endpoint is the engine's KV event socket and no other, and that the engine's version is "
                "known to whoever reads it. `kvyard events check` says more.",
            )
        elif found.code in ("orphan-parent", "repeated-remove", "ranks") and found.severity == Severity.PROBLEM:
            yield Finding(
                code=found.code,
                where=case.name,
                broken=found.code == "ranks",
                seen=f"{found.what}{_example(found.examples)}",
                means=found.loss,
                fix="`kvyard events check` says more about such streams.",
            )
    for reason in case.refused():
        yield Finding(
            code="refused",
            where=case.name,
            broken=False,
            seen=f"Some announced blocks can't be named: {reason}.",
            means="They belong to prompts with keys that the wire doesn't explain; they match nobody.",
            fix="Update the engine, or leave such prompts out of routing by cache.",
        )


def sequence(case: Case, expected: Expected) -> Iterator[Finding]:
    facts = case.checker.facts()
    gaps = sum(stream.gap_count for stream in facts.streams.values())
    missing = sum(stream.missing for stream in facts.streams.values())
    statuses = case.statuses()
    stale = [status for status in statuses if status.state == State.STALE]
    joined = [stream for stream in facts.streams.values() if stream.first]
    whole = not stale and bool(statuses)
    if gaps:
        yield Finding(
            code="gap",
            where=case.name,
            broken=not whole,
            seen=f"{missing} batches were missing, in {gaps} gaps" + (", and were fetched again." if whole else "."),
            means="The subscriber couldn't keep up, or the network lost them."
            if whole
            else "What they stored or removed is unknown, so nothing this stream says can be trusted any more.",
            fix="A larger high-water mark (hwm) at both ends loses less."
            if whole
            else "Give the engine a replay_endpoint, and tell its readers of it. Raise hwm at both ends.",
        )
    if joined and case.replay is None:
        found = any(match.tokens for match in case.matches())
        yield Finding(
            code="stale",
            where=case.name,
            broken=not found,
            seen=f"The stream was joined at batch {joined[0].first}, and there is no replay endpoint to ask for those before.",
            means="What the engine cached before that is unknown: a prompt from then can't match.",
            fix="Start the index before the engine, or give the engine a replay_endpoint and name it with --replay.",
        )
    elif stale and not gaps and not joined:
        yield Finding(
            code="stale",
            where=case.name,
            broken=True,
            seen=f"The stream is stale: {stale[0].reason}.",
            means="Nothing it says earns credit until it is whole again.",
            fix="Give the engine a replay_endpoint and name it with --replay.",
        )
    restarts = sum(stream.restarts for stream in facts.streams.values())
    if restarts:
        yield Finding(
            code="restart",
            where=case.name,
            broken=False,
            seen=f"The sequence went back {restarts} times.",
            means="The engine was restarted and its cache is empty; or two engines publish at one address, and then "
            "neither can be followed.",
            fix="Give every engine an address of its own.",
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
        yield Finding(
            code="replay-silent",
            where=case.name,
            broken=True,
            seen=f"{asked} not answered.",
            means="What is missed can't be fetched, and what was before can't be learnt.",
            fix="Compare it with replay_endpoint in the engine's --kv-events-config; it is another port than the endpoint.",
        )


def clears(case: Case, expected: Expected) -> Iterator[Finding]:
    count = len(case.clears)
    minutes = max((case.ended - case.began) / SECOND / 60, 1 / 60)
    if count >= 3 and count / minutes > STORM:
        yield Finding(
            code="clear-storm",
            where=case.name,
            broken=True,
            seen=f"The cache was cleared {count} times in {minutes * 60:.0f} s, {case.cleared_blocks} blocks in all.",
            means="What was cached is gone before it can be used again.",
            fix="Find who resets the prefix cache: weight updates, sleep mode, a health check that calls reset_prefix_cache, "
            "or a publisher that announces everything anew because its queue overflows.",
        )


def _example(examples: Sequence[str]) -> str:
    return f" For example: {examples[0][:160]}." if examples else ""
