"""Slots for states of recurrent layers (Mamba) beside a radix tree of full attention, as SGLang keeps them.

A running request has a slot of its own. Where it is inserted, the node at its end gets a copy of its state, in another slot; a
prefix can be reused where it ends with a node that has a state. A node may lose its state and keep its pages. A request locks
the state that it began with, or that it was last inserted with.

Without slots for tracking, the only state of a request is that of its last token. With them, states are kept at positions
inside its prompt and its answer as well, and it is inserted up to the latest of these.
"""

from typing import NamedTuple

from kvyard.blocks.eviction.radix import NodePart, use_of
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.node_parts import NodeParts


class StateTracking(NamedTuple):
    """Positions inside requests at which states are kept."""

    slots: int
    """Slots that a request has for them, beside its own."""
    grid: int
    """Tokens of a prompt between two states that could be kept, from where its computation begins."""
    interval: int
    """Tokens between two states in an answer."""
    noted: bool = False
    """True if what is kept of answers is noted pass by pass (``Held.kept``): with drafts, and where slots are taken lazily."""
    lazy: bool = False
    """True if the slot that a state of an answer is written to is taken for the pass that writes it."""

    def in_prompt(self, past: int, new: int, branch: int) -> int:
        """Return the position of the state that is kept of a chunk of ``new`` tokens after ``past``: the last one, or
        ``branch``, where the prompt leaves the tree; 0 for none.
        """
        if new < self.grid:
            return 0
        if past < branch < past + new and not (branch - past) % self.grid:
            return branch
        return past + new // self.grid * self.grid

    def in_answer(self, prompt: int, tokens: int, missed: list[int]) -> int:
        """Return the position of the latest state of an answer that was not ``missed``; 0 for none. Prompt and answer have
        ``tokens`` tokens, the prompt has ``prompt``.
        """
        latest = tokens // self.interval * self.interval
        while latest in missed:
            latest -= self.interval
        return latest if latest > prompt else 0


class StateSlots(NodeParts):
    """The state slots of one engine: how many are free, and which nodes have states, in order of use."""

    def __init__(self, slots: int, tracking: StateTracking | None = None) -> None:
        super().__init__(slots)
        self.tracking = tracking
        """Positions of states inside requests, if they are kept."""

    # -- the tree ---------------------------------------------------------------------------------------------------

    @staticmethod
    def usable(nodes: list[Node]) -> int:
        """Return how many of ``nodes``, which lead down from the root, a request can reuse."""
        count = len(nodes)
        while count and not state_of(nodes[count - 1].copies[0]).present:
            count -= 1
        return count

    def use(self, node: Node) -> None:
        """Mark the state of ``node``, with which a match ends, as the latest used."""
        self.line.renew(state_of(node.copies[0]))

    def give(self, extent: Extent) -> bool:
        """Move a request's slot and state to a node. Returns false if the node has a state, which then counts as used."""
        part = state_of(extent)
        if part.present:
            self.line.renew(part)
            self.free += 1
            return False
        self._enter(part, extent, 1)
        return True

    def evict(self, extent: Extent) -> None:
        """Free the state of a node, if it has one; no request may have locked it."""
        part = state_of(extent)
        if part.present:
            self._evict(part, 1)

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def per_request(self) -> int:
        """Slots that a running request has."""
        return 1 + (self.tracking.slots if self.tracking is not None else 0)

    def lock(self, node: Node) -> None:
        """Lock the state of ``node`` for a request that began with it or was inserted up to it."""
        self._lock(state_of(node.copies[0]), 1)

    def unlock(self, node: Node) -> None:
        """Release one lock of the state of ``node``."""
        self._unlock(state_of(node.copies[0]), 1)


def state_of(extent: Extent) -> NodePart:
    """Return the state of a node's extent, a new one if it has none."""
    use = use_of(extent)
    part = use.state
    if part is None:
        part = use.state = NodePart(extent)
    return part
