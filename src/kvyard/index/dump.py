"""Dumps: all that an index knows, as plain values, so that another one can go on from there.

An engine without a replay socket can't tell its past. A second indexer then learns it from the first: rows, repeated
announcements, the bridges from engine hashes to request keys, what waits, and up to which batch all of that is. The
second goes on with the next batch as if it had heard the others itself.

A dump is one moment of one index. It has no text of prompts but the token ids of blocks that aren't full yet or wait for
their parents. Followers' positions are the transport's: whoever loads a dump has to make them agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.transport import State
from kvyard.events.types import Stored, Tier
from kvyard.index.bridge import _BITS, Bridge, Piece, _Front
from kvyard.index.feed import Feed
from kvyard.index.identity import Identity
from kvyard.index.indexer import Indexer
from kvyard.index.places import Holder
from kvyard.index.stream import Stream

FORMAT = 1

_Mark = tuple[int, tuple[Any, ...]]


class PieceDump(msgspec.Struct, array_like=True):
    """A ``Piece``. ``parent`` and ``whole`` are positions in the list of pieces, -1 for none."""

    parent: int
    whole: int
    """The piece that this is the front of."""
    begin: int
    size: int
    hashes: list[int | bytes]
    """Of a front only their number matters, and they are left out."""
    count: int
    first: int
    keys: bytes
    last: int | None
    tail: list[int]
    marks: list[_Mark]
    beyond: list[tuple[int, list[tuple[int, int]]]]
    known: bool
    """Whether hashes lead here."""
    gone: list[int]
    """Those that no longer do, by position."""
    text: tuple[list[int], list[_Mark]] | None


class FeedDump(msgspec.Struct, array_like=True):
    """A ``Feed``. Its places are numbered by their position in ``places``."""

    holder: Holder
    ranks: list[int | None]
    places: list[tuple[int, int | None]]
    """Tier and group, as events name them."""
    pieces: list[PieceDump]
    idle: list[int | bytes]
    held: list[tuple[int, list[tuple[int | bytes, int, int]]]]
    cover: list[tuple[int, list[tuple[int, list[tuple[int | bytes, int, int]]]]]]
    orphans: list[tuple[int, Stored, list[int | bytes]]]
    nameless: list[tuple[int | bytes, list[tuple[int, int]]]]


class StreamDump(msgspec.Struct, array_like=True):
    """A ``Stream`` and its feeds."""

    stream: str
    topic: str
    seq: int
    state: State
    reason: str
    lost: bool
    ranks: list[int | None]
    ts: float
    feeds: list[FeedDump]


class RowsDump(msgspec.Struct, array_like=True):
    """What one place holds: runs of packed keys, and how often which were announced beyond the first time."""

    holder: Holder
    tier: int
    group: int | None
    runs: list[bytes]
    beyond: list[tuple[int, int]]


class IndexDump(msgspec.Struct):
    """An index at one moment."""

    format: int
    names: list[str]
    """How blocks are named: two indexes that differ in this can't understand each other."""
    groups: list[tuple[Holder, list[tuple[int | None, GroupSpec | None]]]]
    rows: list[RowsDump]
    streams: list[StreamDump]


def names_of(identity: Identity) -> list[str]:
    """What decides about request keys."""
    algorithm = identity.algorithm
    return [algorithm.name, algorithm.seed, str(identity.block_size), "direct" if identity.direct else "bridged"]


def dump(indexer: Indexer) -> IndexDump:
    """Everything ``indexer`` knows now. Changes nothing."""
    streams: list[StreamDump] = []
    rows: list[RowsDump] = []
    seen: set[int] = set()
    holders: set[Holder] = set()
    for (name, topic), stream in indexer.streams.items():
        feeds = indexer.feeds_of(name, topic)
        for feed in feeds:
            holders.add(feed.holder)
            for (tier, group), number in feed._numbers.items():
                if number not in seen:
                    seen.add(number)
                    rows.append(_rows(indexer, feed.holder, tier, group, number))
        streams.append(
            StreamDump(
                name,
                topic,
                stream.seq,
                stream.state,
                stream.reason,
                False,
                [],
                stream.ts,
                [_feed(feed, stream) for feed in feeds],
            )
        )
    groups = [(holder, list(indexer.catalog._seen.get(holder, {}).items())) for holder in sorted(holders)]
    return IndexDump(format=FORMAT, names=names_of(indexer.identity), groups=groups, rows=rows, streams=streams)


