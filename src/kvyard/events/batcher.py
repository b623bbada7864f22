"""The batcher: turns what enters and leaves the maps into few, well ordered events, one batch per iteration.

Evictions come one by one, interleaved over groups and tiers. One event each floods a consumer and, where queues count
events, loses some. So removals wait per (group, tier), and the only things that make them leave are a Stored of the same
(group, tier), ``flush_removed``, a clear, and the end of the iteration. This keeps what a consumer relies on: inside one
(group, tier) a Removed comes before the Stored that followed it, and a lower tier's Stored before the upper tier's Removed.

The batcher knows nothing of wires, queues or sockets, and never reads a clock.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.batcher_counters import BatcherCounters
from kvyard.events.types import Cleared, Event, EventBatch, GroupMeta, Removed, Stored, Tier
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
        """Runs whose removal waits; ``None``, not an empty list, if there are none."""
        self.reason: str | None = None
        """Why they left. An event has one reason: where they differ it has none."""
        self.tail: Arrivals | None = None
        """This lane's last Stored in the iteration: what the next one may be merged into."""


class Arrivals:
    """A Stored to be: blocks that follow each other on one chain.

    The last run is held as a chain and two positions, so that a growing chain costs a number and no object.
    """

    __slots__ = ("before", "chain", "lane", "start", "stop")

    def __init__(self, lane: Lane, run: Run) -> None:
        self.lane = lane
        self.before: list[Run] | None = None
        """Earlier runs, where several chain objects stand for one text."""
        self.chain = run.chain
        self.start = run.start
        self.stop = run.stop

    def __len__(self) -> int:
        return sum(map(len, self.before or ())) + self.stop - self.start

    def absorb(self, run: Run) -> bool:
        """Append ``run`` if it continues this one with equal metadata. Returns true if it did."""
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

    def event(self, with_tokens: bool) -> Stored:
        """Build the event."""
        lane, chain = self.lane, self.chain
        space = chain.namespace
        runs = [*(self.before or ()), Run(chain, self.start, self.stop)]
        hashes = joined_hashes(runs)
        tokens = chain.words_of(self.start, self.stop) if with_tokens else None
        if self.before is not None and tokens is not None:
            parts = [run.chain.words_of(run.start, run.stop) for run in runs]
            tokens = None if None in parts else [token for part in parts for token in part or ()]
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


class Clearing:
    """A Cleared to be."""

    __slots__ = ("tier",)

    def __init__(self, tier: Tier | None = None) -> None:
        self.tier = tier


QueuedEvent: TypeAlias = Arrivals | Departures | Clearing
"""Compiled classes alone: mypyc would look up attributes by name where a msgspec type is among them."""


def joined_hashes(runs: Sequence[Run]) -> Sequence[Key]:
    """Return the hashes of all ``runs``, packed where their chains keep them so."""
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
    """Return the Stored to be that announce all ``runs`` of a map, parents first and each chain in as few as it takes."""
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


