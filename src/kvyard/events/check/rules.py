"""Stream rules: findings from the facts about a stream.

The same fact is normal from one engine and a fault from another: each format has ``StreamRules``. ``texts.toml`` has the
sentences, ``docs/how-to/check-an-event-stream.md`` each engine's rules and their sources.
"""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from kvyard.events.check.checker import Facts, Occurrences
from kvyard.events.tier import Tier
from kvyard.events.wire import WIRES, StreamRules
from kvyard.events.wire.format import UNKNOWN


class Severity(StrEnum):
    PROBLEM = "problem"
    """A consumer loses something, or has to do something it may not do."""
    NORMAL = "normal"
    """This engine always does so; a consumer has to expect it."""
    NOTE = "note"
    """Good to know."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An observation, how severe it is for this engine, and its consequence."""

    code: str
    severity: Severity
    seen: str
    """Observation."""
    means: str = ""
    """Consequence: what a consumer that doesn't cope with it loses, or why a prompt can't match."""
    fix: str = ""
    where: str = ""
    """The endpoint, URL or file, if several are looked at."""
    count: int = 1
    examples: list[str] = []

    @property
    def broken(self) -> bool:
        return self.severity == Severity.PROBLEM


class FindingTexts:
    """The texts of findings, from a TOML file: a table per finding with ``seen``, ``means`` and ``fix``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _texts(self) -> dict[str, dict[str, str]]:
        return tomllib.loads(self._path.read_text(encoding="utf-8"))

    def finding(
        self,
        name: str,
        severity: Severity,
        count: int = 1,
        *,
        where: str = "",
        examples: Sequence[str] = (),
        **values: Any,
    ) -> Finding:
        """Return the finding of that table; its code is what comes before a dot. ``values`` and ``count`` are put into its
        texts.
        """
        texts = {part: text.format(count=count, **values) for part, text in self._texts[name].items()}
        code = name.partition(".")[0]
        return Finding(code=code, severity=severity, where=where, count=count, examples=[*examples], **texts)


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a stream."""

    engine: str
    """A name in ``WIRES``, or ``unknown``."""
    title: str
    """The engine's name, for people."""
    guessed: bool
    findings: list[Finding]
    cautions: list[str]
    """Properties that no check of the stream can see."""
    facts: Facts
    capacity_checked: bool
    """False if the number of blocks on the device is unknown, so that leaks can't be seen."""

    @property
    def clean(self) -> bool:
        """Return true if no finding is a fault."""
        return not any(finding.broken for finding in self.findings)


MANY = 16
"""Blocks that must come back before a tier is reported as one that never removes."""
_PROBLEM, _NORMAL, _NOTE = Severity
_said = FindingTexts(Path(__file__).with_name("texts.toml")).finding
_UNKNOWN_ENGINE = "an engine we can't tell", StreamRules(single_removals=True)


class _JudgedStream(msgspec.Struct, frozen=True):
    """Input of the rules."""

    facts: Facts
    title: str
    normal: StreamRules
    recovered: bool
    """True if missing batches were fetched again."""
    device_blocks: int | None
    """Of each rank."""


