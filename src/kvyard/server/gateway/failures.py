"""How engines fail a request, before their first byte and after it; and a body that can be sent to one after the other.

Loaded with aiohttp only.
"""

from __future__ import annotations

import errno
from typing import Any

import aiohttp

from kvyard.server.http import JSON

ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Answers with which another engine is asked."""
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection that are no fault of whoever is at its other end."""


class Failed(Exception):
    """An engine failed before its first byte."""

    def __init__(
        self,
        reason: str,
        *,
        reached: bool = True,
        gone: bool = False,
        answer: tuple[int, Any, bytes] | None = None,
    ) -> None:
        """``reached``: it may have seen the request. ``gone``: nobody is there. ``answer`` is what it said instead: status,
        headers and body.
        """
        super().__init__(reason)
        self.reason = reason
        self.reached = reached
        self.gone = gone
        self.answer = answer

    @property
    def busy(self) -> bool:
        """Whether it only said that it has too much to do."""
        return self.answer is not None and self.answer[0] == 429


class Broken(Exception):
    """An engine failed after its first byte went out."""


def reason_of(error: BaseException) -> str:
    """An error of the client library in a few words."""
    if isinstance(error, TimeoutError):
        return "it was silent for too long"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return "it closed the connection"
    return f"{type(error).__name__}: {error}"[:200]


class Body(aiohttp.BytesPayload):
    """Bytes to send. The library warns of large ones, which prompts are by nature."""

    def __init__(self, value: bytes) -> None:
        aiohttp.Payload.__init__(self, value, content_type=JSON)
        self._size = len(value)
