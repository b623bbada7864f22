"""Blocks of the index of which a place holds only parts, since an engine's blocks have another size."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from kvyard.hashing import Key
from kvyard.index.backend import IndexBackend
from kvyard.index.bridge import Bridge, TextSpan
from kvyard.index.dedup import DedupFilter
from kvyard.integers import ceil_div

HeldParts: TypeAlias = tuple[int, list[tuple[Key, int, int]]]
"""For a snapshot: a place, and its engine blocks with their width and count."""
CoveredBlocks: TypeAlias = tuple[int, list[tuple[int, list[tuple[Key, int, int]]]]]
"""For a snapshot: a place, and its blocks of ours, each with the engine blocks that cover it, from and to where."""


class Parts:
    """Blocks of ours that a place holds piecemeal, because engine blocks are smaller or don't line up.

    Our block counts as held only when engine blocks that are held cover all of it. Here a row doesn't say which engine blocks
    are, so they are written down; only streams with these blocks pay for it.
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
        """Return true if any place holds the engine block ``key``."""
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
        for block in range(start // self._size, ceil_div(end, self._size)):
            for ours in self._bridge.keys_at(span, block, end):
                self._cover_by(place, ours, key, self._overlap(block, start, end), storing, span, block)

    def straddle(self, span: TextSpan) -> None:
        """``span`` completed a block of ours that began before it: what is held of that counts from now on."""
        block, ours = span.first, span.keys[0]
        for before in self._bridge.straddled(span):
            for index, key in enumerate(before.hashes):
                end = before.begin + (index + 1) * before.size
                for place, held in self._held.items():
                    if key in held and end > block * self._size:
                        part = self._overlap(block, end - held[key][0], end)
                        self._cover_by(place, ours, key, part, True, span, block)

    def clear(self, place: int) -> None:
        """Forget what ``place`` holds; the caller clears its rows."""
        self._held.pop(place, None)
        self._cover.pop(place, None)

    def snapshot(self, numbers: Mapping[int, int]) -> tuple[list[HeldParts], list[CoveredBlocks]]:
        """Return the held and covered blocks by place, as ``numbers`` has them."""
        held = [
            (numbers[place], [(key, width, count) for key, (width, count) in keys.items()])
            for place, keys in self._held.items()
        ]
        cover = [
            (numbers[place], [(ours, [(key, *part) for key, part in parts.items()]) for ours, parts in blocks.items()])
            for place, blocks in self._cover.items()
        ]
        return held, cover

    def restore(self, numbers: Sequence[int], held: Iterable[HeldParts], cover: Iterable[CoveredBlocks]) -> None:
        """Hold the copies of a snapshot, whose places have these ``numbers`` here."""
        for number, keys in held:
            self._held[numbers[number]] = {key: (width, count) for key, width, count in keys}
        for number, blocks in cover:
            self._cover[numbers[number]] = {
                ours: {key: (low, high) for key, low, high in parts} for ours, parts in blocks
            }

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
