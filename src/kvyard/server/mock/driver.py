"""The driver: carries an engine through nominal time while real time decides only when.

Input from outside is stamped on receipt and carried out at its stamp, in order; a pass that starts at N has seen all stamps
up to N. However late the process is scheduled, the same stamps give the same decisions. The delay is reported.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from kvyard.clock import SECOND, Clock
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.server.mock.actions import ACTIONS

AT_ONCE = 64
"""Instants carried out before others get their turn."""

Action = Callable[[int], None]
Journal = Callable[[int, str, Job, int], None]
"""Told (stamp, one of ``ACTIONS``, job, rank) in the order in which things are carried out."""


class EngineDriver(msgspec.Struct, eq=False):
    """Drives ``engine``. Made and used on one event loop."""

    engine: Ranks
    clock: Clock
    speed: float
    settled: Callable[[], None] = lambda: None
    """Called after every turn."""
    lagged: Callable[[float], None] = lambda seconds: None
    """Told by how many real seconds each instant was late."""
    failed: Callable[[Exception], None] | None = None
    """Told where the engine itself fails; it stands still from then on."""
    journal: Journal = lambda stamp, what, job, rank: None
    _inbox: deque[tuple[int, Action]] = msgspec.field(default_factory=deque)
    _horizon: int = 0
    """Everything up to here is carried out."""
    _timer: asyncio.Handle | None = None
    _frozen: int | None = None
    _lost: int = 0
    """Nominal time that passed while it stood still."""
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._horizon = self.clock.now()

    def now(self) -> int:
        """Return the engine's nominal time: it stands still while the engine is frozen."""
        time = self.clock.now() if self._frozen is None else self._frozen
        return time - self._lost

    # -- what comes from outside --------------------------------------------------------------------------------------

    def submit(self, job: Job, rank: int = 0) -> int:
        """Submit ``job`` now; returns its stamp."""

        return self.act("submit", job, rank)

    def cancel(self, job: Job, rank: int = 0) -> int:
        """Cancel ``job`` now; returns its stamp."""
        return self.act("cancel", job, rank)

    def act(self, what: str, job: Job, rank: int = 0, time: int | None = None) -> int:
        """Pass ``what``, one of ``ACTIONS``, about ``job`` to the engine; returns its stamp."""

        def action(now: int) -> None:
            self.journal(now, what, job, rank)
            ACTIONS[what](self.engine, job, now, rank)

        return self.receive(action, time)

    def receive(self, action: Action, time: int | None = None) -> int:
        """Have ``action`` done at its stamp, which is returned: now, or ``time`` that time where it isn't over."""
        stamp = max(self.now() if time is None else time, self._horizon + 1)
        if self._inbox:
            stamp = max(stamp, self._inbox[-1][0])
        self._inbox.append((stamp, action))
        self._wake(0)
        return stamp

    @property
    def frozen(self) -> bool:
        """Return true if the engine stands still."""
        return self._frozen is not None

    def freeze(self) -> None:
        """Let the engine stand still: its time doesn't pass."""
        if self._frozen is None:
            self._frozen = self.clock.now()
            self._cancel_timer()

    def thaw(self) -> None:
        """Go on where it stood still."""
        if self._frozen is not None:
            self._lost += self.clock.now() - self._frozen
            self._frozen = None
            self._wake(0)

    def stop(self) -> None:
        """Stop for good."""
        self._stopped = True
        self._inbox.clear()
        self._cancel_timer()

    # -- time -----------------------------------------------------------------------------------------------------------

    def _wake(self, delay: float) -> None:
        if self._stopped or self._frozen is not None:
            return
        loop = asyncio.get_running_loop()
        self._cancel_timer()
        self._timer = loop.call_later(delay, self._turn) if delay > 0 else loop.call_soon(self._turn)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        until = self.now()
        try:
            more = self.carry(until)
            self.settled()
        except Exception as error:
            if self.failed is None:
                raise
            self.stop()
            self.failed(error)
            return
        if more:
            self._wake(0)
            return
        due = self._next()
        if due is not None:
            self._wake(max((due - self.now()) / (self.speed * SECOND), 1e-6))

    def _next(self) -> int | None:
        due = self.engine.next_decision()
        if self._inbox and (due is None or self._inbox[0][0] < due):
            return self._inbox[0][0]
        return due

    def carry(self, until: int) -> bool:
        """Carry out what is due by ``until``; returns whether there is more, where it was too much for one turn."""
        engine, inbox = self.engine, self._inbox
        for _ in range(AT_ONCE):
            now = self._next()
            if now is None or now > until:
                self._horizon = max(self._horizon, until)
                return False
            self.lagged((until - now) / (self.speed * SECOND))
            engine.advance(now)
            while inbox and inbox[0][0] <= now:
                inbox.popleft()[1](now)
            engine.begin(now)
            self._horizon = max(self._horizon, now)
        return True
