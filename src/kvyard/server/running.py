"""Running a server: a port that is bound before it is announced, and a graceful shutdown.

SIGINT and SIGTERM end it alike, with exit code 0: open requests are answered, then the application shuts down. A second
signal ends it at once.
"""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext, suppress
from typing import Any, Self, TypeVar

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.connection import ClientConnection, RequestHandler, ServerState
from kvyard.server.handshake import Handshake
from kvyard.server.transports import shrink_tls_buffers

log = logging.getLogger(__name__)

T = TypeVar("T")
BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
MOST_FILES = 1 << 20
"""Limit of open files if the system has none."""
CUT_SECONDS = 1.0
"""Seconds for which requests that are cut off may report it to their clients."""
ACCEPT_TURNS = 4
"""Turns of the loop after which asyncio has reported every connection that it accepted: a task of its own opens the
transport, which reports itself in the next turn.
"""


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a bound socket; ``shared`` if other processes bind the same address this way. Raises ``KvyardError`` if the
    address isn't available.
    """
    if not 0 <= port <= 65535:  # the resolver would take it, and wrap it round
        raise KvyardError(f"there is no port {port}: choose one from 1 to 65535, or 0 for any that is free")
    try:
        candidates = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = candidates[0]
        # With its protocol named: asyncio sends small answers at once only where it knows that this is TCP.
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # a name that can't be one is a ValueError
        raise KvyardError(f"can't find {host!r}: {getattr(error, 'strerror', None) or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise KvyardError(f"can't listen at {host}:{port}: {why}; choose another --port, or 0 for any") from None
    return bound


_hangups: list[int] = []
"""SIGHUPs that were held back."""


@contextmanager
def hangups_wait() -> Iterator[None]:
    """Hold SIGHUP back, which would end a server that starts, until one handles it and calls ``take_hangups``."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda number, _: _hangups.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        _hangups.clear()


def take_hangups() -> None:
    """Send this process the SIGHUP that was held back, if there was one."""
    if _hangups:
        os.kill(os.getpid(), _hangups.pop())
        _hangups.clear()


async def patiently(action: Callable[[], T]) -> T:
    """Return the result of ``action``, tried for five seconds: an address may be free again some time after its socket was
    closed."""
    for _ in range(100):
        try:
            return action()
        except KvyardError:
            await pause(0.05)
    return action()


def allow_files() -> int:
    """Raise the limit of open files to the hard limit, since a proxy needs two files for each request. Returns the new
    limit.
    """
    try:
        import resource
    except ImportError:
        return MOST_FILES  # not on this system
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


class TlsFiles(msgspec.Struct):
    """Certificate of a server, with its chain, and its key, both as PEM."""

    certificate: str
    key: str
    _usable: ssl.SSLContext | None = None
    """Context of the latest files that were valid."""

    def context(self) -> ssl.SSLContext:
        """Return the TLS context: from the files as they are, or as they were if they can't be used just now. Raises
        ``KvyardError`` if they never could.
        """
        try:
            fresh = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            fresh.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            problem = f"TLS isn't possible with {self.certificate} and {self.key}: {why}; give both as PEM"
            if self._usable is None:
                raise KvyardError(problem) from None
            log.warning("%s; the certificate stays as it was", problem)
            return self._usable
        self._usable = fresh
        return fresh


def tls_files(certificate: str | None, key: str | None) -> TlsFiles | None:
    """Return both files, or ``None`` if neither is given. Raises ``KvyardError`` if one is missing or invalid."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise KvyardError("TLS needs a certificate and its key: give both --tls-cert and --tls-key")
    files = TlsFiles(certificate, key)
    files.context()
    return files


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Return the address of a bound socket for this machine."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return true if only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AsyncService:
    """Something to ``start`` and ``stop``. ``async with`` does both, and stops what didn't start."""

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


