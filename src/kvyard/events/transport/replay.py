"""Fetching once what a publisher still has to replay. For tools; to follow a stream use a subscriber."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import check
from kvyard.events.transport.frames import Frame, ReplyKind, read_reply, request
from kvyard.events.transport.zeromq import attach, require


def fetch_replay(endpoint: str, start: int = 0, *, timeout: float = 2.0, context: Any = None) -> Iterator[Frame]:
    """The batches from sequence ``start`` on that the publisher at ``endpoint`` still has.

    Raises ``KvyardError`` where it is silent for ``timeout`` seconds before it said that this was all.
    """
    zmq = require()
    dealer = (context or zmq.Context.instance()).socket(zmq.DEALER)
    try:
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
    finally:
        dealer.close(linger=0)
