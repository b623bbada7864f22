"""Views: what the scorer must know of every worker before it can read rows, worked out once and kept until something changes.

For each worker and each level (a tier and all closer ones): which places count for which of its groups. Its own do, those
of the pools it shares do too, and those fed by a stream that can't be trusted don't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kvyard.events.types import Tier
from kvyard.index.catalog import Catalog, GroupLayout
from kvyard.index.places import Holder, Place, Places, bits
from kvyard.index.usable import Usable

Member: TypeAlias = tuple[int, tuple[int, ...]]
"""A plain worker: its position, and per group the places that count."""


class RowFold:
    """Rows, as sets of places, to the workers that have them in every group, as bits by position.

    With many workers hardly two rows are alike. Where each has one group, as most do, an unknown row is put together from its
    bytes, which are few and known.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.known: dict[int, int] = {}
        """Every row worked out so far: look here first."""
        self._members = members
        self._pieces: dict[int, int] | None = {} if all(len(groups) == 1 for _, groups in members) else None

    def work_out(self, row: int) -> int:
        """The workers of a row that isn't known yet."""
        if len(self.known) > 1 << 14:
            self.known.clear()
        pieces = self._pieces
        if pieces is None:
            found = self._have(row)
        else:
            found = 0
            for at, byte in enumerate(row.to_bytes((row.bit_length() + 7) // 8, "little")):
                if byte:
                    piece = pieces.get(at << 8 | byte)
                    if piece is None:
                        piece = pieces[at << 8 | byte] = self._have(byte << at * 8)
                    found |= piece
        self.known[row] = found
        return found

    def _have(self, row: int) -> int:
        return sum(1 << at for at, groups in self._members if all(row & wanted for wanted in groups))


class WorkerView:
    """One worker."""

    __slots__ = ("alignment", "every", "layout", "levels", "usable", "why", "worker")

    def __init__(self, worker: Holder, layout: GroupLayout | None, why: str, block_size: int) -> None:
        self.worker = worker
        self.layout = layout
        self.alignment = layout.alignment if layout is not None else 1
        self.why = why
        self.usable = Usable(layout, block_size) if layout is not None else None
        self.levels: list[tuple[int, ...]] = []
        """Per level, per group of the layout, the places that count."""
        self.every = 0
        """All of those."""


class Views:
    """All workers, at one state of places, catalog and trust."""

    def __init__(
        self,
        places: Places,
        catalog: Catalog,
        workers: Sequence[Holder],
        tiers: Sequence[Tier],
        untrusted: int,
        block_size: int,
    ) -> None:
        """``tiers`` are those that count, closest first."""
        present = {places[number].tier for holder in places.of for number in places.of.get(holder, ())}
        self.tiers = [tier for tier in tiers if tier in present]
        self.all: dict[Holder, WorkerView] = {}
        for worker in workers:
            view = WorkerView(worker, catalog.layout(worker), catalog.why(worker), block_size)
            self.all[worker] = view
            if view.layout is not None:
                self._fill(view, places, catalog, untrusted)
        self.plain = [view for view in self.all.values() if view.layout is not None and view.layout.is_plain]
        self.hybrid = [view for view in self.all.values() if view.layout is not None and not view.layout.is_plain]
        self.coarse = [view for view in self.plain if view.alignment % block_size or view.alignment > block_size]
        """Plain workers whose blocks are larger than ours: two texts may part inside one of theirs."""
        self.through_holes = any(not _has_full(view) for view in self.hybrid)
        """Whether any worker can use a prompt's end without having its start."""
        self.folds = [
            RowFold([(at, view.levels[level]) for at, view in enumerate(self.plain)])
            for level in range(len(self.tiers))
        ]
        """Per level, rows as sets of plain workers, by position in ``plain``."""
        self.named: dict[int, dict[Holder, None]] = {}
        """What ``names`` has worked out so far: look here first."""

    def names(self, workers: int) -> dict[Holder, None]:
        """The workers of a fold. A dict, since that keeps their hashes: answers are made from it by the million."""
        found = self.named.get(workers)
        if found is None:
            if len(self.named) > 1 << 16:
                self.named.clear()
            found = self.named[workers] = {self.plain[at].worker: None for at in bits(workers)}
        return found

    def _fill(self, view: WorkerView, places: Places, catalog: Catalog, untrusted: int) -> None:
        layout = view.layout
        assert layout is not None
        own = [(number, places[number]) for number in places.of.get(view.worker, ())]
        lent = [(number, places[number]) for pool in places.pools(view.worker) for number in places.of.get(pool, ())]
        masks: Mapping[int | None, int]
        for level in range(len(self.tiers)):
            counted = set(self.tiers[: level + 1])
            masks = dict.fromkeys(layout.groups, 0)
            for number, place in [*own, *lent]:
                group = _group_in(layout, place)
                if place.tier in counted and group in masks and not untrusted >> number & 1:
                    masks[group] |= 1 << number
            view.levels.append(tuple(masks[group] for group in layout.groups))
            for mask in view.levels[-1]:
                view.every |= mask


def _has_full(view: WorkerView) -> bool:
    return view.layout is not None and any(spec.is_full for spec in view.layout.specs)


def _group_in(layout: GroupLayout, place: Place) -> int | None:
    """The group of a layout that a place is about: where either side has one group only, it need not be named."""
    single = len(layout.groups) == 1
    if single and (place.group is None or layout.groups[0] is None) and place.group in (None, 0):
        return layout.groups[0]
    return place.group
