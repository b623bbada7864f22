"""The ways in which engines fail."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection that are no fault of its other end."""
ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions of the client library if an engine fails."""


class EngineFailed(Exception):
    """An engine failed before its first byte."""

    def __init__(
        self, reason: str, *, reached: bool = True, gone: bool = False, answer: tuple[int, Any, bytes] | None = None
    ) -> None:
        """``reached``: it may have seen the request. ``gone``: there is no process any more. ``answer`` is its error
        response: status, headers and body.
        """
        super().__init__(reason)
        self.reason = reason
        self.reached = reached
        self.gone = gone
        self.answer = answer

    @property
    def busy(self) -> bool:
        """Return true if it only reported overload."""
        return self.answer is not None and self.answer[0] == 429


class EngineMoved(EngineFailed):
    """An engine serves another model than before: no fault of its own."""

    @property
    def busy(self) -> bool:
        return True


def unreachable(error: OSError) -> EngineFailed:
    """Return the failure of an engine to which no connection could be made."""
    reason = f"it can't be reached: {error.strerror or error}"
    return EngineFailed(reason, reached=False, gone=error.errno not in OURS)


def failure(error: BaseException) -> EngineFailed:
    """Describe one of ``ERRORS`` in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = f"it can't be reached: {error.strerror or error.os_error}"
        return EngineFailed(reason, reached=False, gone=error.errno not in OURS)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return EngineFailed("it can't be reached in time", reached=False)
    if isinstance(error, TimeoutError):
        return EngineFailed("it was silent for too long")
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return EngineFailed("it closed the connection")
    return EngineFailed(f"{type(error).__name__}: {error}"[:200])


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise ``EngineFailed`` for what the client library raises within."""
    try:
        yield
    except ERRORS as error:
        raise failure(error) from None
