"""What waits inside the batcher: runs that entered or left one (group, tier), not yet events.

During an iteration nothing but references to runs is kept; hashes, tokens and extra keys are looked up once, when the event
is built. This module knows how to build one event from its runs; when to build, and in which order, is the batcher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvyard.events.types import GroupMeta, Removed, Stored, Tier
from kvyard.hashing import DigestKeys, ExtraKeys, Key, Run

Snapshot: TypeAlias = Callable[[], Iterable[tuple[int, Tier, Iterable[Run]]]]
"""Lists the current map of copies: per (group, tier) the runs in it, each block once."""


class Lane:
    """One (group, tier): its metadata, the removals that wait in it and the Stored that may still grow."""

    __slots__ = ("announced", "group", "leaving", "meta", "reason", "tail", "tier")

    def __init__(self, group: int, tier: Tier, meta: GroupMeta) -> None:
        self.group = group
        self.tier = tier
        self.meta = meta
        self.announced = 0
        """Blocks in events so far: stored, less those removed since."""
        self.leaving: list[Run] | None = None
        """Runs whose removal waits; ``None``, not an empty list, where there are none."""
        self.reason: str | None = None
        """Why they left. An event has one reason: where they differ it has none."""
        self.tail: Arrivals | None = None
        """This lane's last Stored in the iteration: what the next one may be merged into."""

    def release(self) -> Departures | None:
        """Hand over the waiting removals, if any; the lane keeps nothing of them."""
        leaving = self.leaving
        if leaving is None:
            return None
        self.leaving = None
        reason, self.reason = self.reason, None
        return Departures(self, leaving, reason)


class Arrivals:
    """A Stored to be: blocks that follow each other on one chain.

    The last stretch is held as a chain and two positions, so that a growing chain costs a number and no object.
    """

    __slots__ = ("before", "chain", "lane", "start", "stop")

    def __init__(self, lane: Lane, run: Run) -> None:
        self.lane = lane
        self.before: list[Run] | None = None
        """Earlier stretches, where several chain objects stand for one text."""
        self.chain = run.chain
        self.start = run.start
        self.stop = run.stop

    def __len__(self) -> int:
        return sum(map(len, self.before or ())) + self.stop - self.start

    def absorb(self, run: Run) -> bool:
        """Take in ``run`` if it goes on where this ends, with the same metadata; returns whether it did."""
        if run.start != self.stop:
            return False
        chain, other = self.chain, run.chain
        if chain is not other:
            # Two requests may each hold a chain object for one text. A chained hash speaks for all that comes before it.
            if (
                chain.block_size != other.block_size
                or chain.keys[self.stop - 1] != other.keys[run.start - 1]
                or chain.namespace != other.namespace
            ):
                return False
            if self.before is None:
                self.before = []
            self.before.append(Run(chain, self.start, self.stop))
            self.chain = other
            self.start = run.start
        self.stop = run.stop
        return True

    @staticmethod
    def _words(run: Run) -> Sequence[int] | None:
        return run.chain.words_of(run.start, run.stop)

    def event(self, with_tokens: bool) -> Stored:
        """Build the event."""
        lane, chain = self.lane, self.chain
        space = chain.namespace
        runs = [*(self.before or ()), Run(chain, self.start, self.stop)]
        hashes = joined_hashes(runs)
        tokens = self._words(runs[0]) if with_tokens else None
        for run in runs[1:]:
            if tokens is not None:
                more = self._words(run)
                tokens = None if more is None else [*tokens, *more]
        extras: list[ExtraKeys | None] | None = None
        if not space.plain:
            extras = [key for run in runs for key in space.wire_extras(run.start, run.stop, chain.block_size)]
        return Stored(
            hashes=hashes,
            parent=runs[0].parent,
            tokens=tokens,
            block_size=chain.block_size,
            group=lane.group,
            tier=lane.tier,
            lora_name=space.lora_name,
            lora_id=space.lora_id,
            extra_keys=extras,
            kind=lane.meta.kind,
            window=lane.meta.window,
            salt=space.salt or None,
        )


class Departures:
    """A Removed to be: runs in the order in which they left."""

    __slots__ = ("lane", "reason", "runs")

    def __init__(self, lane: Lane, runs: list[Run], reason: str | None) -> None:
        self.lane = lane
        self.runs = runs
        self.reason = reason

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def event(self) -> Removed:
        """Build the event."""
        return Removed(hashes=joined_hashes(self.runs), group=self.lane.group, tier=self.lane.tier, reason=self.reason)


def joined_hashes(runs: Sequence[Run]) -> Sequence[Key]:
    """The hashes of all ``runs``, packed where their chains keep them so."""
    first = runs[0]
    joined = first.chain.packed_hashes(first.start, first.stop)
    if len(runs) == 1:
        return joined
    parts = [run.chain.packed_hashes(run.start, run.stop) for run in runs[1:]]
    if not isinstance(joined, list | DigestKeys) or any(type(part) is not type(joined) for part in parts):
        joined = list(joined)
    for part in parts:
        joined.extend(part)  # type: ignore[arg-type]
    return joined


def arrange(lane: Lane, runs: Iterable[Run]) -> list[Arrivals]:
    """The Stored to be that announce all ``runs`` of a map, parents first and each chain in as few as it takes."""
    out: list[Arrivals] = []
    open_at: dict[Key, Arrivals] = {}
    # A parent sits at a lower position than its children, so sorting by position puts it first.
    for run in sorted((run for run in runs if len(run)), key=lambda run: run.start):
        parent = run.parent
        item = open_at.pop(parent, None) if parent is not None else None
        if item is None or not item.absorb(run):
            item = Arrivals(lane, run)
            out.append(item)
        open_at[run.chain.keys[run.stop - 1]] = item
    return out
