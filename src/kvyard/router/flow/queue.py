"""The queue before a router: requests that wait until a worker has room, in the order of a flow policy, within bounds."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush
from math import ceil, inf
from random import Random
from typing import Generic, NamedTuple, TypeVar

from kvyard.clock import SECOND
from kvyard.index import Holder
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.policy import make_flow_policy
from kvyard.router.flow.request import FlowRequest
from kvyard.router.request import Hold

T = TypeVar("T")

LONGEST_RETRY_S = 60
_KEPT = 0.9
_SPARE = 64
"""Entries of requests that are gone which the heap may have beyond as many as wait."""


class FlowRefusal(NamedTuple):
    """Why a request may not wait."""

    kind: str
    """``full``, ``share`` or ``shed``."""
    reason: str
    retry_after_s: int
    """Until the requests that wait now are through, by how fast they went lately."""


class FlowWait(NamedTuple):
    """Why a request waited."""

    policy: str
    waited_ms: float
    ahead: int
    """Requests that waited when it came."""
    overtaken: int
    """Requests that came later and went first."""
    why: str
    """Reason for the request's rank by the policy."""

    def __str__(self) -> str:
        others = f", {self.overtaken:,} that came later went first" if self.overtaken else ""
        return f"waited {self.waited_ms:,.1f} ms behind {self.ahead:,} requests{others}: {self.policy}, {self.why}"


class Waiting(Generic[T]):
    """A request in the queue, with the caller's own ``item``."""

    __slots__ = ("_ahead", "_departed", "asked", "came", "held_for", "held_until", "item", "request", "serial")

    def __init__(self, request: FlowRequest, item: T, serial: int, arrived: int, ahead: int, departed: int) -> None:
        self.request = request
        self.item = item
        self.serial = serial
        self.came = arrived
        self._ahead = ahead
        self._departed = departed
        self.asked = False
        """True if the router was asked whether to wait for a worker without room."""
        self.held_for: Holder | None = None
        """The worker that it waits for, though another may have room,"""
        self.held_until = 0
        """until this time at most."""

    @property
    def ahead(self) -> int:
        """Requests that waited when it came."""
        return self._ahead

    def is_held(self, full: Collection[Holder], now: int, ask: Callable[[], Hold | None]) -> bool:
        """True if it goes on waiting for a worker of ``full``, which have no room, though another has. ``ask`` is the router's
        ``hold`` for it, and is asked once: when it could first go.
        """
        if not self.asked:
            self.asked = True
            hold = ask()
            if hold is not None:
                self.held_for, self.held_until = hold.worker, now + hold.ns
        return now < self.held_until and self.held_for in full

    def overtaken(self, departed: int, earlier: int) -> int:
        """Return how many later requests went first, of ``departed`` that went in all; ``earlier`` ones still wait."""
        return max(0, departed - self._departed - (self._ahead - earlier))


