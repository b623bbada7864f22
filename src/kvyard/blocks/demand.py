"""What an allocation finds and what it asks: the two values that pass between manager, coordinator and groups."""

from __future__ import annotations

from kvyard.blocks.extent import Extent, Node


class GroupHit:
    """What a lookup found for one group: blocks ``low`` to ``blocks`` are cached, those before are null."""

    __slots__ = ("blocks", "low", "nodes", "tail")

    def __init__(self, blocks: int, low: int, nodes: list[Node], tail: Extent | None = None) -> None:
        self.blocks = blocks
        self.low = low
        self.nodes = nodes
        self.tail = tail
        """The last block, where the hit ends inside it and it is known by a mark only."""

    def parts(self) -> list[Node]:
        """``nodes``, and what others split off them since the lookup: the earlier part of a node is its parent."""
        at = 0
        for node in self.nodes:
            if node.start != at:
                break
            at = node.stop
        else:
            return self.nodes
        parts: list[Node] = []
        at = 0
        for node in self.nodes:
            split = [node]
            while split[-1].start > at:
                parent = split[-1].parent
                assert parent is not None
                split.append(parent)
            parts += reversed(split)
            at = node.stop
        return parts

    def free_blocks(self, skip: int) -> int:
        """How many of its blocks from position ``skip`` on have no reference, so that pinning them uses up free ones."""
        blocks, low, nodes, tail = self.blocks, self.low, self.nodes, self.tail
        if skip > low:
            low = skip
        high = blocks if tail is None else blocks - 1
        total = 0
        for node in nodes if len(nodes) == 1 and not nodes[0].start else self.parts():
            first = node.start if node.start > low else low
            last = node.stop if node.stop < high else high
            if first < last and not node.copies[0].refs:
                total += last - first
        if tail is not None and low < blocks and not tail.refs:
            total += 1
        return total

    def ids(self) -> list[int]:
        """The physical ids, 0 for null, as long as the hit."""
        listed = [0] * self.blocks
        for node in self.parts():
            low, high = max(self.low, node.start), min(self.blocks - (self.tail is not None), node.stop)
            if low < high:
                listed[low:high] = node.copies[0].ids[low - node.start : high - node.start]
        if self.tail is not None:
            listed[-1:] = self.tail.ids
        return listed


NO_HIT = GroupHit(0, 0, [])


class Demand:
    """What an allocation asks of every group."""

    __slots__ = ("encoder", "local", "main", "slots", "total", "whole")

    def __init__(self, slots: int, main: int, local: int, total: int, encoder: int = 0, whole: bool = False) -> None:
        self.slots = slots
        """Tokens that need a slot, look-ahead included."""
        self.main = main
        """Tokens that need a slot without look-ahead."""
        self.local = local
        """Tokens that are computed here: before, and by the hit."""
        self.total = total
        """Tokens that are computed here or will be loaded."""
        self.encoder = encoder
        """Encoder tokens, for cross attention."""
        self.whole = whole
        """Whether this is for the admission of a whole sequence: no more counts than it can ever hold at once."""

    def unloaded(self) -> Demand:
        """The same with nothing loaded."""
        return Demand(self.slots, self.main, self.local, self.local, self.encoder, self.whole)
