"""Running a server: a port that is known before anybody is told of it, and an end that lets answers go out first.

SIGINT and SIGTERM end it alike, with exit code 0: open requests are answered, then the application shuts down. A second
signal ends it at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import Any

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.heads import HEADER_BYTES, bounded, protocol


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ``KvyardError`` where the address can't be had."""
    if not 0 <= port <= 65535:  # the resolver would take it, and wrap it round
        raise KvyardError(f"there is no port {port}: choose one from 1 to 65535, or 0 for any that is free")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        # With its protocol named: asyncio sends small answers at once only where it knows that this is TCP.
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise KvyardError(f"can't find {host!r}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise KvyardError(f"can't listen at {host}:{port}: {why}; choose another --port, or 0 for any") from None
    return bound


def allow_files() -> None:
    """Let this process open as many files as it may, not as many as it is given: a proxy needs two for each request."""
    try:
        import resource
    except ImportError:
        return  # not on this system
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def url_of(bound: socket.socket) -> str:
    """Where a bound socket is reached from this machine."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Running:
    """One uvicorn server. ``run`` blocks until ``stop`` or a signal."""

    def __init__(
        self,
        app: Any,
        bound: socket.socket,
        *,
        around: AbstractAsyncContextManager[Any] | None = None,
        ready: Callable[[str], None] | None = None,
        ending: Callable[[], None] | None = None,
        drain_seconds: float = 5,
        keep_alive_seconds: int = 5,
    ) -> None:
        """``around`` is entered before and left after serving, on the same loop; what it raises ends ``run``.

        ``ready`` is called with the address once requests are answered, ``ending`` when a signal or ``stop`` asks for the end;
        what is under way then has ``drain_seconds``. Connections are kept for ``keep_alive_seconds`` between requests.

        Raises ``KvyardError`` without uvicorn.
        """
        try:
            import uvicorn
        except ImportError:
            raise KvyardError("serving needs Starlette and uvicorn: pip install 'kvyard[server]'") from None
        self.url = url_of(bound)
        self._bound = bound
        self._around = around or nullcontext()
        self._ready = ready
        self._ending = ending
        self._beginning: asyncio.Task[Any] | None = None
        """Who enters ``around``, while that takes."""
        # No access log: paths alone say little, and whatever is logged has to be kept safe.
        config = uvicorn.Config(
            bounded(app),
            log_level="warning",
            access_log=False,
            ws="none",
            proxy_headers=False,
            lifespan="off",
            http=protocol(),
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
            timeout_keep_alive=keep_alive_seconds,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _leave_signals_alone  # type: ignore[method-assign, assignment]

    def run(self) -> None:
        """Serve."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        """End gracefully; any thread may call it."""
        self._end()

    def _end(self) -> None:
        if not self._server.should_exit and self._ending is not None:
            self._ending()
        self._server.should_exit = True

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signalled)
        async with AsyncExitStack() as around:
            self._beginning = asyncio.current_task()
            try:
                await around.enter_async_context(self._around)
            except asyncio.CancelledError:
                if not self._server.should_exit or self._beginning is None:
                    raise
                self._beginning.uncancel()
                return
            finally:
                self._beginning = None
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._bound]))
            while not self._server.started and not serving.done():
                await pause(0.01)
            if self._server.started and self._ready is not None:
                self._ready(self.url)
            await serving

    def _signalled(self) -> None:
        if self._server.should_exit:
            self._server.force_exit = True
        self._end()
        if self._beginning is not None:
            self._beginning.cancel()  # nothing is under way yet, so there is nothing to wait for


class _leave_signals_alone:
    """In place of uvicorn's own handling, which would end the process by the signal it had just survived."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
