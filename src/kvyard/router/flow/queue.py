"""The queue before a router: requests that wait until a worker has room, in the order of a flow policy, within bounds."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator
from math import ceil, inf
from random import Random
from typing import Generic, NamedTuple, TypeVar

from kvyard.clock import SECOND
from kvyard.index import Holder
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.lanes import Lane, LineLane, Scale
from kvyard.router.flow.policy import make_flow_policy
from kvyard.router.flow.request import FlowRequest
from kvyard.router.flow.shares import TenantShares
from kvyard.router.request import Hold

T = TypeVar("T")

LONGEST_RETRY_S = 60
OUTPUT_WEIGHT = 2.0
"""Prompt tokens that a token of an answer counts for in a tenant's share, as with ``las``."""
_KEPT = 0.9
MOST_PASSED = 8
"""Requests that a tree of lines is asked to pass over, at most."""
_SPARE = 64
"""Entries of requests that are gone which a list may have beyond as many as wait."""


def _first_come(request: FlowRequest, now: int) -> float:
    return 0.0


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

    __slots__ = ("_ahead", "_departed", "asked", "came", "held_for", "held_until", "item", "late", "request", "serial")

    def __init__(self, request: FlowRequest, item: T, serial: int, arrived: int, ahead: int, departed: int) -> None:
        self.request = request
        self.item = item
        self.serial = serial
        self.came = arrived
        self.late = False
        """True if it has waited for longer than the queue's patience."""
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
        self._lanes: dict[str, Lane] = {}
        """Those that wait, by tenant where tenants are limited, else under one name; not of dynamic policies."""
        self._late: dict[str, Lane] = {}
        """Likewise, those that have waited for longer than the queue's patience."""
        self._in_time: deque[int] = deque()
        """Serials of the others, in the order in which they came; some are gone."""
        self._by_session: dict[str, set[int]] = {}
        """Serials of those that wait, where sessions change ranks."""
        self._serials: list[int] = []
        """Of those that wait, rising."""
        self._in_flight: dict[str, set[object]] = {}
        """Requests at workers by tenant, where tenants are limited."""
        self._shares = TenantShares(config.weights)
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
        self._shares = TenantShares(config.weights)
        self.policy = make_flow_policy(config)
        self._lanes, self._late, self._by_session = {}, {}, {}
        self._in_time = deque(self._waiting)
        for waiting in self._waiting.values():
            waiting.late = False
            self.policy.came(waiting.request, waiting.came)
            self._line_up(waiting, waiting.came)

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
        self._in_time.append(waiting.serial)
        self.policy.came(request, now)
        self._line_up(waiting, now)
        if self.config.limits_tenants and request.tenant:
            self._shares.charge(request.tenant, 0.0, now)  # one that waits has a share
        return waiting

    def remove(self, waiting: Waiting[T]) -> bool:
        """Take a request out that is given up; returns whether it was there."""
        if self._waiting.pop(waiting.serial, None) is None:
            return False
        self._step_out(waiting)
        self.policy.left(waiting.request)
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
        self._note_in_flight(request, now)
        self.policy.sent(request, now, False)

    def capped(self, request: FlowRequest, workers: int = 1) -> bool:
        """True if the tenant of ``request`` has as many requests at workers as it may have; ``workers`` take requests."""
        return self._has_most(request.tenant, workers)

    def _has_most(self, tenant: str, workers: int) -> bool:
        in_flight = self._in_flight.get(tenant)
        if in_flight is None:
            return False
        most, greedy = self.config.tenant_requests, self.config.greedy_requests * max(1, workers)
        if most and len(in_flight) >= most:
            return True
        return 0 < greedy <= len(in_flight) and self._shares.above(tenant)

    def _note_in_flight(self, request: FlowRequest, now: int) -> None:
        if self.config.limits_tenants and request.tenant:
            self._in_flight.setdefault(request.tenant, set()).add(request.id)
            self._shares.charge(request.tenant, request.tokens, now)

    def grant(
        self, now: int, has_room: Callable[[], bool], place: Callable[[Waiting[T]], bool], workers: int = 1
    ) -> None:
        """While ``has_room``, ``place`` those that wait, in order. One for which ``place`` returns False keeps its place: it
        waits for another worker than those that have room. ``place`` may ``remove`` one that was given up. ``workers`` take
        requests.
        """
        if not has_room():
            return  # who goes next isn't asked yet: with many that wait that takes long
        passed: list[Waiting[T]] = []
        ranked = self.policy.dynamic
        order = self._ranked(now, workers) if ranked else self._heads(now, workers)
        try:
            while has_room():
                waiting = next(order, None)
                if waiting is None:
                    break
                if place(waiting):
                    self._depart(waiting, now)
                elif waiting.serial in self._waiting and not ranked:
                    lane = self._lane(waiting)
                    lane.skip(waiting.serial)
                    passed.append(waiting)
                    if len(passed) >= MOST_PASSED and isinstance(lane, LineLane):  # one look at all costs less
                        skipped = {entry.serial for entry in passed}
                        order = (entry for entry in self._ranked(now, workers) if entry.serial not in skipped)
                        ranked = True
        finally:
            for waiting in passed:
                if waiting.serial in self._waiting:
                    self._lane(waiting).restore(waiting.serial)

    def explain(self, waiting: Waiting[T], now: int) -> FlowWait:
        """Return why ``waiting``, which is about to go, waited."""
        earlier = bisect_left(self._serials, waiting.serial)
        request = waiting.request
        why = self.policy.why(request, now)
        if self.config.tenant_requests and request.tenant:
            why += f"; a tenant has {self.config.tenant_requests:,} requests at workers at most"
        if self.config.greedy_requests and self._shares.above(request.tenant):
            why += f"; a tenant above its share has {self.config.greedy_requests:,} requests for each worker at most"
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
        return self._land(request)

    def ended(self, request: FlowRequest, computed: int, output: int, now: int) -> bool:
        """Note that a request ended; see ``FlowPolicy.ended``. Returns true if a request of its tenant may start that had to
        wait for it.
        """
        self.policy.ended(request, computed, output, now)
        if self.config.limits_tenants and request.tenant:
            self._shares.charge(request.tenant, OUTPUT_WEIGHT * output, now)
        for serial in self._by_session.get(request.session or "", ()):
            waiting = self._waiting[serial]
            if not waiting.late:
                self._lane(waiting).add(serial, waiting.request, now)
        return self._land(request)

    def _land(self, request: FlowRequest) -> bool:
        """Note that a request has left its worker. Returns true if it made room for others of its tenant."""
        in_flight = self._in_flight.get(request.tenant)
        if in_flight is None or request.id not in in_flight:
            return False
        in_flight.discard(request.id)
        if not in_flight:
            del self._in_flight[request.tenant]
        return True

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _lane_name(self, waiting: Waiting[T]) -> str:
        return waiting.request.tenant if self.config.limits_tenants else ""

    def _lane(self, waiting: Waiting[T]) -> Lane:
        """Return the lane that has ``waiting``."""
        return (self._late if waiting.late else self._lanes)[self._lane_name(waiting)]

    def _line_up(self, waiting: Waiting[T], now: int) -> None:
        if self.policy.dynamic:
            return
        name = self._lane_name(waiting)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = self.policy.lane()
        lane.add(waiting.serial, waiting.request, now)
        if self.policy.by_session and waiting.request.session:
            self._by_session.setdefault(waiting.request.session, set()).add(waiting.serial)

    def _step_out(self, waiting: Waiting[T]) -> None:
        """Remove a request that waits no more, and has left ``_waiting``."""
        self._serials.pop(bisect_left(self._serials, waiting.serial))
        if len(self._in_time) > 2 * len(self._waiting) + _SPARE:  # clients that come and go leave nothing behind
            self._in_time = deque(serial for serial in self._in_time if serial in self._waiting)
        if self.policy.dynamic:
            return
        self._leave_lane(waiting)
        if self.policy.by_session and waiting.request.session:
            serials = self._by_session[waiting.request.session]
            serials.discard(waiting.serial)
            if not serials:
                del self._by_session[waiting.request.session]

    def _leave_lane(self, waiting: Waiting[T]) -> None:
        lanes, name = self._late if waiting.late else self._lanes, self._lane_name(waiting)
        lane = lanes[name]
        lane.discard(waiting.serial)
        if not lane:
            del lanes[name]

    def _move_late(self, now: int) -> None:
        """Move those that have waited for too long before all others, in the order in which they came."""
        patience, in_time = self.config.patience_s * SECOND, self._in_time
        while patience and in_time:
            waiting = self._waiting.get(in_time[0])
            if waiting is not None:
                if now - waiting.came < patience:
                    break
                self._leave_lane(waiting)
                waiting.late = True
                lane = self._late.setdefault(self._lane_name(waiting), Lane(_first_come))
                lane.add(waiting.serial, waiting.request, now)
            in_time.popleft()

    def _heads(self, now: int, workers: int) -> Iterator[Waiting[T]]:
        """Return who goes next, again and again, of tenants that may have more at workers."""
        self._move_late(now)
        scale = self.policy.scale(self._lanes.values())
        while True:
            head = self._head(self._late, scale, workers) or self._head(self._lanes, scale, workers)
            if head is None:
                return
            yield self._waiting[head[1]]

    def _head(self, lanes: dict[str, Lane], scale: Scale, workers: int) -> tuple[float, int] | None:
        heads = (lane.head(scale) for tenant, lane in lanes.items() if not self._has_most(tenant, workers))
        return min((head for head in heads if head is not None), default=None)

    def _ranked(self, now: int, workers: int) -> Iterator[Waiting[T]]:
        """Return all that wait, in their order by now, while their tenants may have more at workers."""
        policy, patience = self.policy, self.config.patience_s * SECOND
        waiting = list(self._waiting.values())
        policy.look([entry.request for entry in waiting], now)
        ranks = [
            -inf if patience and now - entry.came >= patience else policy.rank(entry.request, now) for entry in waiting
        ]
        for _, serial in sorted(zip(ranks, [entry.serial for entry in waiting], strict=True)):
            if not self.capped(self._waiting[serial].request, workers):
                yield self._waiting[serial]

    def _depart(self, waiting: Waiting[T], now: int) -> None:
        del self._waiting[waiting.serial]
        self._step_out(waiting)
        self._departed += 1
        passed = now - self._latest
        self._interval = _KEPT * self._interval + (1 - _KEPT) * passed if self._interval else float(passed)
        self._latest = now
        self._note_in_flight(waiting.request, now)
        self.policy.sent(waiting.request, now, True)