def load(indexer: Indexer, told: IndexDump, wanted: Collection[str], now: int = 0) -> list[StreamDump]:
    """Take over what a dump says of the streams ``wanted``, which must be registered and unheard so far.

    Streams that weren't fresh when the dump was made are left out, and so are those that share a holder with one that
    isn't taken over. Returns those that were. Raises ``KvyardError``, changing nothing, for a dump of another format or naming.
    """
    if told.format != FORMAT:
        raise KvyardError(
            f"the dump has format {told.format} and this is version {FORMAT}: use the same kvyard on both"
        )
    if told.names != names_of(indexer.identity):
        mine = ", ".join(names_of(indexer.identity))
        raise KvyardError(
            f"the dump names blocks by {', '.join(told.names)}, and this index by {mine}: make them equal"
        )
    taken = {
        one.stream: one for one in told.streams if one.stream in wanted and one.state == State.FRESH and not one.lost
    }
    heard = {name for name, _ in indexer.streams}
    feeding: dict[Holder, set[str]] = {}
    for one in told.streams:
        for feed in one.feeds:
            feeding.setdefault(feed.holder, set()).add(one.stream)
    while True:
        bad = {
            name
            for name, one in taken.items()
            if name in heard or any(not feeding[feed.holder] <= taken.keys() for feed in one.feeds)
        }
        if not bad:
            break
        for name in bad:
            del taken[name]
    chosen = [one for one in told.streams if one.stream in taken]
    groups = dict(told.groups)
    for one in chosen:
        for feed in one.feeds:
            if groups.get(feed.holder) and feed.holder not in indexer.catalog._seen:
                indexer.catalog._seen[feed.holder] = dict(groups[feed.holder])
                indexer.catalog._changed(feed.holder)
    numbers: dict[tuple[Holder, int, int | None], int] = {}
    for one in chosen:
        stream = indexer.adopt(one.stream, one.topic)
        stream.resume(one.seq, one.state, one.reason, one.ts, now)
        for part in one.feeds:
            feed_ = indexer.feed_for(one.stream, one.topic, part.holder, part.ranks)
            _load_feed(feed_, part)
            for tier, group in part.places:
                numbers[part.holder, tier, group] = feed_._place(Tier(tier), group)
    for row in told.rows:
        number = numbers.get((row.holder, row.tier, row.group))
        if number is None:
            continue
        for run in row.runs:
            keys = _unpacked(run).tolist()
            indexer.backend.store(number, keys, None)
        for key, count in row.beyond:
            for _ in range(count):
                indexer.dedup.repeated(number, [key])
    indexer.refresh(anew=True)
    return chosen


# -- one feed -------------------------------------------------------------------------------------------------------


def _rows(indexer: Indexer, holder: Holder, tier: int, group: int | None, number: int) -> RowsDump:
    beyond: Iterable[tuple[Any, int]] = indexer.dedup._beyond.get(number, {}).items()
    return RowsDump(holder, tier, group, [_packed(run) for run in indexer.backend.held(number)], list(beyond))


def _feed(feed: Feed, stream: Stream) -> FeedDump:
    at = {number: position for position, number in enumerate(feed._numbers.values())}
    parts, waiting = feed._parts, feed.waiting
    return FeedDump(
        holder=feed.holder,
        ranks=[rank for rank, known in stream.feeds.items() if known is feed],
        places=list(feed._numbers),
        pieces=_pieces(feed.bridge),
        idle=list(feed.bridge._idle),
        held=[
            (at[number], [(key, width, count) for key, (width, count) in held.items()])
            for number, held in parts._held.items()
        ],
        cover=[
            (at[number], [(ours, [(key, *span) for key, span in spans.items()]) for ours, spans in cover.items()])
            for number, cover in parts._cover.items()
        ],
        orphans=[
            (at[orphan.place], _plain(orphan.event), list(orphan.gone))
            for orphans in waiting._orphans.values()
            for orphan in orphans
        ],
        nameless=[
            (key, [(at[number], count) for number, count in places.items()])
            for key, places in waiting._nameless.items()
        ],
    )


