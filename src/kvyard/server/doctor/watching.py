"""Watching: brings messages to cases for a bounded time, from sockets or from recordings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvyard.clock import MS, SECOND, Clock, WallClock
from kvyard.errors import KvyardError
from kvyard.events.recording import Recording
from kvyard.events.transport import fetch_replay
from kvyard.events.transport.sockets import SubscriberSockets
from kvyard.events.transport.state import Limits
from kvyard.server.doctor.case import Case

LIMITS = Limits(reply=SECOND, attempts=2, cooldown=2 * SECOND, probe=SECOND, probe_most=4 * SECOND)
"""Less patient than a service: a person waits for the doctor."""

LINGER = 200 * MS
"""How long to listen at a time."""

BEYOND = (1 << 62) - 1
"""A sequence number that no stream has got to: the answer is that there is nothing, and that is an answer."""


def watch(
    cases: Sequence[Case], until: int, clock: Clock | None = None, busy: Callable[[], bool] = lambda: False
) -> None:
    """Listen to every case up to the time ``until``, and while requests are being sent (``busy``). Ctrl-C passes
    through, with all that came in by then taken in.

    Raises ``KvyardError`` where an endpoint can't be had.
    """
    clock = clock or WallClock()

    async def listen(case: Case) -> None:
        # Everything is subscribed to, whatever the topic: a topic that never matches is a finding.
        sockets = SubscriberSockets(case.name, replay=case.replay)
        sockets.open()
        try:
            case.start(clock.now())
            while (now := clock.now()) < until or busy():
                end = now + LINGER if now >= until else min(until, now + LINGER)
                await sockets.exchange(case.subscription, end, clock, case.message)
                case.settle(clock.now())
            case.ended = clock.now()
        finally:
            sockets.close()

    async def listen_to_all() -> None:
        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(listen(case))

    try:
        asyncio.run(listen_to_all())
    except* KvyardError as problems:
        raise problems.exceptions[0] from None


def ask_for_replay(cases: Sequence[Case], seconds: float = 1.0) -> None:
    """See whether replay endpoints answer at all: a stream that lost nothing has had no reason to ask."""
    for case in cases:
        if case.replay is None or any(one.counters.replayed or one.counters.snapshots for one in case.statuses()):
            continue
        try:
            for _ in fetch_replay(case.replay, BEYOND, timeout=seconds):
                pass
            case.replay_answers = True
        except KvyardError:
            case.replay_answers = False


def play(case: Case, path: str) -> None:
    """Take in a recording. Raises ``KvyardError`` where it can't be read."""
    started = False
    for recorded in Recording(path):
        if not started:
            case.start(recorded.at)
            started = True
        case.subscription.tick(recorded.at)
        case.message(recorded.parts, recorded.at)
    if started:
        # A batch that is missing may only be late: let that time pass.
        case.subscription.tick(case.ended + LIMITS.patience + 1)
        case.settle(case.ended)
