"""Checking a stream: everything a consumer has to cope with, counted.

A ``Checker`` reads messages as they are on the wire and keeps the smallest model of a consumer that shows what is odd: a
count of copies per (group, tier, hash), and beside it the plain set that many consumers keep. It reports facts; ``rules`` has
which of them are normal for an engine, and what they cost a consumer.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from kvyard.events.transport.fingerprints import Fingerprints
from kvyard.events.transport.frames import Frame, fingerprint, read_live
from kvyard.events.transport.state import State, Update
from kvyard.events.types import Event, Removed, Stored, Tier
from kvyard.events.wire import Decoder, EngineGuess
from kvyard.hashing import Key
from kvyard.hashing.keys import short_text

MAX_EXAMPLES = 5
AGAIN = 3
"""Announcements of a block from which it must have been evicted in between: two may be copies made at the same time."""


class StreamFacts(msgspec.Struct, kw_only=True):
    """Facts about one stream: one topic, one sequence."""

    topic: str
    first: int | None = None
    last: int | None = None
    batches: int = 0
    missing: int = 0
    gaps: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """The first and last missing number of each gap; the first few."""
    gap_count: int = 0
    duplicates: int = 0
    late: int = 0
    restarts: int = 0
    backwards: int = 0
    """Batches with an earlier time stamp than the one before."""
    ranks: list[int | None] = msgspec.field(default_factory=list)
    device_peak: int = 0
    """The most blocks that one rank had on its device at the end of a batch, as announced, in all groups together."""
    device_peaks: dict[str, int] = msgspec.field(default_factory=dict)
    """``device_peak`` per group."""


class Occurrences(msgspec.Struct):
    """A count, in all and by what may explain it, with a few examples."""

    count: int = 0
    excused: int = 0
    """After something was missed, so there is nothing to wonder about."""
    below: int = 0
    """Not on the device."""
    partial: int = 0
    """In groups that don't keep every block."""
    sizes: dict[str, Counter[int]] = msgspec.field(default_factory=dict)
    """Blocks that nothing else explains, by group and block size."""
    finer: int = 0
    """Of these, those of blocks smaller than the group's: entries for the beginning of a block."""
    examples: list[str] = msgspec.field(default_factory=list)

    def add(self, example: str, excused: bool, tier: Tier, partial: bool, size: tuple[str, int] | None = None) -> None:
        """One more. It is counted under the first explanation that applies."""
        self.count += 1
        if excused:
            self.excused += 1
        elif tier != Tier.G1:
            self.below += 1
        elif partial:
            self.partial += 1
        else:
            if size is not None:
                self.sizes.setdefault(size[0], Counter())[size[1]] += 1
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(example)

    def explain_by_size(self, block_sizes: dict[str, list[int]]) -> None:
        """Tell apart what only the largest block size of each group shows to be finer."""
        self.finer = sum(
            count
            for group, sizes in self.sizes.items()
            for size, count in sizes.items()
            if size < max(block_sizes.get(group, [0]))
        )


