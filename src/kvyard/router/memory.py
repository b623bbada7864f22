"""Memory of recent routing: prefixes that a worker was sent, kept for a while.

It has two uses. ``approx`` routes by it alone, for engines that announce nothing. ``kv`` credits a prefix by it between
routing and the events that announce it, and stops as soon as the index knows as much (``confirm``).

Bounded in time and in blocks; the least recently sent prefixes are dropped first. It can't know of evictions.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from kvyard.router.tree import Path, PrefixTree, PromptNode

_FEW = 8
_Sent: TypeAlias = tuple[int, int, int, PromptNode, int]
"""A prompt that was sent: its number, when, the slot, where it ends, and how many of its blocks counted there already."""


class RoutedMemory:
    """Prefixes by worker. The number on a node is the entry that touched it last."""

    def __init__(self, ttl: int | None, max_blocks: int) -> None:
        """Evict after ``ttl`` nanoseconds (``None``: never), and beyond ``max_blocks``, counted once per worker."""
        self.ttl = ttl
        self.max_blocks = max_blocks
        self.tree = PrefixTree()
        self._entries: deque[_Sent] = deque()
        """Oldest first."""
        self._number = 0

    def expire(self, now: int) -> None:
        """Evict entries that are too old at ``now``."""
        entries, ttl = self._entries, self.ttl
        if ttl is not None:
            while entries and entries[0][1] + ttl <= now:
                self._forget(entries.popleft())

    def remember(self, slot: int, keys: Sequence[int], known: Path, now: int) -> int:
        """Note that ``slot`` was sent a prompt. ``known`` is what ``tree.find`` returned, with nothing changed since. Returns a
        number by which the note can be taken back; 0 for a prompt without blocks.
        """
        tree = self.tree
        path = tree.extend(keys, known)
        if not path:
            return 0
        self._number += 1
        before = 0
        bit = 1 << slot
        for node in path:
            if node.mask & bit:
                before = node.stop
            node.mask |= bit
            if slot not in node.held:
                tree.size += node.stop - node.start
            node.held[slot] = self._number
        self._entries.append((self._number, now, slot, path[-1], before))
        while tree.size > self.max_blocks and len(self._entries) > 1:
            self._forget(self._entries.popleft())
        return self._number

    def withdraw(self, number: int) -> None:
        """Remove the prompt that got ``number``, which was never computed: only what counts because of it.

        Where nodes were joined since, an earlier prompt's part of them may go too: a prediction less, never one too many.
        Scans everything that is kept, which is cheap enough: few requests are refused.
        """
        entries, tree = self._entries, self.tree
        place = bisect_left(entries, number, key=_number_of)
        if place == len(entries) or entries[place][0] != number:
            return  # evicted already
        _, _, slot, node, before = entries[place]
        del entries[place]
        ends = {end: other for other, _, to, end, _ in entries if to == slot}  # the latest of each: they are in order
        while node is not tree.root and node.held.get(slot) == number:
            parent = node.parent
            assert parent is not None
            below = max([child.held.get(slot, 0) for child in node.children.values()], default=0)
            others = max(below, ends.get(node, 0))
            if others:
                node.held[slot] = others
                if node.start >= before:
                    node.mask &= ~(1 << slot)  # the index knew of it by then
            else:
                tree.leave(node, slot)
                tree.settle(node if node.held else parent)
            node = parent

    def confirm(self, match: Path, reach: Sequence[tuple[int, int]]) -> None:
        """The index knows of these numbers of blocks of a prompt, most first, each with the slots, as bits, that have as many:
        what ends within them counts no longer.
        """
        path, covered = match
        node = path[-1]
        if node.stop != covered:
            return
        known = 0
        for blocks, mask in reach:
            if blocks < covered:
                break
            known |= mask
        self._strike(node, known & node.mask)

    def _strike(self, node: PromptNode, known: int) -> None:
        # Their entries stay until their time has come; only the bits go. A stem of many branches isn't worth the search.
        while known and node.parent is not None and len(node.children) <= _FEW:
            for child in node.children.values():
                known &= ~child.mask
            node.mask &= ~known
            node = node.parent

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the memory agrees with itself."""
        self.tree.check_integrity()
        for node in self.tree.walk():
            for slot, number in node.held.items():
                assert number <= self._number
                parent = node.parent
                assert parent is self.tree.root or parent is None or parent.held[slot] >= number

    def _forget(self, entry: _Sent) -> None:
        """Take a prompt off its path, from the end, up to what was sent again later."""
        number, _, slot, node, _ = entry
        tree = self.tree
        while node is not tree.root and node.held.get(slot, number + 1) <= number:
            parent = node.parent
            assert parent is not None
            tree.leave(node, slot)
            tree.settle(node if node.held else parent)
            node = parent


def _number_of(entry: _Sent) -> int:
    return entry[0]
