"""A feed: the events of one stream for one holder, applied to the index.

For every event it determines, in this order: the place, the text that the hashes name (``Bridge``, or directly), the blocks
that the index holds already, and the counts of the dedup filter. Only resolved events take effect, and only effects are
counted. Unresolved events wait, within bounds: stores with an unknown parent wait for the parent, and hashes without text
wait for an event of the same stream that gives their text. A removal cancels them while they wait.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from kvyard.events.types import Event, Removed, Stored, Tier
from kvyard.events.wire.decoded import Problem, ProblemKind
from kvyard.hashing import HashingError, Key, wire_hash
from kvyard.index.backend import IndexBackend
from kvyard.index.bridge import Bridge, SpanSnapshot, TextSpan
from kvyard.index.catalog import Catalog
from kvyard.index.dedup import DedupFilter
from kvyard.index.identity import Identity, IdentityError
from kvyard.index.parts import CoveredBlocks, HeldParts, Parts
from kvyard.index.places import Holder, Place, Places
from kvyard.index.tree_windows import TreeWindows, computed, tree_windows
from kvyard.index.waiting import Nameless, Orphaned, WaitingStores

log = logging.getLogger(__name__)


class FeedCounters(msgspec.Struct):
    """Counters of events by their effect, in blocks unless the name has another unit."""

    stored: int = 0
    """Resolved and stored, repetitions included."""
    removed: int = 0
    unresolved: int = 0
    """Hashes of stores without tokens that no earlier event had either; they wait."""
    orphans: int = 0
    """Stored with an unknown parent; they wait."""
    refused: int = 0
    """Stores that can't be named: adapters in direct mode, extra keys without a place, another block size."""
    failed: int = 0
    """Events that couldn't be taken in, for reasons that weren't thought of. Their blocks don't count as held."""
    last_refusal: str = ""