def judge(
    facts: Facts, engine: str = "auto", *, recovered: bool = False, device_blocks: int | None = None
) -> StreamReport:
    """Judge ``facts`` for the engine given or the one they resemble. Raises ``KvyardError`` for an unknown engine.

    ``recovered`` means that missing batches were fetched again. ``device_blocks`` is the number of blocks on each rank's
    device.
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
        engine=engine,
        title=title,
        guessed=guessed,
        findings=findings,
        cautions=list(normal.cautions),
        facts=facts,
        capacity_checked=device_blocks is not None or bool(facts.capacities),
    )


def _sequence(stream: _JudgedStream) -> Iterator[Finding]:
    streams = list(stream.facts.streams.values())
    missing, gaps = (
        sum(stream_facts.missing for stream_facts in streams),
        sum(stream_facts.gap_count for stream_facts in streams),
    )
    if gaps:
        yield _said(
            "gap.fetched" if stream.recovered else "gap.lost",
            _NOTE if stream.recovered else _PROBLEM,
            missing,
            missing=counted(missing, "batch is", "batches are"),
            gaps=counted(gaps, "gap"),
            examples=[f"{first} to {last}" for stream_facts in streams for first, last in stream_facts.gaps][:5],
        )
    if duplicates := sum(stream_facts.duplicates for stream_facts in streams):
        yield _said("duplicate", _PROBLEM, duplicates, batches=counted(duplicates, "batch was", "batches were"))
    if late := sum(stream_facts.late for stream_facts in streams):
        yield _said("reordered", _PROBLEM, late, batches=counted(late, "batch came", "batches came"))
    if restarts := sum(stream_facts.restarts for stream_facts in streams):
        yield _said("restart", _PROBLEM, restarts, times=counted(restarts, "time"))
    if joined := [stream_facts for stream_facts in streams if stream_facts.first]:
        yield _said("joined-late", _NOTE, len(joined), first=joined[0].first)
    if backwards := sum(stream_facts.backwards for stream_facts in streams):
        yield _said("time", _NOTE, backwards)
    mixed = [stream_facts for stream_facts in streams if len(stream_facts.ranks) > 1]
    if mixed and not stream.normal.ranks_share_a_topic:
        yield _said("ranks", _PROBLEM, len(mixed), ranks=", ".join(map(str, sorted(mixed[0].ranks, key=str))))


def _readability(stream: _JudgedStream) -> Iterator[Finding]:
    facts = stream.facts
    if count := facts.malformed.total():
        messages = counted(count, "message is", "messages are")
        yield _said("message", _PROBLEM, count, messages=messages, examples=list(facts.malformed)[:5])
    for kind, count in facts.problems.items():
        if kind != "unknown":
            severity = _NOTE if kind == "batch" else _PROBLEM
            yield _said(f"bad-{kind}", severity, count, examples=[facts.problem_examples[kind]])
    if kinds := facts.unknown_kinds:
        yield _said("unknown-kind", _PROBLEM, sum(kinds.values()), names=", ".join(sorted(kinds)))
    written = sorted(name for name, count in facts.guess.encodings.items() if count)
    if len(written) > 1:
        yield _said("encodings", _NOTE, len(written), names=", ".join(written))
    if "array" in written and "map" not in written and stream.normal.arrays_are_old:
        yield _said("old-encoding", _NOTE, facts.guess.encodings["array"])


def _announcements(stream: _JudgedStream) -> Iterator[Finding]:
    facts, normal = stream.facts, stream.normal
    repeats = facts.repeated_stores
    if repeats.count:
        yield _said(
            "repeated-store",
            _NORMAL if normal.repeated_stores else _PROBLEM,
            repeats.count,
            blocks=counted(repeats.count, "block was", "blocks were"),
            why=normal.repeated_stores or "Each copy should be announced once.",
            forgotten=facts.forgotten,
            held=facts.held,
            examples=repeats.examples,
        )
    chunks = "lower tiers are announced in chunks, or the end before the start"
    yield from _explained(
        "orphan-parent",
        facts.orphans,
        below=chunks if normal.lower_tiers_in_chunks else "",
        partial=True,
        finer=normal.finer_entries,
        blocks=facts.orphan_blocks,
    )
    yield from _explained(
        "removed-parent",
        facts.orphans_of_removed,
        below="tiers evict by themselves",
        partial=True,
        always="eviction doesn't follow the chain" if normal.eviction_leaves_children else "",
        otherwise=_NOTE,
    )
    forgets = f"{stream.title}'s offloading forgets what it announced" if normal.offload_forgets else ""
    left_out = "the announcement of a partial block is left out, its removal isn't" if facts.partial_blocks else ""
    yield from _explained("unknown-remove", facts.unknown_removes, below=forgets, always=left_out)
    yield from _explained("repeated-remove", facts.repeated_removes, below=forgets)


def _shapes(stream: _JudgedStream) -> Iterator[Finding]:
    facts, normal = stream.facts, stream.normal
    empty = normal.empty_stores
    yield from _explained("empty-store", facts.empty_stores, partial=bool(empty), always=empty)
    yield from _explained("empty-remove", facts.empty_removes)
    yield from _explained("misaligned", facts.misaligned, partial=True)
    yield from _explained(
        "hash-only",
        facts.hash_only,
        below="offloaded copies are announced by hash alone",
        always="such streams are made from hashes" if normal.made_from_hashes else "",
        otherwise=_NOTE,
    )
    if facts.partial_blocks:
        yield _said("partial-blocks", _NORMAL if normal.partial_blocks else _PROBLEM, facts.partial_blocks)
    for group, sizes in facts.block_sizes.items():
        if len(sizes) > 1:
            severity, named = _NORMAL if normal.sizes_vary else _NOTE, ", ".join(map(str, sorted(sizes)))
            yield _said("block-size", severity, len(sizes), group=group, sizes=named)
    removals = facts.events["removed"]
    if normal.single_removals and facts.single_removals == removals > 20:
        yield _said("single-removals", _NORMAL, removals)


def _capacity(stream: _JudgedStream) -> Iterator[Finding]:
    """A holder can't have more blocks than its device, unless removals got lost or were never sent."""
    known, blocks = stream.facts.capacities, stream.device_blocks
    for stream_facts in stream.facts.streams.values():
        peaks = sorted(stream_facts.device_peaks.items())
        over = [f"group {group}: {peak} of {known[group]}" for group, peak in peaks if peak > known.get(group, peak)]
        if blocks is not None and stream_facts.device_peak > blocks:
            over.append(f"{stream_facts.device_peak} of {blocks}")
        if over:
            severity = _NORMAL if stream.normal.removals_incomplete else _PROBLEM
            yield _said("over-capacity", severity, over=", ".join(over))


def _removals(stream: _JudgedStream) -> Iterator[Finding]:
    """A tier whose blocks are announced again and again, and never taken back, evicts without an event."""
    facts = stream.facts
    for tier, blocks in facts.recurring.items():
        if not facts.removed_tiers[tier] and blocks >= MANY and 4 * blocks >= facts.held_tiers[tier]:
            severity = _NORMAL if stream.normal.removals_incomplete else _PROBLEM
            yield _said("never-removes", severity, blocks, tier=Tier[tier].label, held=facts.held_tiers[tier])


def _explained(
    name: str,
    tally: Occurrences,
    *,
    below: str = "",
    partial: bool = False,
    finer: bool = False,
    always: str = "",
    otherwise: Severity = _PROBLEM,
    **values: Any,
) -> Iterator[Finding]:
    """Yield findings about ``tally``: what is unexplained, and what is normal and why.

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
        severity, why = (_NORMAL, f": {always}") if always else (otherwise, "")
        yield _said(name, severity, wrong, why=why, examples=tally.examples, **values)
    for count, why in explanations:
        if count:
            yield _said(name, _NORMAL, count, why=why, **values)
    if tally.excused:
        yield _said(name, _NOTE, tally.excused, why=", after something was missed: to be expected", **values)


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return ``count`` and its noun."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


RULES: list[Callable[[_JudgedStream], Iterator[Finding]]] = [
    _sequence,
    _readability,
    _announcements,
    _shapes,
    _capacity,
    _removals,
]
