"""What a policy gets to see: the request, the workers that may be chosen, their load, and what each has of the prompt.

Figures are lists by slot (a worker's number in this router). Overlaps come from the index, with what was routed but not
announced yet on top; or from memory alone, for engines that announce nothing. A policy doesn't see where from.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from kvyard.engine.role import Role
from kvyard.router.active import ActiveLoads
from kvyard.router.pace import Pace
from kvyard.router.request import RouteRequest


class Overlaps:
    """How many blocks of the prompt's prefix each worker has: a list by slot for the device, then for each tier below it
    what that one adds.
    """

    __slots__ = ("confidence", "device", "known", "plain", "tiers", "total")

    def __init__(
        self, tiers: list[list[int]], known: list[int] | None = None, confidence: list[float] | None = None
    ) -> None:
        self.tiers = tiers
        self.device = tiers[0]
        self.known = known
        """The part of ``device`` that events told of, where predictions add to it."""
        self.confidence = confidence
        """What a worker's word is worth, where not all of them are trusted in full."""
        self.plain = len(tiers) == 1 and confidence is None
        """Whether there is nothing but device memory, trusted in full."""
        self.total = self.device if len(tiers) == 1 else [sum(blocks) for blocks in zip(*tiers, strict=True)]

    def at(self, slot: int) -> tuple[int, ...]:
        """One worker's, by tier."""
        return tuple([tier[slot] for tier in self.tiers])

    def predicted(self, slot: int) -> int:
        """What of a worker's is a prediction."""
        return self.device[slot] - self.known[slot] if self.known is not None else 0


class Reach(NamedTuple):
    """One worker, as an index elsewhere sees it."""

    tiers: tuple[int, ...]
    """Blocks of the longest usable prefix from each of ``Tier`` and all closer ones; tiers that are left out add nothing."""
    confidence: float = 1.0


class RoutingInput:
    """One decision's inputs."""

    __slots__ = ("blocks", "loads", "now", "overlaps", "paces", "request", "rng", "roles", "shared", "slots")

    def __init__(
        self,
        request: RouteRequest,
        blocks: int,
        now: int,
        slots: Sequence[int],
        loads: ActiveLoads,
        shared: list[int] | None,
        overlaps: Overlaps | None,
        rng: Random,
        roles: Sequence[Role],
        paces: Sequence[Pace],
    ) -> None:
        self.request = request
        self.blocks = blocks
        self.now = now
        self.slots = slots
        """Who may be chosen; at least one."""
        self.loads = loads
        self.shared = shared
        """Per slot, blocks of this prompt that active requests hold there; ``None`` for none anywhere."""
        self.overlaps = overlaps
        """``None`` for none anywhere."""
        self.rng = rng
        self.roles = roles
        """Per slot, what the worker does of a request."""
        self.paces = paces
        """Per slot, how fast the worker is."""

    def cached(self, slot: int) -> int:
        """Tokens of the prompt that a worker needn't compute, whichever of its tiers has them; never the last one."""
        overlaps = self.overlaps
        if overlaps is None:
            return 0
        tokens = overlaps.total[slot] * self.loads.block_size
        if overlaps.confidence is not None:
            tokens = int(overlaps.confidence[slot] * tokens)
        return min(tokens, self.request.num_tokens - 1)

    def work(self, slot: int) -> int:
        """Tokens that a worker would have computed by the time of this request's first token: those that wait, and its own."""
        return self.loads.prefill[slot] + self.request.num_tokens - self.cached(slot)


class Choice(NamedTuple):
    """What a policy says."""

    slot: int
    cost: float
    tied: int
    why: str


def least(slots: Sequence[int], costs: Sequence[float], rng: Random, why: str) -> Choice:
    """The least cost; among equals each has the same chance."""
    low = min(costs)
    if costs.count(low) == 1:
        return Choice(slots[costs.index(low)], low, 1, why)
    equals = [slot for slot, cost in zip(slots, costs) if cost == low]
    return Choice(equals[_draw(len(equals), rng)], low, len(equals), why)


def _draw(count: int, rng: Random) -> int:
    """What ``rng.randrange(count)`` draws, without the checks that it makes in Python: ties are frequent."""
    bits = count.bit_length()
    drawn = rng.getrandbits(bits)
    while drawn >= count:
        drawn = rng.getrandbits(bits)
    return drawn
