"""Stream rules: what the facts about a stream mean, in plain words.

The same fact is normal from one engine and a fault from another: each format says in its ``StreamRules`` what is normal. Each
rule here says what a consumer that doesn't cope with a fact would lose. What engines do, and where that is known from, is in
``docs/event-streams.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvyard.events.check.facts import Facts, Occurrences
from kvyard.events.check.findings import Finding, Severity, StreamReport
from kvyard.events.wire import WIRES, StreamRules
from kvyard.events.wire.format import UNKNOWN

_PROBLEM, _NORMAL, _NOTE = Severity
_UNKNOWN_ENGINE = "an engine we can't tell", StreamRules(single_removals=True)


class _JudgedStream(msgspec.Struct, frozen=True):
    """What rules look at."""

    facts: Facts
    title: str
    normal: StreamRules
    recovered: bool
    """Whether what was missed was fetched again."""
    device_blocks: int | None
    """Of each rank."""


def judge(
    facts: Facts, engine: str = "auto", *, recovered: bool = False, device_blocks: int | None = None
) -> StreamReport:
    """What ``facts`` mean, for the engine given or the one they look like. Raises ``KvyardError`` for an unknown engine.

    ``recovered`` says that what was missed was fetched again. ``device_blocks`` is how many each rank's device has.
    """
    guessed = engine == "auto"
    if guessed:
        engine = facts.guess.engine()
    title, normal = _UNKNOWN_ENGINE if engine == UNKNOWN else (WIRES.get(engine).title, WIRES.get(engine).rules)
    stream = _JudgedStream(facts, title, normal, recovered, device_blocks)
    findings = [finding for rule in RULES for finding in rule(stream)]
    order = list(Severity)
    findings.sort(key=lambda finding: order.index(finding.severity))
    return StreamReport(
        engine=engine, title=title, guessed=guessed, findings=findings, cautions=list(normal.cautions), facts=facts
    )


# -- the sequence ---------------------------------------------------------------------------------------------------


def _sequence(stream: _JudgedStream) -> Iterator[Finding]:
    streams = list(stream.facts.streams.values())
    missing, gaps = sum(one.missing for one in streams), sum(one.gap_count for one in streams)
    if gaps:
        lost = f"{counted(missing, 'batch is', 'batches are')} missing, in {counted(gaps, 'gap')}"
        examples = [f"{first} to {last}" for one in streams for first, last in one.gaps][:5]
        if stream.recovered:
            yield Finding(
                code="gap",
                severity=_NOTE,
                count=missing,
                seen=f"{lost}, and were fetched again.",
                means="The subscriber couldn't keep up, or the network lost them.",
                fix="A larger high-water mark (hwm) at both ends loses less.",
                examples=examples,
            )
        else:
            yield Finding(
                code="gap",
                severity=_PROBLEM,
                count=missing,
                seen=f"{lost}.",
                means="Blocks stored in them stay unknown; blocks removed in them are believed in until the next clear. "
                "Without replay or a snapshot the stream can't be trusted from the first gap on.",
                fix="Give the engine a replay_endpoint, and tell its readers of it. Raise hwm at both ends.",
                examples=examples,
            )
    if duplicates := sum(one.duplicates for one in streams):
        yield Finding(
            code="duplicate",
            severity=_PROBLEM,
            count=duplicates,
            seen=f"{counted(duplicates, 'batch was', 'batches were')} sent more than once.",
            means="A consumer that counts copies and doesn't drop repeated numbers never gets back to zero.",
        )
    if late := sum(one.late for one in streams):
        yield Finding(
            code="reordered",
            severity=_PROBLEM,
            count=late,
            seen=f"{counted(late, 'batch came', 'batches came')} after one that follows.",
            means="A consumer that applies them as they come brings back what was removed meanwhile.",
        )
    if restarts := sum(one.restarts for one in streams):
        yield Finding(
            code="restart",
            severity=_PROBLEM,
            count=restarts,
            seen=f"The sequence went back {counted(restarts, 'time')}: the publisher was restarted, or there are two of them.",
            means="The engine's cache is empty then: a consumer that doesn't clear believes in everything the old one held. "
            "Where two engines publish at one address, neither can be followed.",
            fix="Give every engine an address of its own.",
        )
    joined = [one for one in streams if one.first]
    if joined:
        yield Finding(
            code="joined-late",
            severity=_NOTE,
            count=len(joined),
            seen=f"The recording begins at batch {joined[0].first}: parents and removals of what came before are unknown.",
            means="All blocks from before are unknown. Fetch them by replay or snapshot.",
        )
    if backwards := sum(one.backwards for one in streams):
        yield Finding(
            code="time", severity=_NOTE, count=backwards, seen="Some batches are stamped earlier than the one before."
        )
    mixed = [one for one in streams if len(one.ranks) > 1]
    if mixed and not stream.normal.ranks_share_a_topic:
        yield Finding(
            code="ranks",
            severity=_PROBLEM,
            count=len(mixed),
            seen=f"One topic carries the batches of ranks {', '.join(map(str, sorted(mixed[0].ranks, key=str)))}.",
            means="Each rank counts its own batches: a consumer that keeps one sequence per topic sees gaps everywhere.",
        )


# -- what can't be read ---------------------------------------------------------------------------------------------

_KINDS = {
    "payload": ("Payloads that can't be read at all.", "Everything in them is lost."),
    "malformed": (
        "Events whose fields can't be read.",
        "Those events are lost; a decoder that is strict loses the whole batch.",
    ),
    "hash": ("Events with something that can't be a hash.", "Those events are lost."),
    "group": ("Events of a group that can't be.", "Those events are lost."),
    "medium": (
        "Events with an unknown word for the medium.",
        "Those copies are lost, or credited to the wrong tier.",
    ),
    "batch": ("Batches with a time stamp or rank that is none.", ""),
    "gap": (
        "Event ids are missing: the engine's buffer overflowed.",
        "Whatever was announced in them is lost, removals included.",
    ),
    "restart": (
        "Event ids start again: the engine was restarted.",
        "A consumer that doesn't clear believes in what is gone.",
    ),
}


def _readability(stream: _JudgedStream) -> Iterator[Finding]:
    facts = stream.facts
    if facts.malformed:
        count = sum(facts.malformed.values())
        yield Finding(
            code="message",
            severity=_PROBLEM,
            count=count,
            seen=f"{counted(count, 'message is', 'messages are')} not [topic, sequence, payload].",
            means="They can't be put in order, so they are lost.",
            examples=list(facts.malformed)[:5],
        )
    for kind, count in facts.problems.items():
        if kind != "unknown":
            seen, means = _KINDS.get(kind, (f"Problems of kind {kind}.", ""))
            severity = _NOTE if kind == "batch" else _PROBLEM
            examples = [facts.problem_examples[kind]]
            yield Finding(code=f"bad-{kind}", severity=severity, count=count, seen=seen, means=means, examples=examples)
    if facts.unknown_kinds:
        names = ", ".join(sorted(facts.unknown_kinds))
        yield Finding(
            code="unknown-kind",
            severity=_PROBLEM,
            count=sum(facts.unknown_kinds.values()),
            seen=f"Events of unknown kinds: {names}.",
            means="Whatever they announce is lost. Some consumers throw away the whole batch with them.",
        )
    written = [name for name, count in facts.guess.encodings.items() if count]
    if len(written) > 1:
        yield Finding(
            code="encodings",
            severity=_NOTE,
            count=len(written),
            seen=f"Events are written in more than one way: {', '.join(sorted(written))}.",
            means="A consumer that expects one of them loses the rest.",
        )
    if "array" in written and "map" not in written and stream.normal.arrays_are_old:
        yield Finding(
            code="old-encoding",
            severity=_NOTE,
            count=facts.guess.encodings["array"],
            seen="Events are arrays, as in vLLM up to 0.23; from 0.24 on they are maps.",
            means="No harm now. After an update, a consumer of arrays only loses everything.",
        )


# -- what is announced ----------------------------------------------------------------------------------------------


def _announcements(stream: _JudgedStream) -> Iterator[Finding]:
    facts, normal = stream.facts, stream.normal
    repeats = facts.repeated_stores
    if repeats.count:
        why = normal.repeated_stores or "Each copy should be announced once."
        yield Finding(
            code="repeated-store",
            severity=_NORMAL if normal.repeated_stores else _PROBLEM,
            count=repeats.count,
            seen=f"{counted(repeats.count, 'block was', 'blocks were')} stored where a copy was announced already. {why}",
            means=f"Count copies per hash, group and medium. A consumer that keeps a set would miss {facts.forgotten} of "
            f"the {facts.held} blocks held at the end.",
            examples=repeats.examples,
        )
    yield from _explained(
        "orphan-parent",
        facts.orphans,
        "stores name a parent that was never announced",
        f"A consumer that hangs stores on their parent drops these blocks ({facts.orphan_blocks} where parents were "
        "missing, for whatever reason) and all that follow them.",
        below="lower tiers are announced in chunks, or the end before the start"
        if normal.lower_tiers_in_chunks
        else "",
        partial=True,
        finer=normal.finer_entries,
    )
    yield from _explained(
        "removed-parent",
        facts.orphans_of_removed,
        "stores name a parent that is gone",
        "A consumer that hangs stores on their parent drops these blocks and all that follow them.",
        below="tiers evict by themselves",
        partial=True,
        always="eviction doesn't follow the chain" if normal.eviction_leaves_children else "",
        otherwise=_NOTE,
    )
    yield from _explained(
        "unknown-remove",
        facts.unknown_removes,
        "removals of blocks that were never announced",
        "No harm if they are ignored. A consumer that counts without looking goes negative.",
        below=f"{stream.title}'s offloading forgets what it announced" if normal.offload_forgets else "",
        always="the announcement of a partial block is left out, its removal isn't" if facts.partial_blocks else "",
    )
    yield from _explained(
        "repeated-remove",
        facts.repeated_removes,
        "removals of blocks that were gone already",
        "No harm if they are ignored. A consumer that counts without looking goes negative.",
        below=f"{stream.title}'s offloading forgets what it announced" if normal.offload_forgets else "",
    )


def _shapes(stream: _JudgedStream) -> Iterator[Finding]:
    facts, normal = stream.facts, stream.normal
    yield from _explained(
        "empty-store",
        facts.empty_stores,
        "stores name no block, though some have tokens",
        "No harm. A consumer that pairs tokens with hashes must not invent blocks from them.",
        partial=bool(normal.empty_stores),
        always=normal.empty_stores,
    )
    yield from _explained(
        "empty-remove",
        facts.empty_removes,
        "removals name no block",
        "Something was taken back, and there is no saying what: consumers go on believing in blocks that are gone.",
    )
    yield from _explained(
        "misaligned",
        facts.misaligned,
        "stores whose tokens don't fill their blocks",
        "There is no telling which tokens belong to which hash: a consumer that computes its own hashes can't use these.",
        partial=True,
    )
    hash_only = facts.hash_only
    yield from _explained(
        "hash-only",
        hash_only,
        "stores without tokens",
        "A consumer that computes its own hashes can use them only where it has seen the same hash with tokens before.",
        below="offloaded copies are announced by hash alone",
        always="such streams are made from hashes" if normal.made_from_hashes else "",
        otherwise=_NOTE,
    )
    if facts.partial_blocks:
        yield Finding(
            code="partial-blocks",
            severity=_NORMAL if normal.partial_blocks else _PROBLEM,
            count=facts.partial_blocks,
            seen="Blocks that aren't full are announced; no other request can use them, and they were left out.",
        )
    for group, sizes in facts.block_sizes.items():
        if len(sizes) > 1:
            yield Finding(
                code="block-size",
                severity=_NORMAL if normal.sizes_vary else _NOTE,
                count=len(sizes),
                seen=f"Group {group} has blocks of {', '.join(map(str, sorted(sizes)))} tokens.",
                means="A consumer that takes one size for granted cuts prompts in the wrong places.",
            )
    removals = facts.events["removed"]
    if removals and normal.single_removals and facts.single_removals == removals > 20:
        yield Finding(
            code="single-removals",
            severity=_NORMAL,
            count=removals,
            seen="Every removal is an event of its own, as vLLM does it.",
        )


def _capacity(stream: _JudgedStream) -> Iterator[Finding]:
    """A holder can't have more blocks than its device, unless removals got lost or were never sent."""
    facts, blocks = stream.facts, stream.device_blocks
    for one in facts.streams.values():
        over = [
            f"group {group}: {peak} of {facts.capacities[group]}"
            for group, peak in sorted(one.device_peaks.items())
            if peak > facts.capacities.get(group, peak)
        ]
        if blocks is not None and one.device_peak > blocks:
            over.append(f"{one.device_peak} of {blocks}")
        if over:
            yield Finding(
                code="over-capacity",
                severity=_NORMAL if stream.normal.removals_incomplete else _PROBLEM,
                seen=f"More blocks are announced, and not taken back, than the device has: {', '.join(over)}.",
                means="Some were evicted without a removal. A consumer believes in all of them, and routes to what is gone.",
                fix="Clear the consumer's view of this engine now and then, until the engine is mended.",
            )


