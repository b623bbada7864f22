"""A small router, as an example of something to test: a request goes to the engine that had the longest common prefix before.

It is an HTTP proxy with nothing but the standard library. Put your own in its place.
"""

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import loads


class PrefixRouter:
    """Remembers which prompts went where."""

    def __init__(self, engines: list[str]) -> None:
        self.engines = engines
        self.sent: dict[str, list[str]] = {engine: [] for engine in engines}
        self._lock = threading.Lock()

    def choose(self, prompt: str) -> str:
        """The engine with the longest common prefix; of equals the one with the fewest requests."""
        with self._lock:
            chosen = max(self.engines, key=lambda engine: (self._overlap(engine, prompt), -len(self.sent[engine])))
            self.sent[chosen].append(prompt)
        return chosen

    def _overlap(self, engine: str, prompt: str) -> int:
        return max((_common(prompt, before) for before in self.sent[engine]), default=0)

    def serve(self) -> ThreadingHTTPServer:
        """A server on a free port; call ``serve_forever`` on it, and ``shutdown``."""
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                engine = router.choose(loads(body).get("prompt", ""))
                request = urllib.request.Request(engine + self.path, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    content = answer.read()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def _common(one: str, other: str) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
