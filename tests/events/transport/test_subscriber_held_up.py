"""A subscriber that was held up for longer than any heartbeat goes on, in the same process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

import zmq

from kvyard.events.transport.subscriber import SubscriberSockets

pytestmark = pytest.mark.zmq
ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "tests.events.transport.held_up")
SECONDS, TIMES = 18, 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_subscriber_that_was_held_up_goes_on() -> None:
    """With ZeroMQ's heartbeats, of 15 s, libzmq 4.3.5 aborted it the first or second time."""
    with subprocess.Popen([*COMMAND, "publish"], stdout=subprocess.PIPE, text=True, cwd=ROOT) as publisher:
        try:
            assert publisher.stdout is not None
            addresses = publisher.stdout.readline().split()
            following = [*COMMAND, "follow", *addresses, str(SECONDS), str(TIMES)]
            done = subprocess.run(following, capture_output=True, text=True, cwd=ROOT, check=False)
        finally:
            publisher.kill()
    assert (done.returncode, done.stdout.split()) == (0, ["fresh"] * (TIMES + 1)), done.stderr


def test_a_socket_that_may_be_full_has_no_heartbeats() -> None:
    async def look() -> tuple[int, int, int]:
        sockets = SubscriberSockets("tcp://127.0.0.1:9", replay=None)
        sockets.open()
        try:
            wanted = (zmq.RCVHWM, zmq.HEARTBEAT_IVL, zmq.TCP_KEEPALIVE)
            room, heartbeat, alive = (sockets._sub.getsockopt(option) for option in wanted)
            return room, heartbeat, alive
        finally:
            sockets.close()

    room, heartbeat, alive = asyncio.run(look())
    assert room > 0 and heartbeat == 0 and alive == 1