def _load_feed(feed: Feed, told: FeedDump) -> None:
    numbers = [feed._place(Tier(tier), group) for tier, group in told.places]
    bridge, parts, waiting = feed.bridge, feed._parts, feed.waiting
    _load_pieces(bridge, told.pieces)
    bridge._idle = dict.fromkeys(told.idle)
    for at, held in told.held:
        parts._held[numbers[at]] = {key: (width, count) for key, width, count in held}
    for at, cover in told.cover:
        parts._cover[numbers[at]] = {ours: {key: (low, high) for key, low, high in spans} for ours, spans in cover}
    for at, event, gone in told.orphans:
        waiting.add_orphan(numbers[at], event)
        assert event.parent is not None
        waiting._orphans[event.parent][-1].gone = list(gone)
    for key, places in told.nameless:
        waiting._nameless[key] = {numbers[at]: count for at, count in places}


def _pieces(bridge: Bridge) -> list[PieceDump]:
    """Every piece that a bridge needs, each after those that it refers to."""
    order: dict[int, int] = {}
    out: list[PieceDump] = []
    for start in bridge._pieces.values():
        stack = [start]
        while stack:
            piece = stack[-1]
            if id(piece) in order:
                stack.pop()
                continue
            whole = bridge._pieces.get(piece.number) if isinstance(piece, _Front) else None
            first = [other for other in (piece.parent, whole) if other is not None and id(other) not in order]
            if first:
                stack += first
                continue
            stack.pop()
            parent = -1 if piece.parent is None else order[id(piece.parent)]
            order[id(piece)] = len(out)
            out.append(_piece(bridge, piece, parent, -1 if whole is None else order[id(whole)]))
    return out


def _piece(bridge: Bridge, piece: Piece, parent: int, whole: int) -> PieceDump:
    known = bridge._pieces.get(piece.number) is piece
    base = piece.number << _BITS
    gone = [at for at, key in enumerate(piece.hashes) if bridge._known.get(key) != base + at] if known else []
    text = bridge._texts.get(piece.number) if known else None
    return PieceDump(
        parent=parent,
        whole=whole,
        begin=piece.begin,
        size=piece.size,
        hashes=[] if whole >= 0 else list(piece.hashes),
        count=len(piece.hashes),
        first=piece.first,
        keys=b"" if whole >= 0 else _packed(piece.keys),
        last=piece.last,
        tail=list(piece.tail),
        marks=list(piece.tail_marks),
        beyond=[] if whole >= 0 else list(piece.beyond.items()),
        known=known,
        gone=gone,
        text=None if text is None else (list(text[0]), list(text[1])),
    )


def _load_pieces(bridge: Bridge, told: list[PieceDump]) -> None:
    size = bridge.identity.block_size
    made: list[Piece] = []
    for one in told:
        parent = made[one.parent] if one.parent >= 0 else None
        if one.whole >= 0:
            whole = made[one.whole]
            piece: Piece = _Front(whole, one.count)
            piece.parent = parent
            piece.keys = whole.keys[: piece.end // size - whole.first]
        else:
            piece = Piece(one.begin, one.size, list(one.hashes), parent)
            piece.first = one.first
            piece.keys = _unpacked(one.keys)
            piece.beyond = {block: list(ways) for block, ways in one.beyond}
        piece.last, piece.tail, piece.tail_marks = one.last, one.tail, list(one.marks)
        made.append(piece)
        if one.known:
            piece.number, bridge._next = bridge._next, bridge._next + 1
            gone = set(one.gone)
            base = piece.number << _BITS
            for at, key in enumerate(piece.hashes):
                if at not in gone:
                    bridge._known[key] = base + at
                    piece.alive += 1
            bridge._pieces[piece.number] = piece
            if one.text is not None:
                bridge._texts[piece.number] = (one.text[0], list(one.text[1]))


def _plain(event: Stored) -> Stored:
    """``event`` with lists in place of whatever packs its hashes and tokens."""
    tokens = None if event.tokens is None else list(event.tokens)
    return msgspec.structs.replace(event, hashes=list(event.hashes), tokens=tokens)


def _packed(keys: Iterable[int]) -> bytes:
    packed = array("Q", keys)
    return packed.tobytes()


def _unpacked(data: bytes) -> array[int]:
    keys = array("Q")
    keys.frombytes(data)
    return keys
