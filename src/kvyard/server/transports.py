"""The private parts of asyncio that are used, and why."""

import asyncio.sslproto
import sys
from typing import Any

TLS_BUFFER = 32 << 10
"""Bytes of a TLS connection's buffer: two records."""


def shrink_tls_buffers() -> None:
    """Let each TLS connection of this process have a buffer of ``TLS_BUFFER`` bytes, not of 256 KiB: idle connections would
    hold most of a server's memory. No public call sets it.
    """
    kind: Any = asyncio.sslproto.SSLProtocol
    if hasattr(kind, "max_size"):
        kind.max_size = TLS_BUFFER


def untie(transport: Any) -> None:
    """Let the transport of a lost connection be freed at once.

    On Python 3.11 asyncio's socket transports keep a bound method of their own, and so would wait for a garbage search among
    all objects: by the time they are closed they have mostly been set aside (``garbage``). No public call gives that reference
    up. From 3.12 on asyncio does so itself.
    """
    if sys.version_info < (3, 12):
        fields = getattr(transport, "__dict__", None)
        if fields is not None:  # other event loops have none
            fields.pop("_read_ready_cb", None)
