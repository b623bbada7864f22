"""What went where lately: prefixes that a worker was sent, remembered for a while.

Two things are made of it. ``approx`` routes by it alone, for engines that announce nothing. ``kv`` credits a prefix by it
between routing and the events that tell of it, and lets go as soon as the index knows as much (``confirm``).

Bounded in time and in blocks; what went longest without being sent again goes first. It can't know of evictions.
"""

from collections import deque
from collections.abc import Sequence

from kvyard.index.places import bits
from kvyard.router.tree import Path, PrefixTree, PromptStretch

_FEW = 8


class RoutedMemory:
    """Prefixes by worker. The number on a stretch says which entry touched it last."""

    def __init__(self, ttl: int | None, max_blocks: int) -> None:
        """Forget after ``ttl`` nanoseconds (``None``: never), and beyond ``max_blocks``, counted once per worker."""
        self.ttl = ttl
        self.max_blocks = max_blocks
        self.tree = PrefixTree()
        self._entries: deque[tuple[int, int, int, PromptStretch]] = deque()
        """(number, when, slot, where it ends), oldest first."""
        self._number = 0

    def expire(self, now: int) -> None:
        """Forget what is too old at ``now``."""
        entries, ttl = self._entries, self.ttl
        if ttl is not None:
            while entries and entries[0][1] + ttl <= now:
                self._forget(entries.popleft())

    def remember(self, slot: int, keys: Sequence[int], found: Path, now: int) -> None:
        """``slot`` was sent a prompt. ``found`` is what ``tree.find`` says of it, with nothing changed since."""
        tree = self.tree
        path = tree.extend(keys, found)
        if not path:
            return
        self._number += 1
        for node in path:
            node.mask |= 1 << slot
            if slot not in node.held:
                tree.size += node.stop - node.start
            node.held[slot] = self._number
        self._entries.append((self._number, now, slot, path[-1]))
        while tree.size > self.max_blocks and len(self._entries) > 1:
            self._forget(self._entries.popleft())

    def confirm(self, found: Path, reach: Sequence[int]) -> None:
        """The index knows of the first ``reach`` blocks of a prompt, by slot: what ends within them counts no longer."""
        path, at = found
        node = path[-1]
        if node.stop != at:
            return
        known = 0
        for slot in bits(node.mask):
            if reach[slot] >= at:
                known |= 1 << slot
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

    def _forget(self, entry: tuple[int, int, int, PromptStretch]) -> None:
        """Take a prompt off its path, from the end, up to what was sent again later."""
        number, _, slot, node = entry
        tree = self.tree
        while node is not tree.root and node.held.get(slot, number + 1) <= number:
            parent = node.parent
            assert parent is not None
            tree.leave(node, slot)
            tree.settle(node if node.held else parent)
            node = parent
