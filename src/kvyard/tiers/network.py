"""A network: bandwidth that transfers between many ends share, max-min fair.

A flow goes through several *ports*, each with a limit of its own: the sender's way out, the receiver's way in, and what
several workers of a node share. Raise the rate of all flows alike until a port is full; those that go through it stay
there, the others rise on. A ``Link`` has two ends and nested limits, and is quicker; ports may overlap in any way.

Rates are exact fractions and change only when a flow begins, lands or is cancelled. So the number of ``advance`` calls
makes no difference.
"""

from collections.abc import Hashable, Iterable
from fractions import Fraction
from heapq import heapify, heappop, heappush

from kvyard.blocks.spec import ConfigError
from kvyard.clock import SECOND, ClockError
from kvyard.integers import ceil_div
from kvyard.tiers.links.sharing import check_fair


class Flow:
    """One transfer through a network. Two are the same only if they are one object."""

    __slots__ = ("alone_ns", "ended", "landed", "left", "nbytes", "number", "ports", "rate", "started", "submitted")

    def __init__(self, number: int, ports: tuple[Hashable, ...], nbytes: int, submitted: int, started: int) -> None:
        self.number = number
        self.ports = ports
        """The ports with a limit that it goes through."""
        self.nbytes = nbytes
        self.submitted = submitted
        self.started = started
        """Time at which its first byte moves."""
        self.alone_ns = 0
        """Duration of its bytes with no other flow there."""
        self.ended: int | None = None
        """Time of its landing or cancellation."""
        self.landed = False
        self.left = Fraction(nbytes)
        self.rate = Fraction(0)
        """Bytes per second; 0 while it doesn't move."""

    def copy(self) -> "Flow":
        """Return a copy with the same figures, for a trial."""
        copied = Flow(self.number, self.ports, self.nbytes, self.submitted, self.started)
        copied.alone_ns, copied.left, copied.rate = self.alone_ns, self.left, self.rate
        return copied

    @property
    def queued(self) -> int:
        """Nanoseconds that other flows cost it, once it has landed."""
        return 0 if self.ended is None else self.ended - self.started - self.alone_ns


class PortUse:
    """The account of one port."""

    __slots__ = ("busy_ns", "bytes", "flows", "queued_ns", "since")

    def __init__(self) -> None:
        self.flows: dict[int, Flow] = {}
        """Flows through it now, by number."""
        self.bytes = 0
        """Of what has landed."""
        self.busy_ns = 0
        """Time during which anything moved, up to the last change."""
        self.queued_ns = 0
        self.since = 0


