"""``program``: sessions are kept where their caches are, and moved whole when that pays.

The cost is that of ``least-time`` plus ``crowding``: where the contexts of the sessions that live at a worker don't fit its
cache, the part of this prompt that pushes others out is computed again later. A session lives at a worker from its latest
request on, for ``ttl_gaps`` times the longest of its own gaps so far (``session_ttl_s`` before its second request, and at
most), and counts with that request's prompt.

Where flow control holds requests back, a session waits for its own worker though another has room, for as long as going there
would cost more: ``patience`` times the difference in cost. After that it goes, and lives there from then on, with all of its
later requests. Sub-agents begin where the prefix is that they share, since every other worker costs its computing.
"""

from heapq import heappop, heappush
from typing import ClassVar

import msgspec

from kvyard.clock import from_seconds
from kvyard.index.bits import bits
from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.policies import CostModel
from kvyard.router.policies.least_time import LeastTime
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad

_KEPT = 0.8
"""Share of the longest gap that counts one request later."""


class _Residence(msgspec.Struct, gc=False):
    """Worker of a session."""

    slot: int
    tokens: int
    """Tokens of its latest prompt."""
    since: int
    """Time of its routing, nanoseconds."""
    gap: float
    """The longest time between two requests, older ones counting less; 0 before the second."""
    expires: int


class CrowdedCost:
    """The cost of a request with what it pushes out."""

    def __init__(
        self, base: CostModel, tokens: int, own: _Residence | None, residents: list[int], weight: float
    ) -> None:
        """``residents`` has the tokens of the sessions that live at each slot, those of the request's own, ``own``, too."""
        self._base = base
        self._tokens = tokens
        self._own = own
        self._residents = residents
        self._weight = weight

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return milliseconds."""
        cost = self._base.cost(worker, match)
        capacity, slot = worker.pace.capacity, worker.slot
        if capacity is None or slot >= len(self._residents):
            return cost
        others = self._residents[slot]
        if self._own is not None and self._own.slot == slot:
            others -= self._own.tokens
        room = max(0, capacity * worker.block_size - others)
        return cost + self._weight * worker.pace.prefill(max(0, self._tokens - room))

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        """Return a lower bound: crowding costs nothing, or more."""
        return self._base.lower_bound(match, bucket, figure)


class Program(LeastTime):
    waits = True
    ranked = False  # idle workers may differ in who lives there
    OPTIONS: ClassVar[Options] = {
        **LeastTime.OPTIONS,
        "patience": Option(1.0, "How long to wait for a session's worker, by the cost of going to another."),
        "crowding": Option(1.0, "Weight of computing again what a prompt pushes out of a cache that sessions live in."),
        "ttl_gaps": Option(3.0, "How long a session lives at its worker, by its longest gap so far."),
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._ttl = from_seconds(config.session_ttl_s)
        self._homes: dict[str, _Residence] = {}
        """By session, the least recently routed first."""
        self._expiries: list[tuple[int, str]] = []
        """A heap of when sessions cease to live at their workers; those that were routed since are skipped."""
        self._residents: list[int] = []
        """By slot, tokens of the sessions that live there."""

    def __len__(self) -> int:
        """Return the number of sessions kept."""
        return len(self._homes)

    def costs(self, routing: RoutingInput) -> CostModel:
        base = super().costs(routing)
        weight = self.options["crowding"]
        if not weight:
            return base
        session = routing.request.session
        own = self._homes.get(session) if session is not None else None
        return CrowdedCost(base, routing.num_tokens, own, self._residents, weight)

    def hold(self, routing: RoutingInput, full: int) -> tuple[int, float] | None:
        costs, workers = self.costs(routing), routing.loads.workers
        now = away = float("inf")
        slot = -1
        for match in routing.matches:
            for candidate in bits(match.slots):
                cost = costs.cost(workers[candidate], match)
                if not full >> candidate & 1:
                    now = min(now, cost)
                elif cost < away:
                    away, slot = cost, candidate
        saving = self.options["patience"] * (now - away)
        return (slot, saving) if slot >= 0 and saving > 0 else None

    def routed(self, routing: RoutingInput, choice: Choice) -> bool:
        session, now = routing.request.session, routing.now
        if session is not None:
            self._live(session, choice.slot, routing.num_tokens, now)
        self._expire(now)
        return super().routed(routing, choice)

    def _live(self, session: str, slot: int, tokens: int, now: int) -> None:
        known = self._homes.pop(session, None)
        gap = 0.0
        expires = now + self._ttl
        if known is not None:
            self._residents[known.slot] -= known.tokens
            gap = max(_KEPT * known.gap, float(now - known.since))
            expires = now + min(self._ttl, round(self.options["ttl_gaps"] * gap))
        elif len(self._homes) >= self.config.sessions:
            self._forget(next(iter(self._homes)))
        while len(self._residents) <= slot:
            self._residents.append(0)
        self._residents[slot] += tokens
        self._homes[session] = _Residence(slot, tokens, now, gap, expires)
        heappush(self._expiries, (expires, session))

    def _expire(self, now: int) -> None:
        due, homes = self._expiries, self._homes
        while due and due[0][0] <= now:
            expires, session = heappop(due)
            known = homes.get(session)
            if known is not None and known.expires == expires:
                self._forget(session)
        if len(due) > 2 * len(homes) + 64:
            self._expiries = sorted((known.expires, session) for session, known in homes.items())

    def _forget(self, session: str) -> None:
        known = self._homes.pop(session)
        self._residents[known.slot] -= known.tokens

    def gone(self, slot: int) -> None:
        super().gone(slot)
        for session in [session for session, known in self._homes.items() if known.slot == slot]:
            self._forget(session)