class HttpServer:
    """One HTTP server on a loop that it may share. Starts once; ends in order, or at once."""

    def __init__(
        self,
        app: RequestHandler,
        bound: socket.socket,
        *,
        drain_seconds: float = 5,
        keep_alive_seconds: float = 5,
        tls: TlsFiles | None = None,
    ) -> None:
        """At the end, requests in flight have ``drain_seconds``. Connections are kept for ``keep_alive_seconds`` between
        requests. With ``tls`` it speaks HTTPS. Raises ``KvyardError`` for files that can't be used.
        """
        self._tls = None if tls is None else tls.context()
        if tls is not None:
            shrink_tls_buffers()
        self.url = url_of(bound, "http" if tls is None else "https")
        self.port: int = bound.getsockname()[1]
        self.ending = False
        """True if it was asked to end."""
        self._bound = bound
        self._drain_seconds = drain_seconds
        self._state = ServerState(app, keep_alive_seconds)
        self._server: asyncio.Server | None = None
        self._ended: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Its loop, once it has started."""
        self._asked = asyncio.Event()
        """Set when it was asked to end."""
        self._hurried = asyncio.Event()
        """Set to stop waiting for requests in flight."""

    async def start(self) -> None:
        """Serve; returns once requests are answered."""
        self._loop = asyncio.get_running_loop()
        state, tls, files = self._state, self._tls, allow_files()
        # A proxy's request needs a second file, and as many connections as the backlog are accepted before any is counted.
        state.held.connections = files // 2
        self._server = await self._loop.create_server(
            lambda: ClientConnection(state) if tls is None else Handshake(state, tls),
            sock=self._bound,
            backlog=max(1, min(BACKLOG, files // 8)),
        )
        self._ended = self._loop.create_task(self._end_when_asked())
        if self.ending:
            self._asked.set()

    async def wait(self) -> None:
        """Wait until it has ended. A caller that is cancelled doesn't take the server down."""
        if self._ended is not None:
            await asyncio.wait((self._ended,))
            self._ended.result()

    def end(self) -> None:
        """Accept no more connections; requests in flight have ``drain_seconds``. Thread-safe."""
        self.ending = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and the server with it
                self._loop.call_soon_threadsafe(self._asked.set)

    async def stop(self) -> None:
        """``end`` and ``wait``."""
        self.end()
        await self.wait()
        if self._hurried.is_set():
            self._reset()  # connections accepted during ``die``
            await pause()

    def hurry(self) -> None:
        """Stop waiting for requests in flight."""
        self._hurried.set()

    def die(self) -> None:
        """Reset all connections immediately, and accept no more; ``stop`` then ends the rest."""
        self._accept_no_more()
        self._reset()
        self._hurried.set()
        self.end()

    async def _end_when_asked(self) -> None:
        await self._asked.wait()
        self._accept_no_more()
        for _ in range(ACCEPT_TURNS):  # asyncio loses connections that it has accepted, but not reported, at ``close``
            await pause()
        if self._server is not None:
            self._server.close()
        self._bound.close()
        state = self._state
        state.ending = True
        idle = asyncio.Event()
        state.on_idle = idle.set
        for connection in list(state.connections):
            connection.shutdown()
        if not state.connections:
            return
        waiting = [asyncio.ensure_future(idle.wait()), asyncio.ensure_future(self._hurried.wait())]
        await asyncio.wait(waiting, timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        tasks = [
            connection.request.task
            for connection in state.connections
            if connection.request is not None and connection.request.task
        ]
        if tasks and not self._hurried.is_set():
            log.error("%d requests in flight had no more time, and were cut off", len(tasks))
        for connection in list(state.connections):
            connection.cut()
        for task in waiting:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CUT_SECONDS)
        for connection in list(state.connections):
            connection.transport.close()
        await pause()  # lets the loop close them

    def _accept_no_more(self) -> None:
        if self._loop is not None and self._bound.fileno() >= 0:
            self._loop.remove_reader(self._bound)

    def _reset(self) -> None:
        for connection in list(self._state.connections):
            connection.abort()


class Running:
    """A server as a process: ``run`` blocks until ``stop`` or a signal."""

    def __init__(
        self,
        app: RequestHandler,
        bound: socket.socket,
        *,
        around: AbstractAsyncContextManager[Any] | None = None,
        ready: Callable[[str], None] | None = None,
        ending: Callable[[], None] | None = None,
        hurrying: Callable[[], None] | None = None,
        drain_seconds: float = 5,
        keep_alive_seconds: int = 5,
        tls: TlsFiles | None = None,
        patient: bool = False,
    ) -> None:
        """``around`` is entered before and left after serving, on the same loop; what it raises ends ``run``.

        ``ready`` is called with the address once requests are answered, ``ending`` when a signal or ``stop`` asks for the end,
        ``hurrying`` at a second signal. If ``patient``, a second signal changes nothing and it waits until ``hurry``.
        The rest is as for ``HttpServer``.
        """
        self._server = HttpServer(
            app, bound, drain_seconds=drain_seconds, keep_alive_seconds=keep_alive_seconds, tls=tls
        )
        self.url = self._server.url
        self._around = around or nullcontext()
        self._ready = ready
        self._ending = ending
        self._hurrying = hurrying
        self._patient = patient
        self._entering: asyncio.Task[Any] | None = None
        """The task that is entering ``around``, until it has entered."""

    def run(self) -> None:
        asyncio.run(self._serve())

    def stop(self) -> None:
        """End gracefully. Thread-safe."""
        if not self._server.ending and self._ending is not None:
            self._ending()
        self._server.end()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.interrupt)
        async with AsyncExitStack() as around:
            self._entering = asyncio.current_task()
            try:
                await around.enter_async_context(self._around)
            except asyncio.CancelledError:
                if not self._server.ending or self._entering is None:
                    raise
                self._entering.uncancel()
                return
            finally:
                self._entering = None
            await self._server.start()
            if self._ready is not None:
                self._ready(self.url)
            await self._server.wait()

    def hurry(self) -> None:
        """End without waiting for requests in flight."""
        self._server.hurry()
        if self._hurrying is not None:
            self._hurrying()

    def interrupt(self) -> None:
        """Handle SIGINT or SIGTERM."""
        if self._server.ending and not self._patient:
            self.hurry()
        self.stop()
        if self._entering is not None:
            self._entering.cancel()  # nothing is in flight yet, so there is nothing to wait for
