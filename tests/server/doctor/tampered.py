"""An HTTP proxy that changes what goes through it: an engine made wrong on purpose, in ways that no flag offers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]
"""Takes a path and a JSON body, and returns another, or ``None`` to leave it."""


class Tampered:
    """A proxy in front of ``url``."""

    def __init__(
        self,
        url: str,
        *,
        request: Change | None = None,
        answer: Change | None = None,
        page: Callable[[str], str] | None = None,
        headers: dict[str, str] | None = None,
        statuses: dict[str, int] | None = None,
    ) -> None:
        """``page`` changes what isn't JSON; ``statuses`` answers paths without asking anybody."""
        client = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for its head to be acknowledged

            def do_GET(self) -> None:
                self._pass(client.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if request is not None:
                    body = request(self.path, body) or body
                self._pass(client.post(self.path, json=body))

            def _pass(self, reply: httpx.Response) -> None:
                content = reply.content
                if reply.headers.get("content-type", "").startswith("application/json"):
                    if answer is not None and reply.status_code == 200:
                        content = json.dumps(answer(self.path, reply.json()) or reply.json()).encode()
                elif page is not None:
                    content = page(reply.text).encode()
                status = (statuses or {}).get(self.path, reply.status_code)
                self.send_response_only(status)
                for name, value in {"Date": self.date_time_string(), **(headers or {})}.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", reply.headers.get("content-type", "text/plain"))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._client = client
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Tampered:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._client.close()
