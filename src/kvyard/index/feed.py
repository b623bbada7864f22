"""A feed: the events of one stream for one holder, applied to the index. Here decoding ends and counting begins.

For every event it settles, in this order: which place is meant, which text the hashes name (``Bridge``, or directly),
whether the index holds that already, and what the dedup filter makes of it. Only what was resolved takes effect and only
what took effect is counted. What can't be resolved yet waits, bounded: stores whose parent is unknown for the parent, and
hashes without text for an event of the same stream that says what they name. A removal that comes while they wait undoes them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvyard.events.types import Event, Removed, Stored, Tier
from kvyard.hashing import HashingError, Key, wire_hash
from kvyard.index.backend import IndexBackend
from kvyard.index.bridge import Bridge, SpanSnapshot, TextSpan
from kvyard.index.catalog import Catalog
from kvyard.index.dedup import DedupFilter
from kvyard.index.identity import Identity, IdentityError
from kvyard.index.places import Holder, Place, Places

Orphaned: TypeAlias = tuple[int, Stored, list[Key]]
"""For a snapshot: a place, a store whose parent isn't known, and the hashes of it that were removed meanwhile."""
Nameless: TypeAlias = tuple[Key, list[tuple[int, int]]]
"""For a snapshot: a hash without text, and how often each place announced it."""


class _Orphan(msgspec.Struct, eq=False):
    place: int
    event: Stored
    gone: list[Key] = []
    """Hashes of it that were removed meanwhile."""


