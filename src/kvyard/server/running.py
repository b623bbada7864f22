"""Running a server: a port that is known before it is announced, and an end that lets answers go out first.

SIGINT and SIGTERM end it alike, with exit code 0: open requests are answered, then the application shuts down. A second
signal ends it at once.
"""

import asyncio
import ipaddress
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import Any, Self, TypeVar

import msgspec

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.heads import HEADER_BYTES, bounded, protocol

log = logging.getLogger(__name__)

T = TypeVar("T")
TICK = 0.1
"""Seconds between two looks at what nothing tells of."""


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; ``shared`` where other processes bind the same address in this way. Raises ``KvyardError`` where the
    address can't be had.
    """
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
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise KvyardError(f"can't listen at {host}:{port}: {why}; choose another --port, or 0 for any") from None
    return bound


async def patiently(action: Callable[[], T]) -> T:
    """What ``action`` returns, tried for five seconds: an address may be free again some time after its socket was closed."""
    for _ in range(100):
        try:
            return action()
        except KvyardError:
            await pause(0.05)
    return action()


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


class TlsFiles(msgspec.Struct, frozen=True):
    """What a server shows its clients: a certificate, with those that vouch for it behind it, and its key, both as PEM."""

    certificate: str
    key: str

    def check(self) -> None:
        """Raise ``KvyardError`` where they can't be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise KvyardError(
                f"TLS can't be had with {self.certificate} and {self.key}: {why}; give both as PEM"
            ) from None


def tls_files(certificate: str | None, key: str | None) -> TlsFiles | None:
    """Both files, or ``None`` where neither is given. Raises ``KvyardError`` where one is missing or can't be used."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise KvyardError("TLS needs a certificate and its key: give both --tls-cert and --tls-key")
    found = TlsFiles(certificate, key)
    found.check()
    return found


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Where a bound socket is reached from this machine."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
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


def _prompt_server(config: Any) -> Any:
    """uvicorn's server, which looks ten times a second whether it is to end and whether all clients have gone. This one sees
    both at once: ``asked``, an event, says that it is to end.
    """
    import uvicorn

    class PromptServer(uvicorn.Server):
        def __init__(self) -> None:
            super().__init__(config)
            self.asked = asyncio.Event()

        def capture_signals(self) -> Any:
            # Signals are the caller's: uvicorn would end the process by the signal that it had just survived.
            return nullcontext()

        async def main_loop(self) -> None:
            counter = 0
            while not await self.on_tick(counter):
                counter += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK):
                        await self.asked.wait()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for server in self.servers:
                server.close()
            for bound in sockets or []:
                bound.close()
            state = self.server_state
            for connection in list(state.connections):
                connection.shutdown()
            try:
                async with asyncio.timeout(config.timeout_graceful_shutdown):
                    await self._all_gone()
            except TimeoutError:
                log.error("%d requests under way had no more time, and were cut off", len(state.tasks))
                for task in state.tasks:
                    task.cancel(msg="it was under way for too long at the end")

        async def _all_gone(self) -> None:
            state = self.server_state
            step = 0.0  # clients that are idle go within a turn; others may take seconds
            while (state.connections or state.tasks) and not self.force_exit:
                await pause(step)
                step = min(TICK, step + 0.001)

    return PromptServer()


class HttpServer:
    """One uvicorn server on a loop that it may share. Starts once; ends in order, or at once."""

    def __init__(
        self,
        app: Any,
        bound: socket.socket,
        *,
        drain_seconds: float = 5,
        keep_alive_seconds: int = 5,
        tls: TlsFiles | None = None,
    ) -> None:
        """At the end, requests under way have ``drain_seconds``. Connections are kept for ``keep_alive_seconds`` between
        requests. With ``tls`` it speaks HTTPS. Raises ``KvyardError`` without uvicorn, and for files that can't be used.
        """
        try:
            import uvicorn
        except ImportError:
            raise KvyardError("serving needs Starlette and uvicorn: pip install 'kvyard[server]'") from None
        if tls is not None:
            tls.check()
        self.url = url_of(bound, "http" if tls is None else "https")
        self.port: int = bound.getsockname()[1]
        self._bound = bound
        self._serving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Its loop, once it has started."""
        # No access log: paths alone say little, and whatever is logged has to be kept safe.
        config = uvicorn.Config(
            bounded(app),
            log_level="warning",
            log_config=None,  # what is logged goes where all else goes, and is limited with it
            access_log=False,
            ws="none",
            proxy_headers=False,
            lifespan="off",
            http=protocol(),
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
            timeout_keep_alive=keep_alive_seconds,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        self._server = _prompt_server(config)

    @property
    def ending(self) -> bool:
        """Whether it was asked to end."""
        return bool(self._server.should_exit)

    async def start(self) -> None:
        """Serve; returns once requests are answered. Raises what uvicorn raises."""
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bound]))
        while not self._server.started and not self._serving.done():
            await pause(0.005)
        if self._serving.done():
            await self._serving

    async def wait(self) -> None:
        """Until it has ended. A caller that is cancelled doesn't take the server down."""
        if self._serving is not None:
            await asyncio.wait((self._serving,))
            self._serving.result()

    def end(self) -> None:
        """Take nothing more; what is under way goes on as long as it may. Any thread may call it."""
        self._server.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and the server with it
                self._loop.call_soon_threadsafe(self._server.asked.set)

    async def stop(self) -> None:
        """``end`` and ``wait``."""
        self.end()
        await self.wait()
        if self._server.force_exit:
            self._reset()  # what was accepted in the moment of ``die`` was not known then

    def hurry(self) -> None:
        """Don't wait for what is under way."""
        self._server.force_exit = True

    def die(self) -> None:
        """Refuse and reset all connections at once; ``stop`` then ends what is left."""
        for server in self._server.servers:
            server.close()
        self._bound.close()
        self._reset()
        self._server.force_exit = True
        self.end()

    def _reset(self) -> None:
        for connection in list(self._server.server_state.connections):
            _abort(connection)

    def cut(self, scope: Any) -> None:
        """Reset the connection that ``scope`` came over."""
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "client", None) == scope.get("client"):
                _abort(connection)


def _abort(connection: Any) -> None:
    if connection.transport is not None:
        connection.transport.abort()


class Running:
    """A server as a process: ``run`` blocks until ``stop`` or a signal."""

    def __init__(
        self,
        app: Any,
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
        ``hurrying`` at a second signal. One that is ``patient`` takes a second one for the first, and waits until ``hurry``.
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
        """The task that enters ``around``, while that takes."""

    def run(self) -> None:
        asyncio.run(self._serve())

    def stop(self) -> None:
        """End gracefully; any thread may call it."""
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
        """End without waiting for what is under way."""
        self._server.hurry()
        if self._hurrying is not None:
            self._hurrying()

    def interrupt(self) -> None:
        """Do as at a signal."""
        if self._server.ending and not self._patient:
            self.hurry()
        self.stop()
        if self._entering is not None:
            self._entering.cancel()  # nothing is under way yet, so there is nothing to wait for
