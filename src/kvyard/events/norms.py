"""Norms: what the facts about a stream mean, in plain words.

The same fact is normal from one engine and a fault from another. Each rule here says which it is, and what a consumer that
doesn't cope with it would lose. What engines do, and where that is known from, is in ``docs/event-streams.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvyard.errors import KvyardError
from kvyard.events.clues import ENGINES, NAMES
from kvyard.events.facts import Facts
from kvyard.events.findings import CAUTIONS, Finding, Report, Severity, counted, tally_findings

_PROBLEM, _NORMAL, _NOTE = Severity


def judge(facts: Facts, engine: str = "auto") -> Report:
    """What ``facts`` mean, for the engine given or the one they look like. Raises ``KvyardError`` for an unknown engine."""
    if engine not in ("auto", *ENGINES):
        raise KvyardError(f"unknown engine {engine!r}: choose one of auto, {', '.join(ENGINES)}")
    guessed = engine == "auto"
    if guessed:
        engine = facts.clues.engine()
    findings = [finding for rule in RULES for finding in rule(facts, engine)]
    order = list(Severity)
    findings.sort(key=lambda finding: order.index(finding.severity))
    return Report(engine=engine, guessed=guessed, findings=findings, cautions=CAUTIONS.get(engine, []), facts=facts)


# -- the sequence ---------------------------------------------------------------------------------------------------


def _sequence(facts: Facts, engine: str) -> Iterator[Finding]:
    streams = list(facts.streams.values())
    missing, gaps = sum(stream.missing for stream in streams), sum(stream.gap_count for stream in streams)
    if gaps:
        yield Finding(
            code="gap",
            severity=_PROBLEM,
            count=missing,
            what=f"{counted(missing, 'batch is', 'batches are')} missing, in {counted(gaps, 'gap')}.",
            loss="Blocks stored in them stay unknown; blocks removed in them are believed in until the next clear. "
            "Without replay or a snapshot the stream can't be trusted from the first gap on.",
            examples=[f"{first} to {last}" for stream in streams for first, last in stream.gaps][:5],
        )
    if duplicates := sum(stream.duplicates for stream in streams):
        yield Finding(
            code="duplicate",
            severity=_PROBLEM,
            count=duplicates,
            what=f"{counted(duplicates, 'batch was', 'batches were')} sent more than once.",
            loss="A consumer that counts copies and doesn't drop repeated numbers never gets back to zero.",
        )
    if late := sum(stream.late for stream in streams):
        yield Finding(
            code="reordered",
            severity=_PROBLEM,
            count=late,
            what=f"{counted(late, 'batch came', 'batches came')} after one that follows.",
            loss="A consumer that applies them as they come brings back what was removed meanwhile.",
        )
    if restarts := sum(stream.restarts for stream in streams):
        yield Finding(
            code="restart",
            severity=_PROBLEM,
            count=restarts,
            what=f"The sequence went back {counted(restarts, 'time')}: the publisher was restarted, or there are two of them.",
            loss="A consumer that doesn't clear then believes in everything the old one held.",
        )
    joined = [stream for stream in streams if stream.first]
    if joined:
        yield Finding(
            code="joined-late",
            severity=_NOTE,
            count=len(joined),
            what=f"The recording begins at batch {joined[0].first}: parents and removals of what came before are unknown.",
            loss="All blocks from before. Fetch them by replay or snapshot.",
        )
    if backwards := sum(stream.backwards for stream in streams):
        yield Finding(
            code="time", severity=_NOTE, count=backwards, what="Some batches are stamped earlier than the one before."
        )
    mixed = [stream for stream in streams if len(stream.ranks) > 1]
    if mixed and engine != "trtllm":
        yield Finding(
            code="ranks",
            severity=_PROBLEM,
            count=len(mixed),
            what=f"One topic carries the batches of ranks {', '.join(map(str, sorted(mixed[0].ranks, key=str)))}.",
            loss="Each rank counts its own batches: a consumer that keeps one sequence per topic sees gaps everywhere.",
        )


# -- what can't be read ---------------------------------------------------------------------------------------------

_KINDS = {
    "payload": ("Payloads that can't be read at all.", "Everything in them."),
    "malformed": (
        "Events whose fields can't be read.",
        "Those events; a decoder that is strict loses the whole batch.",
    ),
    "hash": ("Events with something that can't be a hash.", "Those events."),
    "group": ("Events of a group that can't be.", "Those events."),
    "medium": (
        "Events with a word for the medium that nobody knows.",
        "Those copies, or they are credited to the wrong tier.",
    ),
    "batch": ("Batches with a time stamp or rank that is none.", ""),
    "gap": (
        "Event ids are missing: the engine's buffer overflowed.",
        "Whatever was announced in them, removals included.",
    ),
    "restart": (
        "Event ids start again: the engine was restarted.",
        "A consumer that doesn't clear believes in what is gone.",
    ),
}


def _readability(facts: Facts, engine: str) -> Iterator[Finding]:
    if facts.malformed:
        count = sum(facts.malformed.values())
        yield Finding(
            code="message",
            severity=_PROBLEM,
            count=count,
            what=f"{counted(count, 'message is', 'messages are')} not [topic, sequence, payload].",
            loss="They can't be put in order, so they are lost.",
            examples=list(facts.malformed)[:5],
        )
    for kind, count in facts.problems.items():
        if kind != "unknown":
            what, loss = _KINDS.get(kind, (f"Problems of kind {kind}.", ""))
            severity = _NOTE if kind == "batch" else _PROBLEM
            examples = [facts.problem_examples[kind]]
            yield Finding(code=f"bad-{kind}", severity=severity, count=count, what=what, loss=loss, examples=examples)
    if facts.unknown_kinds:
        names = ", ".join(sorted(facts.unknown_kinds))
        yield Finding(
            code="unknown-kind",
            severity=_PROBLEM,
            count=sum(facts.unknown_kinds.values()),
            what=f"Events of unknown kinds: {names}.",
            loss="Whatever they announce. Some consumers throw away the whole batch with them.",
        )
    written = [name for name, count in facts.clues.encodings.items() if count]
    if len(written) > 1:
        yield Finding(
            code="encodings",
            severity=_NOTE,
            count=len(written),
            what=f"Events are written in more than one way: {', '.join(sorted(written))}.",
            loss="A consumer that expects one of them loses the rest.",
        )
    if "array" in written and "map" not in written and engine == "vllm":
        yield Finding(
            code="old-encoding",
            severity=_NOTE,
            count=facts.clues.encodings["array"],
            what="Events are arrays, as in vLLM up to 0.23; from 0.24 on they are maps.",
            loss="Nothing now. After an update, a consumer of arrays only loses everything.",
        )


# -- what is announced ----------------------------------------------------------------------------------------------


def _announcements(facts: Facts, engine: str) -> Iterator[Finding]:
    name = NAMES[engine]
    repeats = facts.repeated_stores
    if repeats.count:
        normal = engine in ("vllm", "sglang")
        why = {
            "vllm": "vLLM announces every copy: a block cached twice is stored twice and gone after two removals.",
            "sglang": "SGLang's hashes leave out adapters and extra keys, so one hash can be stored for several of them.",
        }.get(engine, "Each copy should be announced once.")
        yield Finding(
            code="repeated-store",
            severity=_NORMAL if normal else _PROBLEM,
            count=repeats.count,
            what=f"{counted(repeats.count, 'block was', 'blocks were')} stored where a copy was announced already. {why}",
            loss=f"Count copies per hash, group and medium. A consumer that keeps a set would miss {facts.forgotten} of "
            f"the {facts.held} blocks held at the end.",
            examples=repeats.examples,
        )
    yield from tally_findings(
        "orphan-parent",
        facts.orphans,
        "stores name a parent that was never announced",
        f"A consumer that hangs stores on their parent drops these blocks ({facts.orphan_blocks} where parents were "
        "missing, for whatever reason) and all that follow them.",
        normal_below=engine in ("vllm", "sglang", "trtllm"),
        below="lower tiers are announced in chunks, or the end before the start",
        normal_partial=True,
        normal_finer=engine == "vllm",
    )
    yield from tally_findings(
        "removed-parent",
        facts.orphans_of_removed,
        "stores name a parent that is gone",
        "A consumer that hangs stores on their parent drops these blocks and all that follow them.",
        normal_below=True,
        below="tiers evict by themselves",
        normal_partial=True,
        normal_all="eviction doesn't follow the chain" if engine in ("vllm", "sglang") else "",
        otherwise=_NOTE,
    )
    yield from tally_findings(
        "unknown-remove",
        facts.unknown_removes,
        "removals of blocks that were never announced",
        "Nothing, if they are ignored. A consumer that counts without looking goes negative.",
        normal_below=engine == "vllm",
        below=f"{name}'s offloading forgets what it announced",
        normal_partial=False,
        normal_all="the announcement of a partial block is left out, its removal isn't" if facts.partial_blocks else "",
    )
    yield from tally_findings(
        "repeated-remove",
        facts.repeated_removes,
        "removals of blocks that were gone already",
        "Nothing, if they are ignored. A consumer that counts without looking goes negative.",
        normal_below=engine == "vllm",
        below=f"{name}'s offloading forgets what it announced",
        normal_partial=False,
    )


def _shapes(facts: Facts, engine: str) -> Iterator[Finding]:
    yield from tally_findings(
        "empty-store",
        facts.empty_stores,
        "stores name no block, though some have tokens",
        "Nothing. A consumer that pairs tokens with hashes must not invent blocks from them.",
        normal_below=False,
        below="",
        normal_partial=engine == "vllm",
        normal_all="vLLM sends them when all blocks of a stretch are masked" if engine == "vllm" else "",
    )
    yield from tally_findings(
        "misaligned",
        facts.misaligned,
        "stores whose tokens don't fill their blocks",
        "Nobody can tell which tokens belong to which hash: a consumer that computes its own hashes can't use these.",
        normal_below=False,
        below="",
        normal_partial=True,
    )
    hash_only = facts.hash_only
    yield from tally_findings(
        "hash-only",
        hash_only,
        "stores without tokens",
        "A consumer that computes its own hashes can use them only where it has seen the same hash with tokens before.",
        normal_below=True,
        below="offloaded copies are announced by hash alone",
        normal_partial=False,
        normal_all="such streams are made from hashes" if engine in ("kvyard", "trtllm") else "",
        otherwise=_NOTE,
    )
    if facts.partial_blocks:
        yield Finding(
            code="partial-blocks",
            severity=_NORMAL if engine == "trtllm" else _PROBLEM,
            count=facts.partial_blocks,
            what="Blocks that aren't full are announced; nobody else can use them, and they were left out.",
        )
    for group, sizes in facts.block_sizes.items():
        if len(sizes) > 1:
            yield Finding(
                code="block-size",
                severity=_NORMAL if engine == "vllm" else _NOTE,
                count=len(sizes),
                what=f"Group {group} has blocks of {', '.join(map(str, sorted(sizes)))} tokens.",
                loss="A consumer that takes one size for granted cuts prompts in the wrong places.",
            )
    removals = facts.events["removed"]
    if removals and engine in ("vllm", "unknown") and facts.single_removals == removals > 20:
        yield Finding(
            code="single-removals",
            severity=_NORMAL,
            count=removals,
            what="Every removal is an event of its own, as vLLM does it.",
        )


RULES: list[Callable[[Facts, str], Iterator[Finding]]] = [_sequence, _readability, _announcements, _shapes]
