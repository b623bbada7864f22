"""The HTTP client of commands and of services that ask each other. The gateway asks its engines over connections of its own
(``gateway.connections``).

``ask`` is for an event loop; ``HttpClient`` keeps a loop for callers that have none. Proxies of the environment are ignored:
these servers are in the same network.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from kvyard.errors import KvyardError

JSON = "application/json"


class NoAnswer(KvyardError):
    """A server that can't be reached, breaks off, or takes too long; the message is the reason alone."""


class HttpReply(msgspec.Struct, frozen=True):
    """A server's answer."""

    status: int
    headers: Mapping[str, str]
    """By name, in any case."""
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Return the body's value. Raises ``ValueError`` or another of ``DECODE_ERRORS``."""
        return msgspec.json.decode(self.content)


def _session(token: str | None, seconds: float, connect_seconds: float | None) -> Any:
    try:
        import aiohttp
    except ImportError:
        raise KvyardError("asking a server needs aiohttp: pip install 'kvyard[server]'") from None
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=connect_seconds)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(timeout=timeout, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


async def _send(session: Any, method: str, url: str, **given: Any) -> HttpReply:
    import aiohttp

    try:
        async with session.request(method, url, **given) as reply:
            return HttpReply(reply.status, reply.headers.copy(), await reply.read())
    except TimeoutError:
        raise NoAnswer("it took too long") from None
    except aiohttp.ClientConnectorError as error:
        # asyncio writes the address into the message, which the caller has anyway.
        number = error.errno or 0
        raise NoAnswer(os.strerror(number) if number > 0 else str(error.os_error)) from None
    except aiohttp.InvalidURL as error:
        raise NoAnswer(f"{str(error)!r} is no URL") from None
    except (aiohttp.ClientError, OSError, UnicodeError, ValueError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None


async def read_body(reply: Any, most: int) -> bytes:
    """Return the body of an aiohttp answer. Raises ``aiohttp.ClientError`` for one that is longer than ``most`` bytes."""
    import aiohttp

    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > most:
            raise aiohttp.ClientError(f"its answer is longer than {most} bytes")
    return bytes(body)


async def ask(url: str, *, token: str | None, seconds: float, headers: Mapping[str, str]) -> HttpReply:
    """Return the answer to a GET. Raises ``NoAnswer``."""
    async with _session(token, seconds, None) as session:
        return await _send(session, "GET", url, headers=headers, allow_redirects=False)


class HttpClient:
    """Sends one request after the other to ``base``; use it in a ``with`` block. Methods raise ``NoAnswer``."""

    def __init__(
        self, base: str, *, token: str | None = None, seconds: float, connect_seconds: float | None = None
    ) -> None:
        """``seconds`` are for each request in all. Raises ``KvyardError`` where aiohttp isn't installed."""
        self._base = base.rstrip("/")
        self._runner = asyncio.Runner()
        try:
            self._session = self._runner.run(_opened(token, seconds, connect_seconds))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._session.close())
        self._runner.close()

    def get(self, path: str, redirects: bool = False) -> HttpReply:
        return self._runner.run(_send(self._session, "GET", self._base + path, allow_redirects=redirects))

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> HttpReply:
        """Send ``body`` as JSON."""
        given = {"content-type": JSON, **(headers or {})}
        data = msgspec.json.encode(body)
        sending = _send(self._session, "POST", self._base + path, data=data, headers=given, allow_redirects=False)
        return self._runner.run(sending)


async def _opened(token: str | None, seconds: float, connect_seconds: float | None) -> Any:
    return _session(token, seconds, connect_seconds)
