"""One connection to a Redis or Valkey server, checked whenever it is made, with every trouble as one exception.

It knows addresses, time-outs and error replies, and nothing of rows. It never reconnects by itself: a caller that has a
connection talks to the same run of the server throughout. After a failure it refuses at once until some time has passed, so
that a server that is away costs its callers next to nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvyard.clock import MS, Clock
from kvyard.errors import KvyardError
from kvyard.index.redis.scripts import ALL, Script

FIRST_BACKOFF = 50 * MS
_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}
_KINDS = {
    "BusyLoadingError": "loading",
    "TimeoutError": "timeout",
    "ReadOnlyError": "readonly",
    "OutOfMemoryError": "oom",
    "AuthenticationError": "auth",
    "NoPermissionError": "auth",
    "NoScriptError": "noscript",
    "ConnectionError": "connection",
}


class Unavailable(KvyardError):
    """The index server can't be used now."""


class Server:
    """A connection, or the time until which none is tried."""

    def __init__(self, url: str, *, timeout: float, backoff: int, clock: Clock) -> None:
        """``timeout`` (seconds) bounds each answer, ``backoff`` (nanoseconds) the time between attempts to connect.

        Raises ``KvyardError`` for an address that can't be read and where redis-py isn't installed. Doesn't connect.
        """
        try:
            import redis
        except ImportError:
            raise KvyardError("the Redis index needs redis-py: pip install 'kvyard[redis]'") from None
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        self.address = f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
        """Without the password."""
        self.run = ""
        """Id of the server's run."""
        self.round_trips = 0
        self.connects = 0
        self.errors: dict[str, int] = {}
        """Failures by kind."""
        self.trouble = ""
        """The kind of the last one."""
        self.reason = "not connected yet"
        self._clock = clock
        self._most = max(backoff, FIRST_BACKOFF)
        self._wait = FIRST_BACKOFF
        self.retry_at = 0
        """Earliest time of the next attempt to connect."""
        self._conn: Any = None
        self.farewell: Callable[[], tuple[Script, Sequence[str], Sequence[Any]] | None] = lambda: None
        """Script to try before a connection is given up because of an answer of the server."""
        self._trouble: tuple[type[Exception], ...] = (redis.exceptions.RedisError, OSError)
        try:
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            scheme = _SCHEMES.get(parts.scheme, parts.scheme)
            self._pool = redis.ConnectionPool.from_url(
                scheme + url[len(parts.scheme) :],
                protocol=2,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise KvyardError(f"{url!r} is no address of a Redis server: {error}") from None

    @property
    def connected(self) -> bool:
        """Return true if there is a connection, as far as is known."""
        return self._conn is not None

    def connect(self) -> None:
        """Connect, load the scripts, learn the run. Raises ``Unavailable``, at once while the last failure is too recent."""
        if self._clock.now() < self.retry_at:
            raise self._unavailable()
        try:
            self._conn = conn = self._pool.connection_class(**self._pool.connection_kwargs)
            conn.connect()
            commands: list[tuple[Any, ...]] = [("INFO", "server"), ("INFO", "memory"), ("INFO", "replication")]
            replies = self._exchange([*commands, *(("SCRIPT", "LOAD", script.source) for script in ALL)])
        except self._trouble as error:
            raise self.fail(error) from None
        lines = (line.partition(":") for line in b"\r\n".join(replies[:3]).decode(errors="replace").splitlines())
        info = {name: value for name, colon, value in lines if colon}
        self.run = info.get("run_id", "")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys") and info.get("maxmemory", "0") != "0":
            # A slot's set could go and leave its rows behind: copies that aren't there.
            raise self.fail(f"its maxmemory-policy is {policy}: set noeviction, or a volatile one", "policy")
        if not self.run:
            raise self.fail("it doesn't tell its run id", "other")
        if info.get("redis_mode", info.get("server_mode")) == "cluster":
            raise self.fail("it is a node of a cluster: an index takes a server of its own", "cluster")
        if info.get("role") == "slave":
            raise self.fail("it is a read-only replica: name the primary", "readonly")
        self.connects += 1
        self._wait = FIRST_BACKOFF
        self.reason = ""

    def call(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        """Run one script. Raises ``Unavailable``."""
        return self.calls(script, keys, [args])[0]

    def calls(self, script: Script, keys: Sequence[str], each: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Run a script several times, in order, in one round trip. Raises ``Unavailable``; what ran by then is done."""
        return self.commands([("EVALSHA", script.digest, len(keys), *keys, *args) for args in each])

    def commands(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands together and return their replies. Raises ``Unavailable``."""
        if self._conn is None:
            raise self._unavailable()
        try:
            return self._exchange(commands)
        except self._trouble as error:
            raise self.fail(error) from None

    def fail(self, error: Exception | str, kind: str = "") -> Unavailable:
        """Take note of a failure and close; returns the exception to raise."""
        why = str(error).strip() or type(error).__name__
        if not kind:
            kind = next((_KINDS[base.__name__] for base in type(error).__mro__ if base.__name__ in _KINDS), "")
        if not kind or kind == "connection":
            word = why.partition(" ")[0].strip("-:")
            kind = word.lower() if word.isupper() and len(word) > 2 else kind or "other"
        self.errors[kind] = self.errors.get(kind, 0) + 1
        self.trouble = kind
        self.reason = why
        self.retry_at = self._clock.now() + self._wait
        self._wait = min(2 * self._wait, self._most)
        last = self.farewell() if isinstance(error, Exception) and _is_reply(error) else None
        if last is not None and self._conn is not None:
            script, keys, args = last
            with suppress(*self._trouble):  # it was worth a try
                self._exchange([("EVALSHA", script.digest, len(keys), *keys, *args)])
        self.close()
        return self._unavailable()

    def close(self) -> None:
        """Close the connection."""
        if self._conn is not None:
            self._conn.disconnect()
            self._conn = None

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the index server {self.address} can't be used: {self.reason}")

    def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Exchange commands and replies in one round trip. All replies are read before the first error among them is raised."""
        conn = self._conn
        self.round_trips += 1
        conn.send_packed_command(conn.pack_commands(commands))
        replies: list[Any] = []
        failure: Exception | None = None
        for _ in commands:
            try:
                replies.append(conn.read_response(disconnect_on_error=False))
            except self._trouble as error:
                failure = failure or error
                if not _is_reply(error):
                    conn.disconnect()
                    break
        if failure is None:
            return replies
        try:
            raise failure
        finally:
            del failure  # it would keep this frame, and so the commands and all replies


def _is_reply(error: Exception) -> bool:
    """Return true if the error is the server's own reply, so that the connection is intact."""
    names = {base.__name__ for base in type(error).__mro__}
    return "ResponseError" in names or "BusyLoadingError" in names
