"""Sockets and their addresses."""

from __future__ import annotations

import pytest

from kvyard.events.transport.zeromq import attach

pytestmark = pytest.mark.zmq


@pytest.mark.parametrize(
    ("endpoint", "six"), [("tcp://[::1]:9", 1), ("tcp://127.0.0.1:9", 0), ("ipc:///tmp/nowhere", 0)]
)
def test_a_socket_speaks_ipv6_where_the_address_does(endpoint: str, six: int) -> None:
    zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        assert attach(socket, endpoint, bind=False) == endpoint
        assert socket.getsockopt(zmq.IPV6) == six
