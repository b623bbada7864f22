"""The one private part of asyncio that is used, on Python 3.11 alone, and why."""

import sys
from typing import Any


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