class Facts(msgspec.Struct):
    """Facts about all streams."""

    messages: int = 0
    malformed: Counter[str] = msgspec.field(default_factory=Counter)
    payload_bytes: int = 0
    events: Counter[str] = msgspec.field(default_factory=Counter)
    stored_blocks: int = 0
    removed_blocks: int = 0
    single_removals: int = 0
    streams: dict[str, StreamFacts] = msgspec.field(default_factory=dict)
    groups: dict[str, str] = msgspec.field(default_factory=dict)
    """Kind and window per group."""
    block_sizes: dict[str, list[int]] = msgspec.field(default_factory=dict)
    tiers: Counter[str] = msgspec.field(default_factory=Counter)
    capacities: dict[str, int] = msgspec.field(default_factory=dict)
    """Blocks of the device per group, if events have them."""
    orphans: Occurrences = msgspec.field(default_factory=Occurrences)
    """Stores whose parent was never announced."""
    orphans_of_removed: Occurrences = msgspec.field(default_factory=Occurrences)
    """Stores whose parent was announced and is gone."""
    unknown_removes: Occurrences = msgspec.field(default_factory=Occurrences)
    repeated_removes: Occurrences = msgspec.field(default_factory=Occurrences)
    repeated_stores: Occurrences = msgspec.field(default_factory=Occurrences)
    empty_stores: Occurrences = msgspec.field(default_factory=Occurrences)
    empty_removes: Occurrences = msgspec.field(default_factory=Occurrences)
    """Removals that name no block."""
    misaligned: Occurrences = msgspec.field(default_factory=Occurrences)
    hash_only: Occurrences = msgspec.field(default_factory=Occurrences)
    problems: Counter[str] = msgspec.field(default_factory=Counter)
    problem_examples: dict[str, str] = msgspec.field(default_factory=dict)
    unknown_kinds: Counter[str] = msgspec.field(default_factory=Counter)
    partial_blocks: int = 0
    removed_tiers: Counter[str] = msgspec.field(default_factory=Counter)
    """Removed blocks by tier."""
    recurring: Counter[str] = msgspec.field(default_factory=Counter)
    """By tier, blocks that were announced a third time while two announcements stood."""
    held_tiers: Counter[str] = msgspec.field(default_factory=Counter)
    """``held`` by tier."""
    held: int = 0
    """Blocks held at the end, by count of copies."""
    forgotten: int = 0
    """Of these, how many a consumer that keeps a plain set no longer knows."""
    orphan_blocks: int = 0
    """Blocks in stores whose parent wasn't held."""
    guess: EngineGuess = msgspec.field(default_factory=EngineGuess)


MAX_PRINTS = 10_000
"""Batches of a stream that are remembered, to tell a repetition from a restart."""
MAX_KNOWN = 5_000_000
"""Hashes remembered after they are gone; beyond that "never seen" and "removed before" are the same finding."""
Place: TypeAlias = tuple[int | None, int | None, Tier]
"""Rank, group, tier."""
NOT_FULL = ("sliding_window", "mamba", "chunked", "linear", "short_conv")
"""Words in the kinds of groups that don't keep every block of a prefix."""


class _CheckedStream:
    """The consumer's side of one stream."""

    def __init__(self, topic: str) -> None:
        self.facts = StreamFacts(topic=topic)
        self.copies: dict[Place, Counter[Key]] = {}
        self.plain: dict[Place, set[Key]] = {}
        self.known: set[Key] = set()
        self.kinds: dict[int | None, str] = {}
        self.excused = False
        """True if events are missing that removals and parents may refer to."""
        self.lost = False
        """True if events are missing, so that blocks counted as held may be gone."""
        self.decoder = Decoder()
        self.prints = Fingerprints(MAX_PRINTS)
        self.ts = 0.0

    def forget(self, rank: int | None, tier: Tier | None) -> None:
        for held in (self.copies, self.plain):
            for place in [place for place in held if place[0] == rank and tier in (None, place[2])]:
                del held[place]

    def note_peaks(self, block_sizes: dict[str, list[int]]) -> None:
        """Called when a batch is applied: within one, blocks may be stored before those are removed that made room.

        Groups with several block sizes are left out: the smaller ones are entries for parts of a block.
        """
        facts, ranks = self.facts, Counter[int | None]()
        for (rank, group, tier), copies in self.copies.items():
            name = group_name(group)
            if tier == Tier.G1 and len(block_sizes.get(name, ())) < 2:
                facts.device_peaks[name] = max(facts.device_peaks.get(name, 0), len(copies))
                ranks[rank] += len(copies)
        facts.device_peak = max([facts.device_peak, *ranks.values()])

    def holds(self, key: Key, rank: int | None, group: int | None) -> bool:
        return any(counts[key] > 0 for place, counts in self.copies.items() if place[:2] == (rank, group))