class FeedSnapshot(msgspec.Struct, array_like=True):
    """A ``Feed``. Its places are numbered by their position in ``places``."""

    holder: Holder
    ranks: list[int | None]
    """Ranks of the updates that go to it."""
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
        self.waiting = WaitingStores(waiting)
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
        self._described: tuple[object, ...] = ()
        """Group and tier of the latest store: most stores repeat them."""
        self._last = 0
        """The place that it meant."""
        self._windows: TreeWindows | None = None
        self._windows_of = -1
        """The catalog's version that this follows from."""

    def apply(self, events: Iterable[Event], clear_all: bool = False) -> None:
        """Take in ``events`` in order. ``clear_all``: a clear that names no tier means every tier."""
        windows = self._windows if self._windows_of == self._catalog.version else self._tree_windows()
        for event in events:
            try:
                if isinstance(event, Stored):
                    if windows is None or event.group is not None:
                        self._store(event)
                    else:
                        for part in windows.stores(event):
                            self._store(part)
                elif isinstance(event, Removed):
                    if windows is None or event.group is not None:
                        self._remove(event)
                    else:
                        for gone in windows.removals(event):
                            self._remove(gone)
                else:
                    self.clear(None if event.tier is None and clear_all else event.tier or Tier.G1)
            except Exception as error:
                self._give_up(event, error)

    def _tree_windows(self) -> TreeWindows | None:
        """Return the division of events that name no group among the worker's groups; ``None`` if it has one."""
        if self._windows_of != self._catalog.version:
            self._windows_of = self._catalog.version
            layout = self._catalog.configured(self.holder)
            self._windows = tree_windows(layout, self._size, self.bridge, self._holds) if layout is not None else None
        return self._windows

    def computed(self, tokens: int, last: Callable[[int], Sequence[int]]) -> None:
        """The holder has computed a prompt of ``tokens`` tokens, of which ``last`` returns the keys of the last whole blocks,
        given their number. Store what it has of windows then and no event tells of. Blocks must be the size of ours.
        """
        windows = self._tree_windows()
        layout = self._catalog.configured(self.holder)
        if windows is None or layout is None or any(spec.block_size != self._size for spec in layout.specs):
            return
        holds, full = self._backend.holds, [self._place(Tier.G1, group) for group in windows.full]
        for group, reach in windows.windows:
            place = self._place(Tier.G1, group)
            ends = computed(last(reach + 2), not tokens % self._size, reach, partial(holds, place))
            if all(holds(number, key) for number in full for key in ends):
                lacking = [key for key in ends if not holds(place, key)]
                if lacking:
                    self._store_keys(place, lacking)

    def report(self, problems: Iterable[Problem]) -> None:
        """Count announcements that can't be used since they name a place that isn't known."""
        for problem in problems:
            if problem.kind is ProblemKind.MEDIUM:
                self._refuse(problem.reason, 1)
                log.warning("an announcement of %s can't be used: %s", self.holder, problem.reason)

    def _give_up(self, event: Event, error: Exception) -> None:
        """Drop an event that raised an unexpected error, and all that it may have changed: none of its blocks are held.
        Raises if that fails too, and the stream must be read again.
        """
        if not isinstance(event, Stored | Removed):
            raise error
        self.counters.failed += 1
        self.counters.last_refusal = f"{type(error).__name__}: {error}"[:300]
        log.error("an event of %s can't be applied: %s", self.holder, self.counters.last_refusal, exc_info=error)
        self._remove(Removed(hashes=event.hashes, group=event.group, tier=event.tier))

    def clear(self, tier: Tier | None = None) -> None:
        """Empty this feed's places, of one tier or all; rows, counts, parts and what waits go together."""
        for (of, _), number in self.places.items():
            if tier is None or of == tier:
                self._backend.clear(number)
                self._dedup.clear(number)
                self.parts.clear(number)
                self.waiting.clear(number)
        self._described = ()
        if tier is None:
            self.bridge.clear()
            self.waiting.clear_all()
        else:
            self.bridge.rest_unless(self._held)

    # -- stores -----------------------------------------------------------------------------------------------------

    def _store(self, event: Stored) -> None:
        identity, hashes = self._identity, event.hashes
        described = (event.group, event.tier, event.block_size, event.kind)
        if described != self._described:
            self._catalog.learn(self.holder, event, self._size if identity.direct else 0)
        if not hashes:
            return
        if described != self._described:
            self._last = self._place(event.tier, event.group)
            self._described = described
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
        if event.lora_name is not None or event.lora_id:
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
        """Return the request keys that ``hashes`` stand for at ``place``, in runs.

        What covers our blocks only in part is taken care of here and not returned.
        """
        spec = self._catalog.spec(self.holder, self._places[place].group)
        size = self._size
        runs: list[list[int]] = []
        last_span: TextSpan | None = None
        last_end = -1
        for key in hashes:
            location = self.bridge.find(key)
            assert location is not None
            span, index = location
            end = span.begin + (index + 1) * span.size
            width = span.size if spec is None else spec.block_size
            if end % width:
                continue  # it ends inside one of its group's blocks, and serves only its engine
            if storing:
                self.counters.stored += 1
            else:
                self.counters.removed += 1
            if spec is not None and spec.is_state:
                # A state is a point: of use if one of our blocks ends too, and covering nothing.
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
        """Return true if any of this feed's places holds ``key``, according to the rows."""
        location = self.bridge.find(key)
        if location is None:
            return False
        span, index = location
        block, rest = divmod(span.begin + (index + 1) * span.size, self._size)
        if (rest or span.size % self._size) and self.parts.holds(key):
            return True
        if rest:
            return False
        holds = self._backend.holds
        for last in self.bridge.keys_between(span, block - 1, block):
            for number in self.places.values():
                if holds(number, last):
                    return True
        return False

    def _holds(self, tier: Tier, group: int, key: Key) -> bool:
        """True if a place has all of a block, whose size is a multiple of ours."""
        number, place = self.places.get((tier._value_, group)), self.bridge.find(key)
        if number is None or place is None:
            return False
        span, index = place
        block = (span.begin + (index + 1) * span.size) // self._size
        last = self.bridge.keys_between(span, block - 1, block)
        return bool(last) and self._backend.holds(number, last[0])

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
        """Return its state but rows and counts, which are the index's."""
        positions = {number: position for position, number in enumerate(self.places.values())}
        return FeedSnapshot(
            self.holder,
            list(ranks),
            list(self.places),
            *self.bridge.snapshot(),
            *self.parts.snapshot(positions),
            *self.waiting.snapshot(positions),
        )

    def restore(self, snapshot: FeedSnapshot) -> None:
        """Know what another feed of this holder knew. To be called before anything else; rows and counts are the caller's."""
        numbers = [self._place(Tier(tier), group) for tier, group in snapshot.places]
        self.bridge.restore(snapshot.spans, snapshot.idle)
        self.parts.restore(numbers, snapshot.held, snapshot.cover)
        self.waiting.restore(numbers, snapshot.orphans, snapshot.nameless)
