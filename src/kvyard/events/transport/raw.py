"""A stream as it is, unread and unordered, for recording and checking. To follow a stream use a subscriber."""

from collections.abc import Iterator

from kvyard.clock import MS, Clock, WallClock
from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import at_rank, check, is_bound_by_subscriber
from kvyard.events.transport.frames import Frame, ReplyKind, fingerprint, read_live, read_reply, request
from kvyard.events.transport.zeromq import attach, require, shared_context
from kvyard.integers import ceil_div


def raw_messages(
    endpoint: str,
    *,
    until: int | None = None,
    topic: str = "",
    rank: int = 0,
    replay: str | None = None,
    clock: Clock | None = None,
) -> Iterator[tuple[int, list[bytes]] | None]:
    """Return each message with the time of its arrival, up to the time ``until`` (``None``: for ever).

    Now and then ``None`` comes instead, when nothing else does. ``replay`` is asked first for what was published before, and
    what it brought is not repeated when it also comes live. Raises ``KvyardError``: here for what isn't an endpoint, later
    where it can't be subscribed to or the replay endpoint doesn't answer.
    """
    there = at_rank(endpoint, rank)
    past = None if replay is None else at_rank(replay, rank)
    return _messages(there, past, topic.encode(), until, clock or WallClock())


def _messages(
    endpoint: str, replay: str | None, topic: bytes, until: int | None, clock: Clock
) -> Iterator[tuple[int, list[bytes]] | None]:
    zmq = require()
    replayed: dict[tuple[bytes, int], int] = {}
    with shared_context().socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RCVHWM, 0)
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        attach(sub, endpoint, is_bound_by_subscriber(endpoint))
        if replay is not None:
            sub.poll(100)  # the subscription should be there first, or something falls in between
            for frame in fetch_replay(replay):
                if frame.topic.startswith(topic):
                    replayed[frame.topic, frame.seq] = fingerprint(frame.payload)
                    yield clock.now(), frame.parts()
        while until is None or clock.now() < until:
            left = 200 if until is None else min(200, ceil_div(max(0, until - clock.now()), MS))
            if not sub.poll(left):
                yield None
                continue
            parts = sub.recv_multipart()
            live = read_live(parts) if replayed else ""
            known = replayed.get((live.topic, live.seq)) if isinstance(live, Frame) else None
            if known is None or known != fingerprint(parts[-1]):
                yield clock.now(), parts


def fetch_replay(endpoint: str, start: int = 0, *, timeout: float = 2.0) -> Iterator[Frame]:
    """Yield the batches from sequence ``start`` on that the publisher at ``endpoint`` still has.

    Raises ``KvyardError`` if it is silent for ``timeout`` seconds before the end of the replay.
    """
    zmq = require()
    with shared_context().socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        attach(dealer, check(endpoint), bind=False)
        dealer.send_multipart(request(start))
        while dealer.poll(round(timeout * 1000)):
            reply = read_reply(dealer.recv_multipart())
            if isinstance(reply, str):
                continue
            if reply.kind == ReplyKind.END:
                return
            if reply.kind == ReplyKind.BATCH:
                yield Frame(reply.topic or b"", reply.seq, reply.payload)
        raise KvyardError(f"nothing answered at {endpoint} within {timeout:g} s: is that the replay endpoint?")
