"""One process follows more streams than a context of ZeroMQ has sockets for by itself."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

pytestmark = pytest.mark.zmq
STREAMS = 360
FOLLOW = f"""
import asyncio, resource
from kvyard.events.transport.subscriber import SubscriberSockets

resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

async def follow():
    opened = [SubscriberSockets("tcp://127.0.0.1:9", replay=None) for _ in range({STREAMS})]
    for one in opened:
        one.open()
    for one in opened:
        one.close()

asyncio.run(follow())
"""


def test_a_process_follows_more_than_341_streams() -> None:
    """A process of its own: the context's room is settled with its first socket."""
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 12 * STREAMS:
        pytest.skip("this machine allows too few open files")
    done = subprocess.run([sys.executable, "-c", FOLLOW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
