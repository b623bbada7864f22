"""What a policy gets to see: the request, the workers that may be chosen, their load, and what each has of the prompt.

Figures are lists by slot (a worker's number in this router). Overlaps come from the index, with what was routed but not
announced yet on top; or from memory alone, for engines that announce nothing. A policy doesn't see where from.

In a large fleet overlaps come by lengths instead, each with the workers that have just so much: most have the same, or nothing.
A policy that chooses by these needn't look at every worker; for all others the lists are made of them when they are asked for.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, TypeAlias

from kvyard.engine.role import Role
from kvyard.index.bits import bits
from kvyard.router.active import ActiveLoads
from kvyard.router.pace import Pace
from kvyard.router.ranking import Levels, as_list, classes, nth_slot, of_slot
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


Parts: TypeAlias = list[tuple[tuple[int, ...], int]]
"""Blocks by tier and the slots, as bits, that have just these."""


class PrefixLevels:
    """``Overlaps`` by lengths, where all of it is trusted in full."""

    __slots__ = ("known", "levels", "parts", "tiers")

    def __init__(self, levels: Levels, known: Levels | None = None, parts: Parts | None = None, tiers: int = 1) -> None:
        """``levels`` are of all ``tiers`` together, ``parts`` says how much is on which. Without, all is on the device."""
        self.levels = levels
        self.known = known
        """What events told of device memory, where predictions add to it."""
        self.parts = parts
        self.tiers = tiers

    def at(self, slot: int) -> tuple[int, ...]:
        """One worker's, by tier."""
        if self.parts is None:
            return (of_slot(self.levels, slot),)
        for mine, mask in self.parts:
            if mask >> slot & 1:
                return mine
        return (0,) * self.tiers

    def predicted(self, slot: int) -> int:
        """What of a worker's is a prediction."""
        return self.at(slot)[0] - of_slot(self.known, slot) if self.known is not None else 0

    def split(self, among: int) -> Parts:
        """The set ``among`` by how many blocks its slots have on which tier, those that have nothing last; no part is empty."""
        if self.parts is None:
            return [((blocks,), slots) for blocks, slots in classes(self.levels, among)]
        out: Parts = []
        for mine, mask in self.parts:
            found = mask & among
            if found:
                out.append((mine, found))
                among ^= found
        if among:
            out.append(((0,) * self.tiers, among))
        return out

    def spread_out(self, count: int) -> Overlaps:
        """The same for each of ``count`` workers."""
        known = as_list(self.known, count) if self.known is not None else None
        if self.parts is None:
            return Overlaps([as_list(self.levels, count)], known)
        tiers = [[0] * count for _ in range(self.tiers)]
        for mine, mask in self.parts:
            for slot in bits(mask):
                for tier, blocks in enumerate(mine):
                    tiers[tier][slot] = blocks
        return Overlaps(tiers, known)


class Reach(NamedTuple):
    """One worker, as an index elsewhere sees it."""

    tiers: tuple[int, ...]
    """Blocks of the longest usable prefix from each of ``Tier`` and all closer ones; tiers that are left out add nothing."""
    confidence: float = 1.0


