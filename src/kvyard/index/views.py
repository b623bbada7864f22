"""Views: the places that count for each worker, computed once and kept until something changes.

For each worker and each level (a tier and all closer ones) a view has the places of each of its groups: its own and those of
the pools it shares, without places fed by a stream that has lost trust.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

from kvyard.blocks.agreement import Agreement
from kvyard.blocks.spans import Spans
from kvyard.events.types import Tier
from kvyard.index.backend import Rows
from kvyard.index.bits import bits, mask_of
from kvyard.index.catalog import Catalog, GroupLayout
from kvyard.index.places import Holder, Place, Places
from kvyard.integers import ceil_div

Member: TypeAlias = tuple[int, tuple[int, ...]]
"""A plain worker: its position, and per group the places that count."""

_FEW = 64


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
        self._by_place: dict[int, int] = {}
        """By place the workers that count it, where each has one group."""
        if self._pieces is not None:
            for position, (wanted,) in members:
                for place in bits(wanted):
                    self._by_place[place] = self._by_place.get(place, 0) | 1 << position
        self.same = self._pieces is not None and all(workers == 1 << place for place, workers in self._by_place.items())
        """True if a row's places are numbered as the workers are, so that a row is its own answer, except for ``counted``."""
        self.counted = mask_of(self._by_place) if self.same else 0
        """The places that any worker counts."""

    def work_out(self, row: int) -> int:
        """Return the workers of a row that isn't known yet."""
        if len(self.known) > 1 << 14:
            self.known.clear()
        pieces = self._pieces
        if pieces is None:
            workers = self._have(row)
        elif row.bit_count() <= _FEW:
            workers = 0
            for place in bits(row):
                workers |= self._by_place.get(place, 0)
        else:
            workers = 0
            for index, byte in enumerate(row.to_bytes((row.bit_length() + 7) // 8, "little")):
                if byte:
                    piece = pieces.get(index << 8 | byte)
                    if piece is None:
                        piece = 0
                        for place in bits(byte << index * 8):
                            piece |= self._by_place.get(place, 0)
                        pieces[index << 8 | byte] = piece
                    workers |= piece
        self.known[row] = workers
        return workers

    def _have(self, row: int) -> int:
        return sum(1 << slot for slot, groups in self._members if all(row & wanted for wanted in groups))


class WorkerView:
    """One worker: which places count for its groups, and the rule of ``kvyard.blocks.agreement``, asked with rows."""

    __slots__ = ("_agreement", "block_size", "layout", "levels", "plain", "worker")

    def __init__(self, worker: Holder, layout: GroupLayout, plain: bool, block_size: int) -> None:
        """``plain`` is the layout's; ``block_size`` is the index's."""
        self.worker = worker
        self.layout = layout
        self.plain = plain
        self.block_size = block_size
        self._agreement: Agreement | None = None
        self.levels: list[tuple[int, ...]] = []
        """Per level, per group of the layout, the places that count."""

    @property
    def agreement(self) -> Agreement:
        """The rule of its groups: made when it is first asked for, since most workers have one group and need none."""
        if self._agreement is None:
            layout = self.layout
            self._agreement = Agreement(layout.specs, [spec.eagle for spec in layout.specs], layout.alignment)
        return self._agreement

    @property
    def widest(self) -> tuple[int, ...]:
        """Per group, the places that count on any tier."""
        return self.levels[-1] if self.levels else (0,) * len(self.layout.groups)

    def spans(self, group: int, rows: Rows, mask: int) -> Spans:
        """Return the intervals, in blocks of the layout's ``group``, that places in ``mask`` hold."""
        spec, ours = self.layout.specs[group], self.block_size
        size = spec.block_size
        spans: list[tuple[int, int]] = []
        start, low = 0, -1
        for stop, row in [*rows, (0, 0)]:
            if row & mask:
                if low < 0:
                    low = start
            elif low >= 0:
                if spec.is_state:
                    _add_states(spans, low * ours, start * ours, ours, size)
                elif ceil_div(low * ours, size) < start * ours // size:
                    spans.append((ceil_div(low * ours, size), start * ours // size))
                low = -1
            start = stop
        return spans

    def limiting(self, rows: Rows, limit: int) -> int | None:
        """Return the group that reaches least far by itself, of ``limit`` tokens."""
        if len(self.layout.groups) == 1:
            return self.layout.groups[0]
        reach = [
            (spec.rule().match(self.spans(group, rows, mask), limit, self.layout.alignment, False).tokens, group)
            for group, (spec, mask) in enumerate(zip(self.layout.specs, self.widest, strict=True))
        ]
        return self.layout.groups[min(reach)[1]]


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
        present = {places.all[number].tier for numbers in places.of.values() for number in numbers}
        self.tiers = [tier for tier in tiers if tier in present]
        self.all: dict[Holder, WorkerView] = {}
        """Workers whose groups are known."""
        self.unknown: dict[Holder, str] = {}
        """The others, and why they aren't."""
        plain: dict[int, bool] = {}  # by layout, of which a large fleet has few
        for worker in workers:
            layout = catalog.layout(worker)
            if isinstance(layout, str):
                self.unknown[worker] = layout
                continue
            is_plain = plain.get(id(layout))
            if is_plain is None:
                is_plain = plain[id(layout)] = layout.is_plain
            self.all[worker] = view = WorkerView(worker, layout, is_plain, block_size)
            self._fill(view, places, untrusted)
        self.plain = [view for view in self.all.values() if view.plain]
        self.hybrid = [view for view in self.all.values() if not view.plain]
        self.coarse = [view for view in self.plain if view.layout.alignment != block_size]
        """Plain workers whose blocks are larger than ours: two texts may part inside one of theirs."""
        self.through_holes = any(not any(spec.is_full for spec in view.layout.specs) for view in self.hybrid)
        """True if any worker can use a prompt's end without having its start."""
        self._folds: list[RowFold] | None = None
        self.named: dict[int, dict[Holder, None]] = {}
        """Cached results of ``names``; read this first."""

    @property
    def folds(self) -> list[RowFold]:
        """Per level, rows as sets of plain workers, by position in ``plain``. A router has its own, by its own positions."""
        if self._folds is None:
            self._folds = [
                RowFold([(slot, view.levels[level]) for slot, view in enumerate(self.plain)])
                for level in range(len(self.tiers))
            ]
        return self._folds

    def names(self, workers: int) -> dict[Holder, None]:
        """Return the workers of a fold. A dict, since that keeps their hashes: answers are made from it by the million."""
        named = self.named.get(workers)
        if named is None:
            if len(self.named) > 1 << 16:
                self.named.clear()
            named = self.named[workers] = {self.plain[slot].worker: None for slot in bits(workers)}
        return named

    def _fill(self, view: WorkerView, places: Places, untrusted: int) -> None:
        trusted = [*places.of.get(view.worker, ())]
        for pool in places.pools(view.worker):
            trusted += places.of.get(pool, ())
        if untrusted:
            trusted = [number for number in trusted if not untrusted >> number & 1]
        if len(trusted) == 1 and len(self.tiers) == 1 and len(view.layout.groups) == 1:  # as most have it
            place = places.all[trusted[0]]
            counts = place.tier == self.tiers[0] and _group_in(view.layout, place) == view.layout.groups[0]
            view.levels.append((1 << trusted[0] if counts else 0,))
            return
        masks: dict[int | None, int] = dict.fromkeys(view.layout.groups, 0)
        for tier in self.tiers:
            for number in trusted:
                place = places.all[number]
                if place.tier == tier:
                    group = _group_in(view.layout, place)
                    if group in masks:
                        masks[group] |= 1 << number
            view.levels.append(tuple(masks.values()))


def _group_in(layout: GroupLayout, place: Place) -> int | None:
    """Return the group of a layout that a place is about: where either side has one group only, it need not be named."""
    single = len(layout.groups) == 1
    if single and (place.group is None or layout.groups[0] is None) and place.group in (None, 0):
        return layout.groups[0]
    return place.group


def _add_states(spans: list[tuple[int, int]], start: int, stop: int, ours: int, size: int) -> None:
    """States are points: block p of the group is there where ours ends at the same token, and is held."""
    step = math.lcm(ours, size)
    for end in range(start // step * step + step, stop + 1, step):
        low = end // size - 1
        if spans and spans[-1][1] == low:
            spans[-1] = (spans[-1][0], low + 1)
        else:
            spans.append((low, low + 1))
