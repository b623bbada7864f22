"""Policies: who gets a request. A registry of small classes; one more is one more entry.

A policy chooses among the slots of a ``Situation`` and learns where the request went in the end. It keeps only what it needs
for itself; load, index and decisions are the router's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from mypy_extensions import mypyc_attr

from kvyard.clock import from_seconds
from kvyard.errors import KvyardError
from kvyard.router.config import RouterConfig
from kvyard.router.cost import cheapest
from kvyard.router.memory import RoutedMemory
from kvyard.router.situation import Choice, Situation, least


@mypyc_attr(allow_interpreted_subclasses=True)  # policies of one's own derive from it
class Policy:
    """The interface, and a policy that has nothing to remember."""

    needs_index = False
    """Whether it can't do without one."""
    guarded = False
    """Whether the imbalance guard may overrule it."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    @property
    def memory(self) -> RoutedMemory | None:
        """Where overlaps come from, instead of the index."""
        return None

    def choose(self, at: Situation) -> Choice:
        """One of ``at.slots``. Changes nothing that ``routed`` couldn't."""
        raise NotImplementedError

    def routed(self, at: Situation, choice: Choice) -> None:
        """The request went to ``choice.slot``: this policy's choice, or the guard's."""

    def gone(self, slot: int) -> None:
        """That worker won't come back: whoever has its number next is somebody else."""


class Random(Policy):
    """Anyone, by chance."""

    def choose(self, at: Situation) -> Choice:
        return Choice(at.slots[at.rng.randrange(len(at.slots))], 0.0, len(at.slots), "random")


class RoundRobin(Policy):
    """One after the other, in the order in which they were added."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._next = 0

    def choose(self, at: Situation) -> Choice:
        # By turn rather than by count, so that one who is left out for a while doesn't shift everybody's turn.
        slots = at.slots
        for slot in slots:
            if slot >= self._next:
                return Choice(slot, 0.0, 1, "turn")
        return Choice(slots[0], 0.0, 1, "turn")

    def routed(self, at: Situation, choice: Choice) -> None:
        self._next = choice.slot + 1


class LeastLoaded(Policy):
    """Who has least to do, by ``config.load``."""

    def choose(self, at: Situation) -> Choice:
        return least(at.slots, load_of(self.config.load, at), at.rng, "load")


class Kv(Policy):
    """The least cost, by what the index knows and what was routed since."""

    needs_index = True
    guarded = True

    def choose(self, at: Situation) -> Choice:
        return cheapest(self.config, at, "cost")


class Approx(Policy):
    """The same cost, by what was routed alone: for engines that announce nothing."""

    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        ttl = config.approx_ttl_s
        self._memory = RoutedMemory(None if ttl is None else from_seconds(ttl), config.remembered_blocks)

    @property
    def memory(self) -> RoutedMemory | None:
        return self._memory

    def choose(self, at: Situation) -> Choice:
        return cheapest(self.config, at, "cost")


class Affinity(Policy):
    """A session stays where it was, while that worker is there; ``config.fallback`` says where it begins."""

    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.fallback = POLICIES[config.fallback](config)
        self.needs_index = self.fallback.needs_index
        self._ttl = from_seconds(config.session_ttl_s)
        self._bound: dict[str, tuple[int, int]] = {}
        """Per session its slot and when it was last heard of; in that order."""

    def __len__(self) -> int:
        """How many sessions are remembered."""
        return len(self._bound)

    @property
    def memory(self) -> RoutedMemory | None:
        return self.fallback.memory

    def choose(self, at: Situation) -> Choice:
        session = at.request.session
        known = self._bound.get(session) if session is not None else None
        if known is not None and known[1] + self._ttl > at.now and known[0] in at.slots:
            return Choice(known[0], 0.0, 1, "session")
        return self.fallback.choose(at)

    def routed(self, at: Situation, choice: Choice) -> None:
        self.fallback.routed(at, choice)
        session = at.request.session
        bound = self._bound
        if session is not None:
            known = bound.pop(session, None)
            # The guard sends one request elsewhere, not the session.
            stays = known is not None and choice.why == "guard" and known[0] in at.slots
            bound[session] = (known[0] if stays and known is not None else choice.slot, at.now)
        while bound:
            oldest = next(iter(bound))
            if len(bound) <= self.config.sessions and bound[oldest][1] + self._ttl > at.now:
                break
            del bound[oldest]

    def gone(self, slot: int) -> None:
        self.fallback.gone(slot)
        self._bound = {session: known for session, known in self._bound.items() if known[0] != slot}


Factory: TypeAlias = Callable[[RouterConfig], Policy]
POLICIES: dict[str, Factory] = {
    "affinity": Affinity,
    "approx": Approx,
    "kv": Kv,
    "least-loaded": LeastLoaded,
    "random": Random,
    "round-robin": RoundRobin,
}
"""Every policy by name."""


def policy(config: RouterConfig) -> Policy:
    """The policy that a configuration names. Raises ``KvyardError`` for one that isn't in ``POLICIES``."""
    make = POLICIES.get(config.policy)
    if make is None:
        raise KvyardError(f"unknown policy {config.policy!r} of a router: choose one of {', '.join(sorted(POLICIES))}")
    return make(config)


def load_of(kind: str, at: Situation) -> Sequence[float]:
    """Per worker that may be chosen, how much it has to do."""
    loads, slots = at.loads, at.slots
    if kind == "requests":
        return [loads.requests[slot] for slot in slots]
    if kind == "tokens":
        return [loads.prefill[slot] for slot in slots]
    return [loads.prefill[slot] / loads.block_size + loads.blocks[slot] for slot in slots]
