"""An engine that answers with whatever bytes a test wants, in whatever pieces, and hangs up when it is told to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.server.gateway.support import PATIENCE, Gated

MODELS = b'{"object":"list","data":[{"id":"odd","object":"model"}]}'


def answer(status: str, body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    """A whole answer."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def chunked(*parts: bytes, kind: str = "text/event-stream", end: bool = True) -> list[bytes]:
    """A streamed answer, piece by piece."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\nX-Odd: Yes\r\n\r\n"
    pieces = [head.encode(), *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)]
    return [*pieces, b"0\r\n\r\n"] if end else pieces


class ScriptedEngine:
    """Serves in threads. ``script`` is given the request's head and body, and returns the pieces of an answer; an empty list
    hangs up at once. After the pieces the connection is closed unless the answer was whole.
    """

    def __init__(self, script: Callable[[str, bytes], Sequence[bytes]], models: bytes = MODELS) -> None:
        self.script = script
        self.models = models
        self.requests: list[tuple[str, bytes]] = []
        self.hangs_up = False
        """After every answer, whole or not."""
        self.pause = 0.0
        """Seconds between two pieces."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            file = connection.makefile("rb")
            try:
                while self._one(connection, file):
                    pass
            except OSError:
                pass

    def _one(self, connection: socket.socket, file: object) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = file.readline()  # type: ignore[attr-defined]
            if not line:
                return False
            head += line
        text = head.decode("latin-1")
        length = next(
            (int(one.partition(":")[2]) for one in text.lower().split("\r\n") if one.startswith("content-length")), 0
        )
        body = file.read(length)  # type: ignore[attr-defined]
        path = text.split(" ")[1]
        if path == "/health":
            connection.sendall(answer("200 OK", b""))
            return True
        if path in ("/kv_event_sources", "/is_sleeping"):
            connection.sendall(answer("404 Not Found", b"{}"))
            return True
        if path == "/v1/models":
            connection.sendall(answer("200 OK", self.models))
            return True
        self.requests.append((text, body))
        pieces = self.script(text, body)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(self.pause)
        return bool(pieces) and not self.hangs_up and (pieces[-1] == b"0\r\n\r\n" or b"content-length" in pieces[0])


def gated(*engines: ScriptedEngine, **settings: Any) -> Gated:
    """A gateway in front of these."""
    return Gated(engines=[{"url": engine.url, "name": f"odd{at}"} for at, engine in enumerate(engines)], **settings)


def plain(head: str, body: bytes) -> Sequence[bytes]:
    """The shortest answer."""
    return [answer("200 OK", b"{}")]


def connect(gate: Gated) -> socket.socket:
    host, _, port = gate.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)
