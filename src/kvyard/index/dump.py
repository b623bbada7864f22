"""Dumps: the whole state of an index as plain values, from which another index can continue.

An engine without a replay socket can't repeat its past. A second indexer then learns it from the first: rows, repeated
announcements, the bridges from engine hashes to request keys, waiting stores, and the batch up to which all of that holds. The
second goes on with the next batch as if it had received the others itself.

Each part of an index makes its own snapshot and restores it; this is the format around them. A dump is one moment of one
index. It has no text of prompts but the token ids of blocks that aren't full yet or wait for their parents. Followers'
positions are the transport's: the caller of ``load`` makes them agree.
"""

from array import array
from collections.abc import Collection

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.transport import State
from kvyard.hashing import Key
from kvyard.index.feed import FeedSnapshot
from kvyard.index.indexer import Indexer
from kvyard.index.places import Holder

FORMAT = 1


class StreamDump(msgspec.Struct, array_like=True):
    """A stream and its feeds."""

    stream: str
    topic: str
    seq: int
    state: State
    reason: str
    lost: bool
    """Always false by now: see ``state``. ``ranks`` is empty."""
    ranks: list[int | None]
    ts: float
    feeds: list[FeedSnapshot]


class RowsDump(msgspec.Struct, array_like=True):
    """Contents of one place: runs of packed keys, and announcements beyond the first."""

    holder: Holder
    tier: int
    group: int | None
    runs: list[bytes]
    beyond: list[tuple[Key, int]]


class IndexDump(msgspec.Struct):
    """An index at one moment."""

    format: int
    names: list[str]
    """Naming of blocks: indexes that differ in it can't exchange dumps."""
    groups: list[tuple[Holder, list[tuple[int | None, GroupSpec | None]]]]
    rows: list[RowsDump]
    streams: list[StreamDump]


def dump(indexer: Indexer) -> IndexDump:
    """Return the whole state of ``indexer``. Changes nothing."""
    streams: list[StreamDump] = []
    rows: dict[int, RowsDump] = {}
    holders: set[Holder] = set()
    for (name, topic), stream in indexer.streams.items():
        for feed in stream.feeds.values():
            holders.add(feed.holder)
            for (tier, group), number in feed.places.items():
                if number not in rows:
                    runs = [array("Q", run).tobytes() for run in indexer.backend.held(number)]
                    rows[number] = RowsDump(feed.holder, tier, group, runs, indexer.dedup.snapshot(number))
        parts = [
            feed.snapshot([rank for rank, known in stream.by_rank.items() if known is feed])
            for feed in stream.feeds.values()
        ]
        dumped = StreamDump(
            stream=name,
            topic=topic,
            seq=stream.seq,
            state=stream.state,
            reason=stream.reason,
            lost=False,
            ranks=[],
            ts=stream.ts,
            feeds=parts,
        )
        streams.append(dumped)
    return IndexDump(
        format=FORMAT,
        names=indexer.identity.names,
        groups=[(holder, list(indexer.catalog.learned(holder).items())) for holder in sorted(holders)],
        rows=list(rows.values()),
        streams=streams,
    )


def load(indexer: Indexer, dump: IndexDump, wanted: Collection[str], now: int = 0) -> list[StreamDump]:
    """Load the state of the streams ``wanted`` from a dump. They must be registered and without updates so far.

    Streams that weren't fresh when the dump was made are left out, and so are those that share a holder with one that
    isn't taken over. Returns those that were. Raises ``KvyardError``, changing nothing, for a dump of another format or naming.
    """
    names = indexer.identity.names
    if dump.format != FORMAT:
        raise KvyardError(
            f"the dump has format {dump.format} and this is version {FORMAT}: use the same kvyard on both"
        )
    if dump.names != names:
        raise KvyardError(
            f"the dump names blocks by {', '.join(dump.names)}, and this index by {', '.join(names)}: make them equal"
        )
    groups = dict(dump.groups)
    numbers: dict[tuple[Holder, int, int | None], int] = {}
    chosen = _complete(dump, {name for name in wanted if not any(name == heard for heard, _ in indexer.streams)})
    for stream_dump in chosen:
        stream = indexer.adopt(stream_dump.stream, stream_dump.topic)
        stream.seq, stream.state, stream.reason, stream.ts, stream.updated = (
            stream_dump.seq,
            stream_dump.state,
            stream_dump.reason,
            stream_dump.ts,
            now,
        )
        for part in stream_dump.feeds:
            if groups.get(part.holder) and not indexer.catalog.learned(part.holder):
                indexer.catalog.adopt(part.holder, dict(groups[part.holder]))
            feed = indexer.feed_for(stream, part.holder, part.ranks)
            feed.restore(part)
            numbers.update({(part.holder, tier, group): number for (tier, group), number in feed.places.items()})
    for row in dump.rows:
        number = numbers.get((row.holder, row.tier, row.group))
        if number is not None:
            for run in row.runs:
                indexer.backend.store(number, array("Q", run).tolist(), None)
            indexer.dedup.restore(number, row.beyond)
    indexer.refresh(force=True)
    return chosen


def _complete(dump: IndexDump, wanted: Collection[str]) -> list[StreamDump]:
    """Return the streams of ``wanted`` that were whole, and whose holders are fed by no others."""
    taken = {dumped.stream for dumped in dump.streams if dumped.stream in wanted}
    taken -= {dumped.stream for dumped in dump.streams if dumped.state != State.FRESH or dumped.lost}
    feeding: dict[Holder, set[str]] = {}
    for dumped in dump.streams:
        for feed in dumped.feeds:
            feeding.setdefault(feed.holder, set()).add(dumped.stream)
    while broken := {name for streams in feeding.values() if not streams <= taken for name in streams & taken}:
        taken -= broken
    return [dumped for dumped in dump.streams if dumped.stream in taken]
