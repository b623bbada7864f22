"""Compressed tree of prompts, with a number per worker on every node.

It is used twice: for active prompts by worker (``active``) and for prefixes sent lately (``memory``). A node is a run of
blocks. A chained key names its whole prefix, so a run is compared by its last key alone, and the position where two prompts
part is found by bisection. All work goes by the number of nodes on a prompt's path, none by its blocks, but for the one
copy of what is new.

The tree knows keys and small numbers for workers (slots). The owner decides what the number on a node means, and ensures
that a node's workers are always among those of its parent.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvyard.hashing.prefix_tree import parting


class PromptNode:
    """Blocks ``start`` to ``stop`` of some prompt, where nothing branches off."""

    __slots__ = ("base", "children", "held", "keys", "mask", "parent", "start", "stop")

    def __init__(self, parent: "PromptNode | None", keys: Sequence[int], base: int, start: int, stop: int) -> None:
        self.parent = parent
        self.keys = keys
        """Holds at least this run; its first key is that of block ``base``."""
        self.base = base
        self.start = start
        self.stop = stop
        self.children: dict[int, PromptNode] = {}
        self.held: dict[int, int] = {}
        """The number per worker."""
        self.mask = 0
        """Workers that count, as bits."""


def last_keys(end: PromptNode, count: int) -> list[int]:
    """Return keys of the last ``count`` blocks of the prompt that ends with ``end``, or of all."""
    keys: list[int] = []
    node: PromptNode | None = end
    while node is not None and len(keys) < count:
        low = max(node.start, node.stop - count + len(keys))
        keys[:0] = node.keys[low - node.base : node.stop - node.base]
        node = node.parent
    return keys


Path: TypeAlias = tuple[list[PromptNode], int]
"""The nodes on a prompt's path, the last perhaps only in part; and the number of blocks of the prompt that they cover."""


class PrefixTree:
    """Nodes by the blocks before them."""

    def __init__(self) -> None:
        self.root = PromptNode(None, (), 0, 0, 0)
        self.size = 0
        """Blocks in the tree, each once per worker that has it."""

    def find(self, keys: Sequence[int]) -> Path:
        """Return the known part of a prompt as nodes."""
        path: list[PromptNode] = []
        count = len(keys)
        children = self.root.children
        block = 0
        while block < count:
            node = children.get(keys[block])
            if node is None:
                break
            path.append(node)
            stop = node.stop if node.stop < count else count
            if node.keys[stop - 1 - node.base] != keys[stop - 1]:
                return path, parting(node.keys, keys, block, stop - 1, node.base)
            block = stop
            if stop < node.stop:
                break
            children = node.children
        return path, block

    def extend(self, keys: Sequence[int], known: Path) -> list[PromptNode]:
        """Make the whole prompt a path and return it; ``known`` is the result of ``find``. The new node has no workers yet."""
        path, covered = known
        if path and covered < path[-1].stop:
            path[-1] = self._split(path[-1], covered)
        count = len(keys)
        if covered < count:
            parent = path[-1] if path else self.root
            if isinstance(keys, list | array):
                node = PromptNode(parent, keys[covered:], covered, covered, count)
            else:
                node = PromptNode(parent, keys, 0, covered, count)  # made on demand: nothing to copy, nothing to save
            parent.children[keys[covered]] = node
            path.append(node)
        return path

    def leave(self, node: PromptNode, slot: int) -> None:
        """Remove ``slot`` from this node. The owner goes from the end of a path towards the root."""
        del node.held[slot]
        self.size -= node.stop - node.start
        if node.held:
            node.mask ^= node.mask & 1 << slot  # no complement: these may have thousands of bits
            return
        parent = node.parent
        assert parent is not None and not node.children, "a node outlived the one before it"
        del parent.children[node.keys[node.start - node.base]]
        node.parent = None

    def settle(self, node: PromptNode) -> None:
        """Join ``node`` with its child, if it has just one and both have equal workers."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.held != node.held or child.mask != node.mask:
            return
        if child.base > node.start:
            child.keys = _joined_keys(node, child)
            child.base = node.start
        child.start = node.start
        child.parent = node.parent
        node.parent.children[child.keys[child.start - child.base]] = child
        node.parent = None
        node.held = {}
        node.children = {}

    def levels(self, known: Path) -> list[tuple[int, int]]:
        """Return the workers' prefixes of the prompt: numbers of blocks, most first, each with the slots, as bits, that
        have exactly as many. Cost goes by the nodes on the path, however many slots there are.
        """
        path, covered = known
        out: list[tuple[int, int]] = []
        if not path:
            return out
        alive = path[0].mask
        start = 0
        for node in path:
            mask = node.mask
            if mask != alive:
                if start and alive ^ mask:
                    out.append((start, alive ^ mask))
                alive = mask
            start = node.stop
        if alive and covered:
            out.append((covered, alive))
        out.reverse()
        return out

    def remove(self, slot: int) -> None:
        """Remove everything that ``slot`` has. Goes through the whole tree."""
        for node in reversed([node for node in self.walk() if slot in node.held]):
            self.leave(node, slot)
        for node in list(self.walk()):
            self.settle(node)

    def walk(self) -> Iterator[PromptNode]:
        """Yield every node, each after its parent."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless the tree agrees with itself. For tests and audits."""
        size = 0
        for node in self.walk():
            parent = node.parent
            assert parent is not None, "a node without one before it"
            assert node.start == parent.stop < node.stop, f"{node.start} to {node.stop} doesn't follow {parent.stop}"
            assert parent.children.get(node.keys[node.start - node.base]) is node, "a node under another's key"
            assert node.held and not node.mask & ~sum(1 << slot for slot in node.held), "a bit without a number"
            if parent is not self.root:
                assert node.held.keys() <= parent.held.keys(), "a worker has an end without its start"
                assert not node.mask & ~parent.mask, "an end counts without its start"
            size += (node.stop - node.start) * len(node.held)
        assert size == self.size, f"{self.size} blocks are counted, {size} are there"

    def _split(self, node: PromptNode, position: int) -> PromptNode:
        """Cut a node in two; ``node`` stays the latter part, since what ends there ends there still."""
        parent = node.parent
        assert parent is not None
        head = PromptNode(parent, node.keys, node.base, node.start, position)
        parent.children[node.keys[node.start - node.base]] = head
        head.children[node.keys[position - node.base]] = node
        head.held = node.held.copy()
        head.mask = node.mask
        node.parent = head
        node.start = position
        return head


def _joined_keys(node: PromptNode, child: PromptNode) -> Sequence[int]:
    first, then = _keys(node), _keys(child)
    if isinstance(first, array) and isinstance(then, array) and first.typecode == then.typecode:
        first.extend(then)  # a copy, and packed: as a list, a long prompt would take five times as much and far longer
        return first
    return [*first, *then]


def _keys(node: PromptNode) -> Sequence[int]:
    """Copy a node's own keys."""
    start, stop, keys = node.start - node.base, node.stop - node.base, node.keys
    return keys[start:stop] if isinstance(keys, list | array) else [keys[index] for index in range(start, stop)]
