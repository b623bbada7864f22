"""Watching: brings messages to cases for a bounded time, from sockets or from recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvyard.clock import MS, SECOND, Clock, WallClock
from kvyard.errors import KvyardError
from kvyard.events.recording import Recording
from kvyard.events.transport import fetch_replay
from kvyard.events.transport.state import Limits
from kvyard.events.transport.wiring import READ_AT_ONCE, Wiring, note_connection
from kvyard.events.transport.zeromq import require
from kvyard.server.doctor.case import Case

LIMITS = Limits(reply=SECOND, attempts=2, cooldown=2 * SECOND, probe=SECOND, probe_most=4 * SECOND)
"""Less patient than a service: whoever waits for the doctor sits in front of it."""

LINGER = 200 * MS
"""How long to listen at a time."""

BEYOND = (1 << 62) - 1
"""A sequence number that nobody has got to: the answer is that there is nothing, and that is an answer."""


def watch(
    cases: Sequence[Case], until: int, clock: Clock | None = None, busy: Callable[[], bool] = lambda: False
) -> None:
    """Listen to every case up to the time ``until``, and while somebody is ``busy`` sending requests. Ctrl-C passes
    through, with all that came in by then taken in.

    Raises ``KvyardError`` where an endpoint can't be had.
    """
    zmq = require()
    clock = clock or WallClock()
    context = zmq.Context.instance()
    # Everything is subscribed to, whatever the topic: a topic that never matches is a finding.
    wirings = [Wiring(case.name, replay=case.replay, topic="", rank=0, hwm=0) for case in cases]
    try:
        for case, wiring in zip(cases, wirings, strict=True):
            wiring.open(context)
            case.start(clock.now())
        while (now := clock.now()) < until or busy():
            due = max(until, now + LINGER)
            poller = zmq.Poller()
            for case, wiring in zip(cases, wirings, strict=True):
                case.subscription.tick(now)
                wiring.adjust(case.subscription)
                case.settle(now)
                if case.subscription.due is not None:
                    due = min(due, case.subscription.due)
                for socket in wiring.watched():
                    poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(-(-max(0, min(due - now, LINGER)) // MS)))
            for case, wiring in zip(cases, wirings, strict=True):
                _read(case, wiring, ready, clock)
        for case in cases:
            case.settle(clock.now())
            case.ended = clock.now()
    finally:
        for wiring in wirings:
            wiring.close()


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


def _read(case: Case, wiring: Wiring, ready: dict[object, int], clock: Clock) -> None:
    zmq = require()
    now = clock.now()
    if wiring.monitor in ready:
        for parts in _messages(wiring.monitor, zmq):
            note_connection(parts, case.subscription, now)
    for number, dealer in list(wiring.dealers.items()):
        if dealer in ready:
            for parts in _messages(dealer, zmq):
                case.subscription.reply(number, parts, now)
    if wiring.sub in ready:
        for parts in _messages(wiring.sub, zmq):
            case.message(parts, now)


def _messages(socket: object, zmq: object) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    while len(found) < READ_AT_ONCE:
        try:
            found.append(socket.recv_multipart(zmq.NOBLOCK))  # type: ignore[attr-defined]
        except zmq.Again:  # type: ignore[attr-defined]
            break
    return found