class Checker:
    """Reads a stream, message by message, and remembers what was odd about it."""

    def __init__(self) -> None:
        self._facts = Facts()
        self._streams: dict[str, _CheckedStream] = {}

    def message(self, parts: Sequence[bytes]) -> None:
        """Take in one message as it was on the wire; a single frame is a payload without a number."""
        frame = read_live(parts)
        if not isinstance(frame, str):
            self.frame(frame)
            return
        self._facts.messages += 1
        if len(parts) == 1:
            self._payload(self._stream(""), parts[0])
        else:
            self._facts.malformed[frame] += 1

    def frame(self, frame: Frame) -> None:
        """Take in one batch."""
        self._facts.messages += 1
        stream = self._stream(frame.topic.decode("utf-8", "replace"))
        if self._number(stream, frame):
            self._payload(stream, frame.payload)

    def update(self, update: Update) -> None:
        """Take in what a subscription made of the stream, with batches that it fetched again in their place."""
        stream = self._stream(update.topic)
        if update.replaces:
            stream.copies.clear()
            stream.plain.clear()
        for event in update.events:
            self._event(stream, event, update.rank)
        if update.state == State.FRESH:
            stream.note_peaks(self._facts.block_sizes)

    def facts(self) -> Facts:
        """Return the facts gathered so far."""
        facts = self._facts
        facts.held = facts.forgotten = facts.partial_blocks = 0
        facts.unknown_kinds, facts.held_tiers = Counter(), Counter()
        facts.orphans.explain_by_size(facts.block_sizes)
        for stream in self._streams.values():
            for place, copies in stream.copies.items():
                held = {key for key, count in copies.items() if count > 0}
                facts.held += len(held)
                facts.held_tiers[place[2].name] += len(held)
                facts.forgotten += len(held - stream.plain.get(place, set()))
            stats = stream.decoder.stats
            facts.partial_blocks += stats.partial_blocks
            facts.unknown_kinds.update(stats.unknown)
        return facts

    # -- numbers ----------------------------------------------------------------------------------------------------

    def _stream(self, topic: str) -> _CheckedStream:
        stream = self._streams.get(topic)
        if stream is None:
            stream = self._streams[topic] = _CheckedStream(topic)
            self._facts.streams[topic] = stream.facts
        return stream

    def _number(self, stream: _CheckedStream, frame: Frame) -> bool:
        """Look at a sequence number. Returns whether the batch is news."""
        facts, seq, mark = stream.facts, frame.seq, fingerprint(frame.payload)
        if facts.first is None:
            facts.first = seq
            stream.excused = seq > 0
        elif facts.last is not None and seq <= facts.last:
            if stream.prints.get(seq) == mark:
                facts.duplicates += 1
                return False
            first = stream.prints.first
            if seq not in stream.prints and first is not None and seq > first:
                # Out of order: what came after it has been applied, so it is as good as lost.
                facts.late += 1
                return False
            facts.restarts += 1
            stream.copies.clear()
            stream.plain.clear()
            stream.prints.clear()
            stream.excused, stream.lost = seq > 0, False
        elif facts.last is not None and seq > facts.last + 1:
            facts.gap_count += 1
            facts.missing += seq - facts.last - 1
            if len(facts.gaps) < MAX_EXAMPLES:
                facts.gaps.append((facts.last + 1, seq - 1))
            stream.excused = stream.lost = True
        facts.last = seq
        stream.prints.add(seq, mark)
        return True

    # -- payloads ---------------------------------------------------------------------------------------------------

    def _payload(self, stream: _CheckedStream, payload: bytes) -> None:
        facts = self._facts
        facts.payload_bytes += len(payload)
        facts.guess.look(payload)
        decoded = stream.decoder.decode(payload)
        stream.facts.batches += 1
        if decoded.rank not in stream.facts.ranks:
            stream.facts.ranks.append(decoded.rank)
        if 0 < decoded.ts < stream.ts:
            stream.facts.backwards += 1
        stream.ts = decoded.ts or stream.ts
        for problem in decoded.problems:
            facts.problems[problem.kind] += 1
            facts.problem_examples.setdefault(problem.kind, problem.reason)
        facts.capacities |= {group_name(group): blocks for group, blocks in decoded.capacities.items()}
        if decoded.lossy:
            stream.excused = stream.lost = True
        for part in decoded.by_rank():
            for event in part.events:
                self._event(stream, event, part.rank)
        if not stream.lost:
            stream.note_peaks(facts.block_sizes)

    def _event(self, stream: _CheckedStream, event: Event, rank: int | None) -> None:
        self._facts.events[type(event).__name__.lower()] += 1
        if isinstance(event, Stored):
            self._stored(stream, event, rank)
        elif isinstance(event, Removed):
            self._removed(stream, event, rank)
        else:
            stream.forget(rank, event.tier)
            if event.tier is None:
                stream.excused = stream.lost = False

    def _stored(self, stream: _CheckedStream, event: Stored, rank: int | None) -> None:
        facts, place = self._facts, (rank, event.group, event.tier)
        name = group_name(event.group)
        if event.kind is not None:
            window = f", window {event.window}" if event.window else ""
            facts.groups[name] = event.kind + window
            stream.kinds[event.group] = event.kind
        else:
            facts.groups.setdefault(name, "")
        partial = any(word in stream.kinds.get(event.group, "") for word in NOT_FULL)
        first = short_text(event.hashes[0]) if event.hashes else "none"
        example = f"batch {stream.facts.last}: {len(event.hashes)} blocks, first {first}"
        if event.block_size and event.block_size not in (sizes := facts.block_sizes.setdefault(name, [])):
            sizes.append(event.block_size)
        facts.tiers[event.tier.name] += len(event.hashes)
        facts.stored_blocks += len(event.hashes)
        if not event.hashes:
            facts.empty_stores.add(example, False, event.tier, partial)
            return
        if event.tokens is None:
            facts.hash_only.add(example, False, event.tier, partial)
        elif len(event.tokens) != event.block_size * len(event.hashes):
            facts.misaligned.add(example, False, event.tier, partial)
        if event.parent is not None and not stream.holds(event.parent, rank, event.group):
            tally = facts.orphans_of_removed if event.parent in stream.known else facts.orphans
            size = (name, event.block_size)
            tally.add(f"{example}, parent {short_text(event.parent)}", stream.excused, event.tier, partial, size)
            facts.orphan_blocks += len(event.hashes)
        copies = stream.copies.setdefault(place, Counter())
        for key in event.hashes:
            if copies[key] > 0:
                facts.repeated_stores.add(f"batch {stream.facts.last}: {short_text(key)}", False, Tier.G1, False)
            copies[key] += 1
            facts.recurring[event.tier.name] += copies[key] == AGAIN
        stream.plain.setdefault(place, set()).update(event.hashes)
        if len(stream.known) < MAX_KNOWN:
            stream.known.update(event.hashes)

    def _removed(self, stream: _CheckedStream, event: Removed, rank: int | None) -> None:
        facts, place = self._facts, (rank, event.group, event.tier)
        partial = any(word in stream.kinds.get(event.group, "") for word in NOT_FULL)
        facts.removed_blocks += len(event.hashes)
        facts.removed_tiers[event.tier.name] += len(event.hashes)
        facts.single_removals += len(event.hashes) == 1
        if not event.hashes:
            facts.empty_removes.add(f"batch {stream.facts.last}", False, Tier.G1, False)
            return
        copies = stream.copies.setdefault(place, Counter())
        for key in event.hashes:
            if copies[key] > 0:
                copies[key] -= 1
                if not copies[key]:
                    del copies[key]
                continue
            del copies[key]
            tally = facts.repeated_removes if key in stream.known else facts.unknown_removes
            tally.add(f"batch {stream.facts.last}: {short_text(key)}", stream.excused, event.tier, partial)
        stream.plain.setdefault(place, set()).difference_update(event.hashes)


def group_name(group: int | None) -> str:
    return "none" if group is None else str(group)