class Waiting:
    """What waits: stores whose parent isn't known yet, and hashes without text. Bounded; the oldest go first.

    An index that starts in the middle of a stream, or whose stream reorders groups, would otherwise lose such stores for good,
    and all that continues them (llm-d #372).
    """

    def __init__(self, limit: int) -> None:
        """``limit`` bounds the hashes that wait."""
        self.limit = limit
        self.dropped = 0
        """Hashes that waited too long."""
        self._orphans: dict[Key, list[_Orphan]] = {}
        """By parent."""
        self._orphaned = 0
        """Hashes of all of them."""
        self._announcing: dict[tuple[int, Key], list[_Orphan]] = {}
        """Per place and hash the orphans that a removal can still be about: each once."""
        self._nameless: dict[Key, dict[int, int]] = {}
        """Per hash how often each place announced it."""

    def __len__(self) -> int:
        return self._orphaned + len(self._nameless)

    def __bool__(self) -> bool:
        return bool(self._orphans or self._nameless)

    def add_orphan(self, place: int, event: Stored) -> None:
        """``event`` waits for its parent."""
        self._add(_Orphan(place, event))
        self._bound()

    def add_nameless(self, place: int, hashes: Sequence[Key]) -> None:
        """``hashes`` wait for a store that says what they name."""
        for key in hashes:
            places = self._nameless.setdefault(key, {})
            places[place] = places.get(place, 0) + 1
        self._bound()

    def named(self, hashes: Sequence[Key]) -> Iterator[tuple[int, list[Key]]]:
        """``hashes`` have a text now: the places that announced some of them, once per announcement. They wait no longer."""
        if not self._nameless:
            return
        ready: dict[tuple[int, int], list[Key]] = {}
        for key in hashes:
            for place, count in self._nameless.pop(key, {}).items():
                for turn in range(count):
                    ready.setdefault((place, turn), []).append(key)
        for (place, _), keys in ready.items():
            yield place, keys

    def parented(self, hashes: Sequence[Key]) -> Iterator[tuple[Stored, list[Key]]]:
        """``hashes`` are known now: the stores that continue them, and what was removed of each meanwhile."""
        if not self._orphans:
            return
        for key in hashes:
            for orphan in self._orphans.pop(key, ()):
                self._unlist(orphan)
                yield orphan.event, orphan.gone

    def undo(self, place: int, hashes: Sequence[Key]) -> list[Key]:
        """``hashes`` were removed: one announcement of each that waits no longer does. Returns the others."""
        rest: list[Key] = []
        for key in hashes:
            orphans = self._announcing.get((place, key))
            places = self._nameless.get(key)
            if orphans:
                orphans.pop(0).gone.append(key)
                if not orphans:
                    del self._announcing[place, key]
            elif places is not None and place in places:
                places[place] -= 1
                if not places[place]:
                    self._forget_nameless(key, place)
            else:
                rest.append(key)
        return rest

    def clear(self, place: int) -> None:
        """Nothing waits for ``place`` any more."""
        for parent, orphans in list(self._orphans.items()):
            for orphan in orphans:
                if orphan.place == place:
                    self._unlist(orphan)
            self._orphans[parent] = [orphan for orphan in orphans if orphan.place != place]
            if not self._orphans[parent]:
                del self._orphans[parent]
        for key in list(self._nameless):
            self._forget_nameless(key, place)

    def clear_all(self) -> None:
        """Nothing waits."""
        self._orphans.clear()
        self._announcing.clear()
        self._nameless.clear()
        self._orphaned = 0

    def snapshot(self, at: Mapping[int, int]) -> tuple[list[Orphaned], list[Nameless]]:
        """All that waits, with places as ``at`` numbers them."""
        orphans = [
            (at[orphan.place], _plain(orphan.event), list(orphan.gone))
            for orphans in self._orphans.values()
            for orphan in orphans
        ]
        nameless = [
            (key, [(at[place], count) for place, count in places.items()]) for key, places in self._nameless.items()
        ]
        return orphans, nameless

    def restore(self, numbers: Sequence[int], orphans: Iterable[Orphaned], nameless: Iterable[Nameless]) -> None:
        """Let wait what a snapshot says, whose places have these ``numbers`` here."""
        for at, event, gone in orphans:
            self._add(_Orphan(numbers[at], event))
            self.undo(numbers[at], gone)
        for key, places in nameless:
            self._nameless[key] = {numbers[at]: count for at, count in places}
        self._bound()

    def _add(self, orphan: _Orphan) -> None:
        event = orphan.event
        assert event.parent is not None
        self._orphans.setdefault(event.parent, []).append(orphan)
        self._orphaned += len(event.hashes)
        for key in event.hashes:
            self._announcing.setdefault((orphan.place, key), []).append(orphan)

    def _unlist(self, orphan: _Orphan) -> None:
        """It no longer waits."""
        self._orphaned -= len(orphan.event.hashes)
        for key in orphan.event.hashes:
            orphans = self._announcing.get((orphan.place, key), [])
            if orphan in orphans:
                orphans.remove(orphan)
                if not orphans:
                    del self._announcing[orphan.place, key]

    def _forget_nameless(self, key: Key, place: int) -> None:
        places = self._nameless[key]
        places.pop(place, None)
        if not places:
            del self._nameless[key]

    def _bound(self) -> None:
        while len(self) > self.limit:
            if self._nameless:
                del self._nameless[next(iter(self._nameless))]
                self.dropped += 1
            else:
                for orphan in self._orphans.pop(next(iter(self._orphans))):
                    self._unlist(orphan)
                    self.dropped += len(orphan.event.hashes)


def _plain(event: Stored) -> Stored:
    """``event`` with lists in place of what packs its hashes and tokens."""
    tokens = None if event.tokens is None else list(event.tokens)
    return msgspec.structs.replace(event, hashes=list(event.hashes), tokens=tokens)


HeldParts: TypeAlias = tuple[int, list[tuple[Key, int, int]]]
"""For a snapshot: a place, and its engine blocks with their width and count."""
CoveredBlocks: TypeAlias = tuple[int, list[tuple[int, list[tuple[Key, int, int]]]]]
"""For a snapshot: a place, and its blocks of ours, each with the engine blocks that cover it, from and to where."""


