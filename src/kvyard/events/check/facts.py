"""Facts about a stream, as a ``Checker`` collects them. Numbers and a few examples; no judgement."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvyard.events.types import Tier
from kvyard.events.wire import EngineGuess

MAX_EXAMPLES = 5


class StreamFacts(msgspec.Struct, kw_only=True):
    """What was seen of one stream: one topic, one sequence."""

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
    """The same per group."""


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
    """Those that nothing else explains, by group and block size."""
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
    """All that was seen."""

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
    """Blocks of the device per group, where events say."""
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
    unknown_kinds: dict[str, int] = msgspec.field(default_factory=dict)
    partial_blocks: int = 0
    held: int = 0
    """Blocks held at the end, by count of copies."""
    forgotten: int = 0
    """Of these, how many a consumer that keeps a plain set no longer knows."""
    orphan_blocks: int = 0
    """Blocks in stores whose parent wasn't held."""
    guess: EngineGuess = msgspec.field(default_factory=EngineGuess)
