"""An OpenAI endpoint as a client sees it: which model it serves, and completions as streams. It keeps no times of its own."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.openai import COMPLETIONS, ListedModels
from kvyard.replay.live.stream import AnswerStream, StreamError, error_words

CONNECT = 10.0
"""Seconds that a connection may take."""
KEEP = 4.0
"""Seconds that an idle connection is kept. Most servers close theirs after five, and no request must meet one that closes."""
ERROR_BODY = 1 << 16
"""Bytes of an error's body that are looked at."""


class AnswerRefused(Exception):
    """The endpoint answered, but not with a completion."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}" if message else f"HTTP {status}")
        self.status = status


class AnswerBroken(Exception):
    """There was no answer, or only part of one; the text says why."""


def check_url(url: str, hint: str = "") -> str:
    """Return ``url`` without its end that every route has. Raises ``KvyardError`` for what is no address of an endpoint.

    ``hint`` is added to its words: what else the caller takes in place of an address.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
        raise KvyardError(f"{url} is no address of an endpoint: give one such as http://localhost:8000{hint}")
    return url.rstrip("/").removesuffix("/v1")


class Endpoint:
    """Use it in an ``async with`` block. Opens as many connections as there are requests in flight."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Opens nothing yet. Raises ``KvyardError`` for a bad address."""
        self.url = check_url(url)
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: Any = None

    async def __aenter__(self) -> "Endpoint":
        try:
            import aiohttp
        except ImportError:
            raise KvyardError("driving a live endpoint needs aiohttp: pip install 'kvyard[server]'") from None
        # Every request that is due goes out: one that waited for a connection would be one that came late.
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            auto_decompress=True,
            read_bufsize=1 << 18,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the models that it serves. Raises ``KvyardError`` if it is unreachable or its answer is no list of models."""
        import aiohttp

        try:
            async with self._session.get(
                f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(total=CONNECT)
            ) as reply:
                body = await reply.read()
                if reply.status != 200:
                    raise KvyardError(f"{self.url}/v1/models answers HTTP {reply.status}: {_message(body)}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KvyardError(f"{self.url} can't be reached: {_words(error)}") from None
        try:
            return [model.id for model in msgspec.json.decode(body, type=ListedModels).data]
        except DECODE_ERRORS as error:
            raise KvyardError(f"{self.url}/v1/models is no list of models: {error}") from None

    async def text(self, path: str, seconds: float = CONNECT) -> str | None:
        """Return the answer to a GET of ``path``; ``None`` if nothing is there. Raises ``KvyardError`` if unreachable."""
        import aiohttp

        try:
            async with self._session.get(f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=seconds)) as reply:
                return str(await reply.text(errors="replace")) if reply.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KvyardError(f"{self.url} can't be reached: {_words(error)}") from None

    async def complete(
        self,
        body: bytes,
        headers: Mapping[str, str],
        came: Callable[[int], None],
        begun: Callable[[Mapping[str, str]], None],
    ) -> AnswerStream:
        """Ask for a completion. ``begun`` receives the reply's headers, ``came`` the number of chunks of every read.

        Returns the stream once it has ended. Raises ``AnswerRefused`` and ``AnswerBroken``.
        """
        import aiohttp

        stream = AnswerStream()
        try:
            async with self._session.post(f"{self.url}{COMPLETIONS}", data=_payload(body), headers=headers) as reply:
                if reply.status != 200:
                    raise AnswerRefused(reply.status, _message(await reply.content.read(ERROR_BODY)))
                begun(reply.headers)
                async for data in reply.content.iter_any():
                    chunks = stream.feed(data)
                    if chunks:
                        came(chunks)
        except StreamError as error:
            raise AnswerBroken(str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            if stream.done:
                return stream  # it sent its whole answer
            where = f" after {stream.tokens} tokens" if stream.tokens else ""
            raise AnswerBroken(f"{_words(error)}{where}") from None
        if not stream.done and stream.finish is None:
            raise AnswerBroken(f"the stream ended after {stream.tokens} tokens, without an end")
        return stream


def _payload(body: bytes) -> Any:
    """Return ``body`` for aiohttp, which warns of large ones: ours are in memory anyway."""
    import warnings

    from aiohttp import BytesPayload

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return BytesPayload(body, content_type="application/json")


def _message(body: bytes) -> str:
    try:
        return error_words(msgspec.json.decode(body))
    except DECODE_ERRORS:
        return error_words(body[:300].decode(errors="replace"))


def _words(error: BaseException) -> str:
    """Return a connection's failure in words that are the same each time, so that they can be counted."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return "the connection was cut"
    if isinstance(error, TimeoutError):
        return "no connection in time"
    return f"{type(error).__name__}: {error}"[:200]
