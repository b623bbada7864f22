"""What a policy gets to see: the request, the workers that may be chosen, their load, and what each has of the prompt.

Figures are lists by slot (a worker's number in this router). Overlaps come from the index, with what was routed but not
announced yet on top; or from memory alone, for engines that announce nothing. A policy doesn't see where from.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from kvyard.router.active import Loads
from kvyard.router.request import RouteRequest


class Overlaps:
    """Per slot, how many blocks of the prompt's prefix a worker has: in device memory, then each tier beyond the last."""

    __slots__ = ("confidence", "device", "disk", "host", "known", "plain", "total")

    def __init__(
        self,
        device: list[int],
        host: list[int] | None = None,
        disk: list[int] | None = None,
        known: list[int] | None = None,
        confidence: list[float] | None = None,
    ) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.known = known
        """The part of ``device`` that events told of, where predictions add to it."""
        self.confidence = confidence
        """What a worker's word is worth, where not all of them are trusted in full."""
        self.plain = host is None and disk is None and confidence is None
        """Whether there is nothing but device memory, trusted in full."""
        if host is None and disk is None:
            self.total = device
        else:
            zero = [0] * len(device)
            self.total = [a + b + c for a, b, c in zip(device, host or zero, disk or zero, strict=True)]

    def at(self, slot: int) -> tuple[int, int, int]:
        """One worker's, by tier."""
        host, disk = self.host, self.disk
        return self.device[slot], host[slot] if host is not None else 0, disk[slot] if disk is not None else 0

    def predicted(self, slot: int) -> int:
        """What of a worker's is a prediction."""
        return self.device[slot] - self.known[slot] if self.known is not None else 0


class RoutingInput:
    """One decision's inputs."""

    __slots__ = ("blocks", "loads", "now", "overlaps", "request", "rng", "shared", "slots")

    def __init__(
        self,
        request: RouteRequest,
        blocks: int,
        now: int,
        slots: Sequence[int],
        loads: Loads,
        shared: list[int] | None,
        overlaps: Overlaps | None,
        rng: Random,
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
    equals = [slot for slot, cost in zip(slots, costs, strict=True) if cost == low]
    return Choice(equals[rng.randrange(len(equals))], low, len(equals), why)