class Parts:
    """Blocks of ours that a place holds piecemeal, because engine blocks are smaller or don't line up.

    Our block counts as held only when engine blocks that are held cover all of it. Here a row doesn't say which engine blocks
    are, so they are written down; only streams with such blocks pay for it.
    """

    def __init__(self, bridge: Bridge, backend: IndexBackend, dedup: DedupFilter) -> None:
        self._bridge = bridge
        self._backend = backend
        self._dedup = dedup
        self._size = bridge.identity.block_size
        self._held: dict[int, dict[Key, tuple[int, int]]] = {}
        """Per place the engine blocks that it holds, their width in tokens, and how often they were announced."""
        self._cover: dict[int, dict[int, dict[Key, tuple[int, int]]]] = {}
        """Per place our blocks that are held at least in part: by which engine blocks, from and to which token of ours. Where
        two texts part inside an engine block, a block of ours before that is covered by both."""

    def holds(self, key: Key) -> bool:
        """Whether any place holds the engine block ``key``."""
        return any(key in held for held in self._held.values())

    def change(self, place: int, key: Key, span: TextSpan, end: int, width: int, storing: bool) -> None:
        """The engine block ``key``, the ``width`` tokens of ``span`` before ``end``, was announced or taken back."""
        held = self._held.setdefault(place, {})
        count = held[key][1] if key in held else 0
        if storing:
            held[key] = (width, count + 1)
            if count:
                return
        elif count > 1:
            held[key] = (width, count - 1)
            self._dedup.counters.suppressed += 1
            return
        elif not count:
            return
        else:
            del held[key]
        start = end - width
        for block in range(start // self._size, -(-end // self._size)):
            for ours in self._bridge.keys_at(span, block, end):
                self._cover_by(place, ours, key, self._overlap(block, start, end), storing, span, block)

    def straddle(self, span: TextSpan) -> None:
        """``span`` completed a block of ours that began before it: what is held of that counts from now on."""
        block, ours = span.first, span.keys[0]
        for before in self._bridge.straddled(span):
            for at, key in enumerate(before.hashes):
                end = before.begin + (at + 1) * before.size
                for place, held in self._held.items():
                    if key in held and end > block * self._size:
                        part = self._overlap(block, end - held[key][0], end)
                        self._cover_by(place, ours, key, part, True, span, block)

    def clear(self, place: int) -> None:
        """``place`` holds nothing; its rows are the caller's to clear."""
        self._held.pop(place, None)
        self._cover.pop(place, None)

    def snapshot(self, at: Mapping[int, int]) -> tuple[list[HeldParts], list[CoveredBlocks]]:
        """What is held and covered, by place, as ``at`` numbers them."""
        held = [
            (at[place], [(key, width, count) for key, (width, count) in keys.items()])
            for place, keys in self._held.items()
        ]
        cover = [
            (at[place], [(ours, [(key, *part) for key, part in parts.items()]) for ours, parts in blocks.items()])
            for place, blocks in self._cover.items()
        ]
        return held, cover

    def restore(self, numbers: Sequence[int], held: Iterable[HeldParts], cover: Iterable[CoveredBlocks]) -> None:
        """Hold what a snapshot says, whose places have these ``numbers`` here."""
        for at, keys in held:
            self._held[numbers[at]] = {key: (width, count) for key, width, count in keys}
        for at, blocks in cover:
            self._cover[numbers[at]] = {ours: {key: (low, high) for key, low, high in parts} for ours, parts in blocks}

    def _overlap(self, block: int, start: int, end: int) -> tuple[int, int]:
        size = self._size
        return max(start - block * size, 0), min(end - block * size, size)

    def _cover_by(
        self, place: int, ours: int, key: Key, part: tuple[int, int], storing: bool, span: TextSpan, block: int
    ) -> None:
        """``key`` covers ``part`` of our block, number ``block`` on a way through ``span``, or no longer does."""
        cover = self._cover.setdefault(place, {})
        parts = cover.setdefault(ours, {})
        was = self._whole(parts)
        if storing:
            parts[key] = part
        else:
            parts.pop(key, None)
        now = self._whole(parts)
        if not parts:
            del cover[ours]
        if now and not was:
            before = self._bridge.keys_between(span, block - 1, block) if block else []
            self._dedup.repeated(place, self._backend.store(place, [ours], before[0] if before else None))
        elif was and not now:
            self._backend.remove(place, self._dedup.removed(place, [ours]))

    def _whole(self, parts: dict[Key, tuple[int, int]]) -> bool:
        # Engine blocks of one width never overlap but where they are at the same place.
        return sum(high - low for low, high in set(parts.values())) == self._size

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless our blocks are covered by what is held, and once."""
        for place, cover in self._cover.items():
            held = self._held.get(place, {})
            for parts in cover.values():
                assert parts and parts.keys() <= held.keys(), "a block is covered by what isn't held"
                assert sum(high - low for low, high in set(parts.values())) <= self._size, "a block is covered twice"


class FeedCounters(msgspec.Struct):
    """What became of events; blocks unless they say otherwise."""

    stored: int = 0
    """Resolved and stored, repetitions included."""
    removed: int = 0
    unresolved: int = 0
    """Hashes of stores without text, where no event before said it either; they wait."""
    orphans: int = 0
    """Stored with an unknown parent; they wait."""
    refused: int = 0
    """Stores that can't be named: adapters in direct mode, extra keys without a place, another block size."""
    last_refusal: str = ""


class FeedSnapshot(msgspec.Struct, array_like=True):
    """A ``Feed``. Its places are numbered by their position in ``places``."""

    holder: Holder
    ranks: list[int | None]
    """Of the updates that go to it."""
    places: list[tuple[int, int | None]]
    """Tier and group, as events name them."""
    spans: list[SpanSnapshot]
    idle: list[int | bytes]
    held: list[HeldParts]
    cover: list[CoveredBlocks]
    orphans: list[Orphaned]
    nameless: list[Nameless]


class Feed:
    """One stream's share of one holder's places."""

    def __init__(
        self,
        holder: Holder,
        places: Places,
        backend: IndexBackend,
        dedup: DedupFilter,
        catalog: Catalog,
        identity: Identity,
        *,
        waiting: int = 1 << 16,
        remembered: int = 1 << 16,
    ) -> None:
        """``waiting`` bounds, in blocks, what waits, and ``remembered`` what the bridge keeps of hashes no longer held."""
        self.holder = holder
        self.counters = FeedCounters()
        self.bridge = Bridge(identity, remembered=remembered)
        self.waiting = Waiting(waiting)
        self.mask = 0
        """The places that this feed ever stored to."""
        self._places = places
        self._backend = backend
        self._dedup = dedup
        self._catalog = catalog
        self._identity = identity
        self._size = identity.block_size
        self.parts = Parts(self.bridge, backend, dedup)
        self.places: dict[tuple[int, int | None], int] = {}
        """The numbers of its places, by tier and group as events name them."""
        self._said: tuple[object, ...] = ()
        """What the last store said of its group and tier: most say the same again."""
        self._last = 0
        """The place that it meant."""

    def apply(self, events: Iterable[Event], clear_all: bool = False) -> None:
        """Take in ``events`` in order. ``clear_all``: a clear that names no tier means every tier."""
        for event in events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            else:
                self.clear(None if event.tier is None and clear_all else event.tier or Tier.G1)

    def clear(self, tier: Tier | None = None) -> None:
        """Empty this feed's places, of one tier or all; rows, counts, parts and what waits go together."""
        for (of, _), number in self.places.items():
            if tier is None or of == tier:
                self._backend.clear(number)
                self._dedup.clear(number)
                self.parts.clear(number)
                self.waiting.clear(number)
        self._said = ()
        if tier is None:
            self.bridge.clear()
            self.waiting.clear_all()
        else:
            self.bridge.rest_unless(self._held)

    # -- stores -----------------------------------------------------------------------------------------------------

    def _store(self, event: Stored) -> None:
        identity, hashes = self._identity, event.hashes
        said = (event.group, event.tier, event.block_size, event.kind)
        if said != self._said:
            self._catalog.learn(self.holder, event, self._size if identity.direct else 0)
        if not hashes:
            return
        if said != self._said:
            self._last = self._place(event.tier, event.group)
            self._said = said
        place = self._last
        if identity.direct:
            self._store_direct(place, event, hashes)
            return
        bridge, tokens = self.bridge, event.tokens
        if not isinstance(hashes, list):
            hashes = list(hashes)
        if tokens is None or not event.block_size or len(tokens) != event.block_size * len(hashes):
            self._store_by_hash(place, hashes)
            return
        if event.parent is not None and event.parent not in bridge and hashes[0] not in bridge:
            self.counters.orphans += len(hashes)
            self.waiting.add_orphan(place, event)
            return
        try:
            span = bridge.announce(event, hashes)
        except (IdentityError, HashingError) as error:
            self._refuse(str(error), len(hashes))
            return
        whole = span is not None and span.hashes is hashes and self._store_span(place, event, span)
        if not whole:
            self._store_by_hash(place, hashes)
        if span is not None:
            if span.begin % self._size and len(span.keys):
                self.parts.straddle(span)
            self._resume(span)

    def _store_span(self, place: int, event: Stored, span: TextSpan) -> bool:
        """Store a new span as a whole, where its blocks end where ours do."""
        size = self._size
        spec = self._catalog.spec(self.holder, self._catalog.group(self.holder, event.group))
        if span.size % size or span.begin % size:
            return False
        if spec is not None and (spec.is_state or spec.block_size != span.size):
            return False
        self._store_keys(place, span.keys.tolist(), span.parent.last if span.parent is not None else None)
        self.counters.stored += len(span.hashes)
        return True

    def _store_by_hash(self, place: int, hashes: Sequence[Key]) -> None:
        """Store hashes whose text is known already, each by itself; the others wait for it."""
        known = [key for key in hashes if key in self.bridge]
        if lacking := [key for key in hashes if key not in self.bridge]:
            self.counters.unresolved += len(lacking)
            self.waiting.add_nameless(place, lacking)
        self.bridge.wake(known)
        for keys in self._runs(place, known, storing=True):
            self._store_keys(place, keys)

    def _store_direct(self, place: int, event: Stored, hashes: Sequence[Key]) -> None:
        size = event.block_size
        if event.lora_name is not None:
            self._refuse("an adapter's blocks can't be named in direct mode", len(hashes))
        elif size and size != self._size:
            self._refuse(f"blocks of {size} tokens where the index has {self._size}", len(hashes))
        else:
            keys = self._identity.direct_keys(hashes)
            parent = event.parent
            if parent is not None and (not isinstance(parent, int) or parent < 0):
                parent = wire_hash(parent)
            self._store_keys(place, keys, parent)
            self.counters.stored += len(keys)

    def _store_keys(self, place: int, keys: list[int], parent: int | None = None) -> None:
        repeated = self._backend.store(place, keys, parent)
        if repeated:
            self._dedup.repeated(place, repeated)

    def _resume(self, span: TextSpan) -> None:
        """Apply what waited for ``span``."""
        for place, known in self.waiting.named(span.hashes):
            for keys in self._runs(place, known, storing=True):
                self._store_keys(place, keys)
        for event, gone in self.waiting.parented(span.hashes):
            self._store(event)
            if gone:
                self._remove(Removed(hashes=gone, group=event.group, tier=event.tier))

    # -- removals ---------------------------------------------------------------------------------------------------

    def _remove(self, event: Removed) -> None:
        place = self._place(event.tier, event.group)
        if self._identity.direct:
            keys = self._identity.direct_keys(event.hashes)
            self.counters.removed += len(keys)
            self._backend.remove(place, self._dedup.removed(place, keys))
            return
        hashes: Sequence[Key] = event.hashes
        if self.waiting:
            hashes = self.waiting.undo(place, hashes)
        known = [key for key in hashes if key in self.bridge]
        gone = [key for run in self._runs(place, known, storing=False) for key in run]
        self._backend.remove(place, self._dedup.removed(place, gone))
        for key in known:
            if not self._held(key):
                self.bridge.rest(key)

    # -- hashes and keys --------------------------------------------------------------------------------------------

    def _runs(self, place: int, hashes: Sequence[Key], storing: bool) -> list[list[int]]:
        """The request keys that ``hashes`` stand for at ``place``, in runs.

        What covers our blocks only in part is taken care of here and not returned.
        """
        spec = self._catalog.spec(self.holder, self._places[place].group)
        size = self._size
        runs: list[list[int]] = []
        last_span: TextSpan | None = None
        last_end = -1
        for key in hashes:
            found = self.bridge.find(key)
            assert found is not None
            span, at = found
            end = span.begin + (at + 1) * span.size
            width = span.size if spec is None else spec.block_size
            if end % width:
                continue  # it ends inside one of its group's blocks, and serves only its engine
            if storing:
                self.counters.stored += 1
            else:
                self.counters.removed += 1
            if spec is not None and spec.is_state:
                # A state is a point: of use where one of our blocks ends too, and covering nothing.
                if end % size:
                    continue
                width = size
            if end % size or width % size:
                self.parts.change(place, key, span, end, width, storing)
                continue
            keys = self.bridge.keys_between(span, (end - width) // size, end // size)
            if span is last_span and end - width == last_end:
                runs[-1] += keys
            else:
                runs.append(keys)
            last_span, last_end = span, end
        return runs

    def _held(self, key: Key) -> bool:
        """Whether any of this feed's places holds ``key``, as far as rows can tell."""
        found = self.bridge.find(key)
        if found is None:
            return False
        span, at = found
        block, rest = divmod(span.begin + (at + 1) * span.size, self._size)
        if (rest or span.size % self._size) and self.parts.holds(key):
            return True
        last = [] if rest else self.bridge.keys_between(span, block - 1, block)
        return bool(last) and any(self._backend.holds(number, last[0]) for number in self.places.values())

    def _place(self, tier: Tier, group: int | None) -> int:
        number = self.places.get((tier._value_, group))  # the plain attribute: ``value`` goes a long way round
        if number is None:
            named = self._catalog.group(self.holder, group)
            number = self.places[tier._value_, group] = self._places.number(Place(self.holder, tier, named))
            self.mask |= 1 << number
            self._places.version += 1
        return number

    def _refuse(self, why: str, blocks: int) -> None:
        self.counters.refused += blocks
        self.counters.last_refusal = why

    # -- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self, ranks: Sequence[int | None]) -> FeedSnapshot:
        """All that it knows but rows and counts, which are the index's."""
        at = {number: position for position, number in enumerate(self.places.values())}
        return FeedSnapshot(
            self.holder,
            list(ranks),
            list(self.places),
            *self.bridge.snapshot(),
            *self.parts.snapshot(at),
            *self.waiting.snapshot(at),
        )

    def restore(self, snapshot: FeedSnapshot) -> None:
        """Know what another feed of this holder knew. To be called before anything else; rows and counts are the caller's."""
        numbers = [self._place(Tier(tier), group) for tier, group in snapshot.places]
        self.bridge.restore(snapshot.spans, snapshot.idle)
        self.parts.restore(numbers, snapshot.held, snapshot.cover)
        self.waiting.restore(numbers, snapshot.orphans, snapshot.nameless)
