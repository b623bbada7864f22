"""Ids for a recording: the same prefix gets the same small number, and the numbers say nothing of the text.

Names of blocks are chained hashes, so each stands for all the text before it, and would give a text away to anyone who can
guess it. They never leave this process: what is written is the order in which prefixes were first seen. The rest of a
prompt behind its last full block is named by a hash with a key that ends with the process.

The ids are kept in a tree of runs: names that followed each other whenever they were seen, eight bytes each, with ids that
follow each other too. So a prompt costs a comparison per run and not a lookup per block. Memory is bounded: the end that
went longest without being seen goes first. A prefix that was evicted and comes back has new ids: a recording may understate
what is shared, never overstate it.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from kvyard.hashing.prefix_tree import parting


class _IdRange(msgspec.Struct, eq=False):
    """Names in a row, after those of its parent."""

    names: array[int]
    first: int
    """The id of the first name; the others' follow it."""
    parent: _IdRange | None
    seen: int
    """The number of the last prompt that was here."""
    children: dict[int, _IdRange] = {}
    """By their first name."""


class PrefixIds:
    """Numbers for prefixes, from 0 in the order of their first sight."""

    def __init__(self, remembered: int) -> None:
        """Keep this many prefixes, and one prompt more."""
        self.forgotten = 0
        """Prefixes that were evicted."""
        self._most = remembered
        self._size = 0
        self._next = 0
        self._prompts = 0
        self._nodes = 0
        self._roots: dict[str | None, _IdRange] = {}
        self._ends: deque[tuple[int, _IdRange]] = deque()
        """Ends of prompts, and their numbers, in order; those seen again since have a later entry."""
        self._secret = secrets.token_bytes(32)

    def __len__(self) -> int:
        """Return the number of prefixes kept."""
        return self._size

    def name(self, parts: Sequence[int], before: int) -> int:
        """Return a name for what is no full block: its ``parts`` (keys or tokens, below 2^64), after the block ``before``."""
        digest = blake2b(array("Q", (before, *parts)).tobytes(), digest_size=8, key=self._secret)
        return int.from_bytes(digest.digest(), "little")

    def of(self, names: Sequence[int], space: str | None = None) -> array[int]:
        """Return the ids of a prompt's prefixes, shortest first. Nothing is shared between spaces, such as models."""
        wanted = array("Q", names)
        ids = array("Q")
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = _IdRange(array("Q"), 0, None, 0)
        self._prompts += 1
        node, index, end = root, 0, len(wanted)
        while index < end:
            child = node.children.get(wanted[index])
            if child is None:
                node = self._grow(node, wanted[index:])
                ids.extend(range(node.first, self._next))
                break
            alike = _alike(child.names, wanted, index)
            ids.extend(range(child.first, child.first + alike))
            index += alike
            if alike < len(child.names) and index < end:
                child = self._split(child, alike)
            child.seen = self._prompts
            node = child
        if node is not root:
            self._ends.append((self._prompts, node))
            self._forget()
        return ids

    def fresh(self, count: int) -> range:
        """Return ids that no other prefix gets."""
        start = self._next
        self._next += count
        return range(start, start + count)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the tree agrees with itself."""
        size = nodes = 0
        waiting = list(self._roots.values())
        ends = set(self._ends)
        while waiting:
            node = waiting.pop()
            for name, child in node.children.items():
                assert child.parent is node and child.names[0] == name, "a run isn't where it belongs"
                assert node.parent is None or node.seen >= child.seen, "a prefix was seen before what follows it"
                assert child.children or (child.seen, child) in ends, "an end can't be forgotten"
                size += len(child.names)
                nodes += 1
                waiting.append(child)
        assert (size, nodes) == (self._size, self._nodes), "the size has drifted"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _grow(self, parent: _IdRange, names: array[int]) -> _IdRange:
        node = parent.children[names[0]] = _IdRange(names, self._next, parent, self._prompts)
        self._next += len(names)
        self._size += len(names)
        self._nodes += 1
        return node

    def _split(self, node: _IdRange, position: int) -> _IdRange:
        """Split off the first ``position`` names. The rest keeps its identity, so that ends still lead to it."""
        parent = node.parent
        assert parent is not None
        upper = parent.children[node.names[0]] = _IdRange(node.names[:position], node.first, parent, node.seen)
        node.names = node.names[position:]
        node.first += position
        node.parent = upper
        upper.children[node.names[0]] = node
        self._nodes += 1
        return upper

    def _forget(self) -> None:
        """Keep to the bound, and free entries without a meaning."""
        ends = self._ends
        while self._size > self._most and len(ends) > 1:
            self._prune(*ends.popleft())
        if len(ends) > 1024 + 2 * self._nodes:
            self._ends = deque(entry for entry in ends if entry[1].seen == entry[0] and not entry[1].children)

    def _prune(self, number: int, node: _IdRange) -> None:
        """Remove an end, and what is an end then, up to where later prompts were."""
        while node.parent is not None and node.seen <= number and not node.children:
            parent = node.parent
            del parent.children[node.names[0]]
            self.forgotten += len(node.names)
            self._size -= len(node.names)
            self._nodes -= 1
            node.parent = None
            node = parent


def _alike(names: array[int], wanted: array[int], start: int) -> int:
    """Return how many names of a run ``wanted`` has from ``start`` on; the first is known to be equal."""
    most = min(len(names), len(wanted) - start)
    if names[:most] == wanted[start : start + most]:
        return most
    return parting(names, wanted, 0, most - 1, 0, -start)