class Network:
    """Times are integer nanoseconds and never go back: ``ClockError`` for one that does, and nothing is changed then."""

    def __init__(self, latency: int = 0, *, shared: bool = True) -> None:
        """``latency`` passes before a flow's first byte moves, without using any port. Without ``shared`` each flow moves as
        if it were alone, which no network does but some models assume. Raises ``ConfigError`` for a latency below 0.
        """
        if latency < 0:
            raise ConfigError(f"the latency of a network must not be negative, got {latency} ns")
        self.latency = latency
        self._shared = shared
        self.ports: dict[Hashable, PortUse] = {}
        self._limits: dict[Hashable, int] = {}
        self._now = 0
        self._at = 0
        """The time of the last change of rates."""
        self._number = 0
        self._waiting: list[tuple[int, int, Flow]] = []
        """Flows whose first byte hasn't moved, the next to start first."""
        self._moving: dict[int, Flow] = {}
        self._next: int | None = None
        """Next landing of the transfers that move."""
        self._landed: list[Flow] = []

    def add_port(self, port: Hashable, limit: int | None) -> None:
        """Add a port with ``limit`` bytes per second, ``None`` for no limit; an existing port stays as it is. Raises
        ``ConfigError`` for a limit that isn't positive.
        """
        if limit is not None and limit <= 0:
            raise ConfigError(f"the bandwidth of {port} must be more than 0 bytes per second, got {limit}")
        if port not in self.ports:
            self.ports[port] = PortUse()
            if limit is not None:
                self._limits[port] = limit

    def takes_time(self, ports: Iterable[Hashable]) -> bool:
        """Return true if bytes through ``ports`` take any time at all."""
        return self.latency > 0 or any(port in self._limits for port in ports)

    def submit(self, now: int, ports: Iterable[Hashable], nbytes: int, latency: int | None = None) -> Flow:
        """Send ``nbytes`` through ``ports``, each of which must be known; ``latency``, if not the network's."""
        self._run(now)
        mine = tuple(ports)
        flow = Flow(self._number, mine, nbytes, now, now + (self.latency if latency is None else latency))
        limits = [self._limits[port] for port in mine if port in self._limits]
        if limits:
            flow.alone_ns = ceil_div(nbytes * SECOND, min(limits))
        self._number += 1
        heappush(self._waiting, (flow.started, flow.number, flow))
        self._run(now)
        return flow

    def cancel(self, now: int, flow: Flow) -> bool:
        """Give ``flow`` up at ``now``; returns whether there was anything to give up."""
        self._run(now)
        if flow.ended is not None:
            return False
        flow.ended = now
        if flow.number in self._moving:
            self._settle(now)
            self._leave(flow, now)
            self._share()
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not flow]
            heapify(self._waiting)
        return True

    def earliest(self) -> int | None:
        """Return the next time at which a flow lands or starts, if nothing else happens; ``None`` with no flow in flight."""
        if self._landed:
            return self._now
        start = self._waiting[0][0] if self._waiting else None
        if self._next is None:
            return start
        return self._next if start is None or self._next <= start else start

    def advance(self, now: int) -> list[Flow]:
        """Let time pass up to ``now``. Returns what landed since the last call, in order of time and submission."""
        self._run(now)
        landed, self._landed = self._landed, []
        return landed

    def limit(self, port: Hashable) -> int | None:
        """Return bytes per second of ``port``, ``None`` for no limit."""
        return self._limits.get(port)

    def busy_ns(self, port: Hashable) -> int:
        """Return for how long anything moved through ``port``, up to the last ``now``."""
        use = self.ports[port]
        return use.busy_ns + (self._now - use.since if use.flows else 0)

    def landing(self, flow: Flow) -> int:
        """Return the landing of ``flow``, which is in flight, at its current rate; others may change that."""
        if flow.rate:
            return self._at - int(-flow.left * SECOND // flow.rate)
        return flow.started + flow.alone_ns

    def foresee(self, now: int, ports: Iterable[Hashable], nbytes: int, latency: int | None = None) -> int:
        """Return when ``nbytes`` submitted at ``now`` would land, if nothing else is submitted. Changes nothing."""
        trial = self._trial()
        return trial._landing(trial.submit(max(now, self._now), ports, nbytes, latency))

    def foresee_landing(self, flow: Flow) -> int:
        """Return the landing of ``flow``, which is in flight, if nothing else is submitted. Changes nothing."""
        trial = self._trial()
        in_flight = [*trial._moving.values(), *[other for _, _, other in trial._waiting]]
        return trial._landing(next(other for other in in_flight if other.number == flow.number))

    def _trial(self) -> "Network":
        """Return a copy to try things on."""
        trial = Network(self.latency, shared=self._shared)
        trial._limits = self._limits
        trial.ports = {port: PortUse() for port in self.ports}
        trial._now, trial._at, trial._number, trial._next = self._now, self._at, self._number, self._next
        for flow in self._moving.values():
            copied = flow.copy()
            trial._moving[copied.number] = copied
            for port in copied.ports:
                trial.ports[port].flows[copied.number] = copied
        for started, number, flow in self._waiting:  # a heap stays one
            trial._waiting.append((started, number, flow.copy()))
        return trial

    def _landing(self, flow: Flow) -> int:
        while flow.ended is None:
            time = self.earliest()
            assert time is not None, "a flow that never lands"
            self.advance(time)
        return flow.ended

    @property
    def in_flight(self) -> int:
        """Return the number of flows that have not landed."""
        return len(self._moving) + len(self._waiting)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _run(self, now: int) -> None:
        """Let everything start and land that does so by ``now``, each at its instant."""
        if now < self._now:
            raise ClockError(f"time doesn't run backwards: the network is at {self._now} ns, not {now} ns")
        self._now = now
        while True:
            start = self._waiting[0][0] if self._waiting else None
            landing = self._next
            if landing is not None and landing <= now and (start is None or landing <= start):
                self._settle(landing)
                for flow in [flow for flow in self._moving.values() if flow.left <= 0]:
                    self._leave(flow, landing)
                    self._land(flow, landing)
                self._share()
            elif start is not None and start <= now:
                self._settle(start)
                while self._waiting and self._waiting[0][0] == start:
                    self._start(heappop(self._waiting)[2], start)
                self._share()
            else:
                return

    def _start(self, flow: Flow, now: int) -> None:
        if not flow.left or not any(port in self._limits for port in flow.ports):
            self._land(flow, now)
            return
        self._moving[flow.number] = flow
        for port in flow.ports:
            use = self.ports[port]
            if not use.flows:
                use.since = now
            use.flows[flow.number] = flow

    def _leave(self, flow: Flow, now: int) -> None:
        del self._moving[flow.number]
        for port in flow.ports:
            use = self.ports[port]
            del use.flows[flow.number]
            if not use.flows:
                use.busy_ns += now - use.since

    def _land(self, flow: Flow, now: int) -> None:
        flow.ended, flow.landed = now, True
        for port in flow.ports:
            self.ports[port].bytes += flow.nbytes
            self.ports[port].queued_ns += flow.queued
        self._landed.append(flow)

    def _settle(self, now: int) -> None:
        """Subtract the amounts moved since the last change."""
        passed = now - self._at
        self._at = now
        if passed:
            for flow in self._moving.values():
                flow.left -= flow.rate * passed / SECOND

    def _share(self) -> None:
        """Compute the rates of moving flows, and the first landing."""
        moving = self._moving
        if not moving:
            self._next = None
            return
        if len(moving) == 1 or not self._shared:
            for flow in moving.values():
                flow.rate = Fraction(min([self._limits[port] for port in flow.ports if port in self._limits]))
        else:
            self._fill(moving)
        # Instants are whole: what lands within a nanosecond lands at its end.
        self._next = min([self._at - (-flow.left * SECOND // flow.rate) for flow in moving.values()])

    def _fill(self, moving: dict[int, Flow]) -> None:
        """Give each flow its max-min fair rate."""
        open_flows = dict(moving)
        room: dict[Hashable, Fraction] = {}
        count: dict[Hashable, int] = {}
        for flow in moving.values():
            for port in flow.ports:
                if port in self._limits:
                    room.setdefault(port, Fraction(self._limits[port]))
                    count[port] = count.get(port, 0) + 1
        while open_flows:
            # The port that is full first is the one with the least left for each flow through it.
            level, tight = min((room[port] / count[port], index) for index, port in enumerate(room) if count[port])
            full = list(room)[tight]
            for flow in [candidate for candidate in self.ports[full].flows.values() if candidate.number in open_flows]:
                flow.rate = level
                del open_flows[flow.number]
                for port in flow.ports:
                    if port in room:
                        room[port] -= level
                        count[port] -= 1

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the shares are max-min fair (I7) and every flow is in its place."""
        if self._shared:
            check_fair(
                [(flow.rate, {port: self._limits.get(port) for port in flow.ports}) for flow in self._moving.values()]
            )
        for port, use in self.ports.items():
            assert use.flows == {n: flow for n, flow in self._moving.items() if port in flow.ports}, (
                f"{port} lost a flow"
            )
        assert all(flow.left > 0 and flow.ended is None for flow in self._moving.values()), (
            "a flow moves and is through"
        )
        assert all(flow.started > self._now for _, _, flow in self._waiting), "a flow waits that has started"