class FlowQueue(Generic[T]):
    """Requests that wait. Its owner says whether there is room; the queue says who gets it."""

    def __init__(self, config: FlowConfig, limit: int | None = None, seed: int = 0) -> None:
        """``limit`` is how many may wait at a time. Raises ``KvyardError`` for a policy that there isn't."""
        self.config = config
        self.limit = limit
        self.policy = make_flow_policy(config)
        self._random = Random(seed)
        self._waiting: dict[int, Waiting[T]] = {}
        """By serial number, first come first."""
        self._order: list[tuple[float, int]] = []
        """A heap of (rank, serial number) where these don't change; those that are gone are skipped."""
        self._serials: list[int] = []
        """Of those that wait, rising."""
        self._in_flight: dict[str, set[object]] = {}
        """Requests at workers by tenant, where a tenant has a limit (``tenant_requests``)."""
        self._parked: dict[str, list[tuple[float, int]]] = {}
        """By tenant, heaps of entries of ``_order`` that were up while their tenant had as many requests as it may have."""
        self._count = 0
        self._departed = 0
        self._interval = 0.0
        """Nanoseconds between two that go, lately."""
        self._latest = 0
        """Time of the latest departure, or of the first arrival in an empty queue."""

    def __len__(self) -> int:
        return len(self._waiting)

    def configure(self, config: FlowConfig, limit: int | None) -> None:
        """Apply this configuration from now on. Another policy starts without the state of the one before."""
        self.limit = limit
        if config == self.config:
            return
        self.config = config
        self.policy = make_flow_policy(config)
        self._order = []
        self._parked = {}
        for waiting in self._waiting.values():
            self.policy.came(waiting.request, waiting.came)
            self._rank(waiting, waiting.came)

    # -- coming in ------------------------------------------------------------------------------------------------------

    def refusal(self, request: FlowRequest, workers: int) -> FlowRefusal | None:
        """Return why ``request`` may not wait; ``None`` if it may. ``workers`` take requests."""
        waiting = len(self._waiting)
        if self.limit is not None:
            if waiting >= self.limit:
                return FlowRefusal("full", f"{waiting:,} requests wait already", self.retry_after_s)
            why = self.policy.refuses(request, self.limit - waiting)
            if why:
                return FlowRefusal("share", why, self.retry_after_s)
        config = self.config
        if config.shed and request.priority > 0:
            saturation = waiting / (config.shed_depth * max(1, workers))
            if self._random.random() < saturation**config.shed_power * config.shed_k:
                reason = f"{waiting:,} requests wait, and its priority {request.priority} is above 0"
                return FlowRefusal("shed", reason, self.retry_after_s)
        return None

    @property
    def retry_after_s(self) -> int:
        """Seconds until those that wait now are through, by how fast they went lately; 1 if that isn't known."""
        return max(1, min(LONGEST_RETRY_S, ceil(len(self._waiting) * self._interval / SECOND)))

    def push(self, request: FlowRequest, item: T, now: int) -> Waiting[T]:
        """Let ``request`` wait; ``item`` is what ``grant`` hands out for it."""
        if not self._waiting:
            self._latest = now  # how long nobody waited says nothing about the pace
        waiting = Waiting(request, item, self._count, now, len(self._waiting), self._departed)
        self._count += 1
        self._waiting[waiting.serial] = waiting
        self._serials.append(waiting.serial)
        self.policy.came(request, now)
        self._rank(waiting, now)
        return waiting

    def remove(self, waiting: Waiting[T]) -> bool:
        """Take a request out that is given up; returns whether it was there."""
        if self._waiting.pop(waiting.serial, None) is None:
            return False
        self._serials.pop(bisect_left(self._serials, waiting.serial))
        self.policy.left(waiting.request)
        if len(self._order) > 2 * len(self._waiting) + _SPARE:  # clients that come and go leave nothing behind
            self._order = [entry for entry in self._order if entry[1] in self._waiting]
            heapify(self._order)
        self._unpark(waiting.request.tenant)  # it may have been the one that was up
        return True

    def drain(self) -> list[T]:
        """Take all out, first come first."""
        all_waiting = list(self._waiting.values())
        for waiting in all_waiting:
            self.remove(waiting)
        return [waiting.item for waiting in all_waiting]

    def held_until(self, now: int) -> int | None:
        """Return when the first of those that wait for a worker of their own gives that up; ``None`` if none does later than
        now.
        """
        return min([waiting.held_until for waiting in self._waiting.values() if waiting.held_until > now], default=None)

    # -- going out ------------------------------------------------------------------------------------------------------

    def sent(self, request: FlowRequest, now: int) -> None:
        """Note that ``request`` went to a worker at once."""
        self._note_in_flight(request)
        self.policy.sent(request, now, False)

    def capped(self, request: FlowRequest) -> bool:
        """True if the tenant of ``request`` has as many requests at workers as it may have."""
        most = self.config.tenant_requests
        return most > 0 and len(self._in_flight.get(request.tenant, ())) >= most

    def _note_in_flight(self, request: FlowRequest) -> None:
        if self.config.tenant_requests and request.tenant:
            self._in_flight.setdefault(request.tenant, set()).add(request.id)

    def grant(self, now: int, has_room: Callable[[], bool], place: Callable[[Waiting[T]], bool]) -> None:
        """While ``has_room``, ``place`` those that wait, in order. One for which ``place`` returns False keeps its place: it
        waits for another worker than those that have room. ``place`` may ``remove`` one that was given up.
        """
        if not has_room():
            return  # who goes next isn't asked yet: with many that wait that takes long
        fixed = not (self.policy.dynamic or self.config.patience_s)
        order = self._popped() if fixed else self._ranked(now)
        passed: list[tuple[float, int]] = []
        while has_room():
            entry = next(order, None)
            if entry is None:
                break
            waiting = self._waiting[entry[1]]
            if self.capped(waiting.request):
                if fixed:
                    heappush(self._parked.setdefault(waiting.request.tenant, []), entry)
            elif place(waiting):
                self._depart(waiting, now)
            elif entry[1] in self._waiting:
                passed.append(entry)
        if fixed:
            for entry in passed:
                heappush(self._order, entry)

    def explain(self, waiting: Waiting[T], now: int) -> FlowWait:
        """Return why ``waiting``, which is about to go, waited."""
        earlier = bisect_left(self._serials, waiting.serial)
        request = waiting.request
        why = self.policy.why(request, now)
        if self.config.tenant_requests and request.tenant:
            why += f"; a tenant has {self.config.tenant_requests:,} requests at workers at most"
        if waiting.held_for is not None:
            why += f"; then for {waiting.held_for}, which costs it least, though another had room"
        return FlowWait(
            self.config.policy,
            (now - waiting.came) / 1e6,
            waiting.ahead,
            waiting.overtaken(self._departed, earlier),
            why,
        )

    def returned(self, request: FlowRequest) -> bool:
        """Note that a request comes back from a worker without having ended there: it is sent again, or given up. Returns true
        if a request of its tenant may start that had to wait for it.
        """
        self.policy.returned(request)
        return self._land(request.tenant, request.id)

    def ended(self, request: FlowRequest, computed: int, output: int, now: int) -> bool:
        """Note that a request ended; see ``FlowPolicy.ended``. Returns true if a request of its tenant may start that had to
        wait for it.
        """
        self.policy.ended(request, computed, output, now)
        return self._land(request.tenant, request.id)

    def _land(self, tenant: str, id_: object) -> bool:
        """Note that a request has left its worker: the next one that its tenant's limit held back becomes eligible."""
        in_flight = self._in_flight.get(tenant)
        if in_flight is None or id_ not in in_flight:
            return False
        in_flight.discard(id_)
        if not in_flight:
            del self._in_flight[tenant]
        self._unpark(tenant)
        return True

    def _unpark(self, tenant: str) -> None:
        """Rank the next request again that its tenant's limit held back."""
        parked = self._parked.get(tenant)
        while parked:
            entry = heappop(parked)
            if entry[1] in self._waiting:
                heappush(self._order, entry)
                break
        if not parked:
            self._parked.pop(tenant, None)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _rank(self, waiting: Waiting[T], now: int) -> None:
        if not (self.policy.dynamic or self.config.patience_s):
            heappush(self._order, (self.policy.rank(waiting.request, now), waiting.serial))

    def _popped(self) -> Iterator[tuple[float, int]]:
        """Take those that wait off the heap, in order."""
        while self._order:
            entry = heappop(self._order)
            if entry[1] in self._waiting:
                yield entry

    def _ranked(self, now: int) -> Iterator[tuple[float, int]]:
        """Return all that wait, in their order by now."""
        policy, patience = self.policy, self.config.patience_s * SECOND
        waiting = list(self._waiting.values())
        policy.look([entry.request for entry in waiting], now)
        ranks = [
            -inf if patience and now - entry.came >= patience else policy.rank(entry.request, now) for entry in waiting
        ]
        return iter(sorted(zip(ranks, [entry.serial for entry in waiting], strict=True)))

    def _depart(self, waiting: Waiting[T], now: int) -> None:
        del self._waiting[waiting.serial]
        self._serials.pop(bisect_left(self._serials, waiting.serial))
        self._departed += 1
        passed = now - self._latest
        self._interval = _KEPT * self._interval + (1 - _KEPT) * passed if self._interval else float(passed)
        self._latest = now
        self._note_in_flight(waiting.request)
        self.policy.sent(waiting.request, now, True)