class Batcher:
    """A ``Sink`` that batches. One per stream; used by one thread."""

    def __init__(
        self,
        groups: Sequence[GroupMeta],
        *,
        stream: str = "",
        rank: int | None = None,
        epoch: int = 0,
        snapshot: Snapshot | None = None,
        max_runs: int = 1 << 20,
        with_tokens: bool = True,
    ) -> None:
        """``groups`` are the attention groups by index.

        ``snapshot`` lists the map when all of it must be announced again; without it a consumer that lost events receives a
        clear and learns the map again as blocks come in. ``max_runs`` bounds the runs of one iteration.
        """
        self.stream = stream
        self.rank = rank
        self.epoch = epoch
        self.groups = tuple(groups)
        self.with_tokens = with_tokens
        self._counters = BatcherCounters()
        # Counted on every call, hence apart.
        self._merged = self._repeats = 0
        self._snapshot = snapshot
        self._max_runs = max_runs
        self._seq = 0
        self._next_id = 0
        self._queue: list[QueuedEvent] = []
        self._held = 0
        self._resync = False
        self._gap = False
        self._table: list[list[Lane | None]] = [[None] * (len(Tier) + 1) for _ in self.groups]
        """Lanes by group and number of the tier, opened when they are first named."""
        self._lanes: list[Lane] = []
        """The open ones, by group and tier."""

    @property
    def counters(self) -> BatcherCounters:
        """Return a copy of the batcher's counters."""
        return msgspec.structs.replace(self._counters, merged=self._merged, repeats=self._repeats)

    # -- the sink ---------------------------------------------------------------------------------------------------

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        """Announce ``run`` if these are its first copies. An empty run changes nothing and flushes nothing."""
        if not first:
            self._repeats += 1
            return
        lane = self._lane(group, tier)
        if run.stop == run.start:
            return
        if lane.leaving is not None:
            self._release(lane)
        else:
            tail = lane.tail
            if tail is not None and tail.stop == run.start and tail.absorb(run):
                self._merged += 1
                return
        lane.tail = item = Arrivals(lane, run)
        self._queue.append(item)
        self._held += 1
        if self._held > self._max_runs:
            self._give_up()

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        """Let the removal of ``run`` wait if these were its last copies."""
        if not last:
            self._repeats += 1
            return
        lane = self._lane(group, tier)
        if run.stop == run.start:
            return
        leaving = lane.leaving
        if leaving is None:
            lane.leaving = [run]
            lane.reason = reason
        else:
            leaving.append(run)
            if reason != lane.reason:
                lane.reason = None
        self._held += 1
        if self._held > self._max_runs:
            self._give_up()

    def cleared(self, tier: Tier | None = None) -> None:
        """Announce that ``tier``, or everything, was emptied; all waiting removals go first.

        The wire's clear always means everything. So where other tiers are announced too, the end of the iteration clears
        and announces them again; without a snapshot the event names the tier, which not every consumer reads.
        """
        if tier is not None and self._snapshot is not None:
            self._resync = True
            return
        for lane in self._lanes:
            self._release(lane)
            lane.tail = None
        self._queue.append(Clearing(tier))

    def flush_removed(self, group: int) -> None:
        """Queue the removals that wait in ``group``, in every tier; those of other groups go on waiting.

        A block that is stored in the group afterwards comes behind them. Raises ``KvyardError`` for an unknown group.
        """
        for tier in Tier:
            lane = self._lane(group, tier)
            if lane.leaving is not None:
                self._release(lane)
                lane.tail = None  # a Stored from before the removals must not grow any more

    # -- iterations -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Return true if something changed since the last iteration ended."""
        return bool(self._held or self._queue or self._resync)

    def end_iteration(self, now: int) -> EventBatch | None:
        """Build everything that waits into one batch stamped ``now`` (nanoseconds); ``None`` where nothing happened."""
        self._counters.iterations += 1
        if self._resync:
            return self._announce_anew(now)
        if not self._held and not self._queue:
            return None
        for lane in self._lanes:
            self._release(lane)
        events = self._build(self._take())
        return self._announce_anew(now) if events is None else self._batch(events, now)

    def resync(self, now: int) -> EventBatch:
        """Discard waiting events, skip a sequence number, and announce the whole map again: a clear, then the snapshot.

        For when batches were lost on their way. Call it between iterations.
        """
        self._gap = True
        return self._announce_anew(now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if something waits that should not: for tests, between iterations."""
        assert not self._queue and not self._held, "events wait across an iteration boundary"
        for lane in self._lanes:
            assert lane.leaving is None and lane.tail is None, f"group {lane.group} {lane.tier.name} kept something"

    def check_announced(self, held: Iterable[tuple[int, Tier, Iterable[Run]]]) -> None:
        """Raise ``AssertionError`` unless what was announced and not taken back is as many blocks as ``held``, the maps as
        a ``Snapshot`` lists them (I4). What waits is counted in, so this may be called at any time.
        """
        if self._resync or (self._counters.resyncs and self._snapshot is None):
            return  # all of it is about to be announced again, or was given up and is learnt again bit by bit
        surplus = {(lane.group, lane.tier): lane.announced for lane in self._lanes}
        for item in self._queue:
            if isinstance(item, Clearing):
                for place in surplus:
                    if item.tier is None or item.tier == place[1]:
                        surplus[place] = 0
            else:
                surplus[item.lane.group, item.lane.tier] += len(item) if isinstance(item, Arrivals) else -len(item)
        for lane in self._lanes:
            surplus[lane.group, lane.tier] -= sum(map(len, lane.leaving or ()))
        for group, tier, runs in held:
            surplus[group, tier] = surplus.get((group, tier), 0) - sum(map(len, runs))
        wrong = {f"group {group} in {tier.name}": count for (group, tier), count in surplus.items() if count}
        assert not wrong, f"I4: blocks announced and not taken back, beyond those that are held: {wrong}"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _lane(self, group: int, tier: Tier) -> Lane:
        if not 0 <= group < len(self._table):
            raise KvyardError(f"group {group} is unknown: the batcher was made for {len(self._table)} groups")
        lane = self._table[group][tier]
        return lane if lane is not None else self._open(group, tier)

    def _open(self, group: int, tier: Tier) -> Lane:
        opened = self._table[group][tier] = Lane(group, tier, self.groups[group])
        self._lanes = [lane for row in self._table for lane in row if lane is not None]
        return opened

    def _release(self, lane: Lane) -> None:
        """Queue the removals that wait in ``lane``, if any."""
        leaving = lane.leaving
        if leaving is not None:
            self._queue.append(Departures(lane, leaving, lane.reason))
            self._counters.joined += len(leaving) - 1
            lane.leaving = lane.reason = None

    def _give_up(self) -> None:
        """Hold nothing more of this iteration: the map itself knows better. Nothing of it was numbered, so make a gap."""
        self._counters.lost_runs += self._held
        self._resync = self._gap = True
        self._take()

    def _take(self) -> list[QueuedEvent]:
        queue, self._queue = self._queue, []
        self._held = 0
        for lane in self._lanes:
            lane.tail = None
            lane.leaving = None
        return queue

    def _build(self, queue: list[QueuedEvent]) -> list[Event] | None:
        """Build the events of ``queue``; ``None`` if a removal can't be listed in full, so that the whole map must be
        announced."""
        counters, with_tokens = self._counters, self.with_tokens
        events: list[Event] = []
        for item in queue:
            if isinstance(item, Arrivals):
                stored = item.event(with_tokens)
                counters.stored += 1
                counters.stored_blocks += len(stored.hashes)
                item.lane.announced += len(stored.hashes)
                events.append(stored)
            elif isinstance(item, Departures):
                removed = item.event()
                if len(removed.hashes) != len(item):
                    counters.miscounted += 1
                    return None
                counters.removed += 1
                counters.removed_blocks += len(removed.hashes)
                item.lane.announced -= len(removed.hashes)
                events.append(removed)
            else:
                counters.cleared += 1
                for lane in self._lanes:
                    if item.tier is None or item.tier == lane.tier:
                        lane.announced = 0
                events.append(Cleared(tier=item.tier))
        return events

    def _batch(self, events: list[Event], now: int) -> EventBatch:
        batch = EventBatch(
            stream=self.stream,
            seq=self._seq,
            events=events,
            ts=now / 1e9,
            rank=self.rank,
            epoch=self.epoch,
            first_id=self._next_id,
        )
        self._seq += 1
        self._next_id += len(events)
        self._counters.batches += 1
        return batch

    def _announce_anew(self, now: int) -> EventBatch:
        self._take()
        if self._gap:
            self._seq += 1
            self._next_id += 1
        self._resync = self._gap = False
        self._counters.resyncs += 1
        queue: list[QueuedEvent] = [Clearing()]
        if self._snapshot is not None:
            runs_of: dict[tuple[int, Tier], list[Run]] = {}
            for group, tier, runs in self._snapshot():
                runs_of.setdefault((group, tier), []).extend(runs)
            for group, tier in sorted(runs_of):
                queue += arrange(self._lane(group, tier), runs_of[group, tier])
        events = self._build(queue)
        assert events is not None, "nothing is removed here"
        return self._batch(events, now)
