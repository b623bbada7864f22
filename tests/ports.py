"""Ports for processes that tests start: free now, and given to no other socket before the process binds them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path


def _ephemeral_from() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768


_SLICE = 2000
_FIRST = max(1024, _ephemeral_from() - 8 * _SLICE) + _SLICE * (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
)
_offset = random.SystemRandom().randrange(_SLICE)


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports that are free just now, for a process that binds them a moment later.

    They lie below those that the system hands out by itself, in a slice of this test worker's own, and are not given twice
    in a row: so no other socket of the tests takes one in between.
    """
    global _offset
    for _ in range(_SLICE):
        first, _offset = _FIRST + _offset, (_offset + count) % (_SLICE - 32)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no ports left")