def _explained(
    code: str,
    tally: Occurrences,
    what: str,
    means: str,
    *,
    below: str = "",
    partial: bool = False,
    finer: bool = False,
    always: str = "",
    otherwise: Severity = _PROBLEM,
) -> Iterator[Finding]:
    """Findings about ``tally``: what is unexplained, and what is normal and why.

    ``below`` says why it is normal below the device, ``always`` why it is everywhere; ``partial`` whether it is in groups
    that don't keep every block, ``finer`` whether it is for entries of parts of a block.
    """
    explanations = [
        (tally.below if below else 0, f", below the device: {below}"),
        (tally.partial if partial else 0, ": their groups don't keep every block of a prefix"),
        (tally.finer if finer else 0, ": they are for the beginning of a block, at a grain that isn't announced"),
    ]
    wrong = tally.count - tally.excused - sum(count for count, _ in explanations)
    if wrong:
        yield Finding(
            code=code,
            severity=_NORMAL if always else otherwise,
            count=wrong,
            seen=f"{wrong} {what}{f': {always}' if always else ''}.",
            means=means,
            examples=tally.examples,
        )
    for count, why in explanations:
        if count:
            yield Finding(code=code, severity=_NORMAL, count=count, seen=f"{count} {what}{why}.", means=means)
    if tally.excused:
        seen = f"{tally.excused} {what}, after something was missed: to be expected."
        yield Finding(code=code, severity=_NOTE, count=tally.excused, seen=seen)


def counted(count: int, one: str, many: str = "") -> str:
    """``count`` and its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


RULES: list[Callable[[_JudgedStream], Iterator[Finding]]] = [
    _sequence,
    _readability,
    _announcements,
    _shapes,
    _capacity,
]