class RoutingInput:
    """One decision's inputs."""

    __slots__ = (
        "_overlaps",
        "_shared",
        "among",
        "blocks",
        "capacity",
        "loads",
        "now",
        "paces",
        "prefixes",
        "request",
        "rng",
        "roles",
        "shared_levels",
        "slots",
        "sparse",
        "speeds",
    )

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
        *,
        sparse: bool = False,
        among: int = 0,
        prefixes: PrefixLevels | None = None,
        shared_levels: Levels | None = None,
        speeds: Sequence[tuple[Pace, int]] = (),
        capacity: int | None = None,
    ) -> None:
        """With ``sparse``, overlaps and shared blocks are given by lengths, as ``prefixes`` and ``shared_levels``, and who may
        be chosen also as the bits ``among``; ``speeds`` are
        workers by how fast they are, and ``capacity`` the blocks that the smallest one has.
        """
        self.request = request
        self.blocks = blocks
        self.now = now
        self.slots = slots
        """Who may be chosen; at least one."""
        self.loads = loads
        self._shared = shared
        self._overlaps = overlaps
        self.sparse = sparse
        self.among = among
        self.prefixes = prefixes
        """``None`` for none anywhere."""
        self.speeds = speeds
        """Every pace with the slots, as bits, that have it."""
        self.capacity = capacity
        """No worker has room for fewer blocks, where that is known."""
        self.shared_levels: Levels = shared_levels if shared_levels is not None else []
        self.rng = rng
        self.roles = roles
        """Per slot, what the worker does of a request."""
        self.paces = paces
        """Per slot, how fast the worker is."""

    @property
    def overlaps(self) -> Overlaps | None:
        """``None`` for none anywhere."""
        if self._overlaps is None and self.prefixes is not None:
            self._overlaps = self.prefixes.spread_out(len(self.loads.prefill))
        return self._overlaps

    @property
    def shared(self) -> list[int] | None:
        """Per slot, blocks of this prompt that active requests hold there; ``None`` for none anywhere."""
        if self._shared is None and self.shared_levels:
            self._shared = as_list(self.shared_levels, len(self.loads.prefill))
        return self._shared

    def closed(self) -> Sequence[int]:
        """Slots that may not be chosen, of workers that are excluded, draining or gone."""
        count = len(self.loads.prefill)
        if len(self.slots) == count:
            return ()
        if self.sparse:
            return bits(((1 << count) - 1) ^ self.among)
        return sorted(set(range(count)).difference(self.slots))

    def may_choose(self, slot: int) -> bool:
        """Whether ``slot`` is one of ``slots``."""
        return bool(self.among >> slot & 1) if self.sparse else slot in self.slots

    def tiers_at(self, slot: int) -> tuple[int, ...]:
        """Blocks of the prompt's prefix that a worker has, by tier."""
        if self.sparse:
            return self.prefixes.at(slot) if self.prefixes is not None else ()
        return self._overlaps.at(slot) if self._overlaps is not None else ()

    def predicted_at(self, slot: int) -> int:
        """What of that is a prediction."""
        if self.sparse:
            return self.prefixes.predicted(slot) if self.prefixes is not None else 0
        return self._overlaps.predicted(slot) if self._overlaps is not None else 0

    def shared_at(self, slot: int) -> int:
        """Blocks of this prompt that active requests hold at a worker."""
        if self.sparse:
            return of_slot(self.shared_levels, slot)
        return self._shared[slot] if self._shared is not None else 0

    def cached(self, slot: int) -> int:
        """Tokens of the prompt that a worker needn't compute, whichever of its tiers has them; never the last one."""
        if self.sparse:
            blocks = of_slot(self.prefixes.levels, slot) if self.prefixes is not None else 0
            return self.tokens_of(blocks)
        overlaps = self.overlaps
        if overlaps is None:
            return 0
        tokens = overlaps.total[slot] * self.loads.block_size
        if overlaps.confidence is not None:
            tokens = int(overlaps.confidence[slot] * tokens)
        return min(tokens, self.request.num_tokens - 1)

    def tokens_of(self, blocks: int) -> int:
        """Tokens that a worker needn't compute which has so many blocks of the prompt."""
        return min(blocks * self.loads.block_size, self.request.num_tokens - 1)

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


def least_of(slots: int, cost: float, rng: Random, why: str) -> Choice:
    """One of those who cost least, given as bits; each has the same chance, by the draw that ``least`` makes."""
    count = slots.bit_count()
    return Choice(nth_slot(slots, _draw(count, rng) if count > 1 else 0), cost, count, why)


def _draw(count: int, rng: Random) -> int:
    """What ``rng.randrange(count)`` draws, without the checks that it makes in Python: ties are frequent."""
    bits = count.bit_length()
    drawn = rng.getrandbits(bits)
    while drawn >= count:
        drawn = rng.getrandbits(bits)
    return drawn
