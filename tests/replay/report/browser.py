"""A headless Chromium, driven through its DevTools socket: what a page looks like to the one who opens it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import eventually

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60
"""Seconds, on a busy machine."""


class Tab:
    """One page at a time; ``errors`` is what the console complained about."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.errors, self.requests, self._loaded = [], [], False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while not self._loaded:
            self._heard(json.loads(self._socket.recv(timeout=PATIENCE)))

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; of a promise, what it comes to."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Put the mouse over an element."""
        x, y = self._point(selector, across, down)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, selector: str) -> None:
        """Click on an element with the mouse."""
        x, y = self._point(selector, 0.05, 0.5)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, start: float, end: float, down: float = 0.5) -> None:
        """Drag the mouse across an element."""
        x, y = self._point(selector, start, down)
        to, _ = self._point(selector, end, down)
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **held)
        for at in (x + (to - x) / 2, to):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at, y=y, **held)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=to, y=y, **held)

    def _point(self, selector: str, across: float, down: float) -> tuple[float, float]:
        box = self.ask(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
        )
        return box[0] + box[2] * across, box[1] + box[3] * down

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser with one tab."""
    from websockets.sync.client import connect

    assert BINARY is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [BINARY, *flags, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = _port(profile / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
            targets = json.load(answer)
        url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        with connect(url, max_size=1 << 28, open_timeout=PATIENCE) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the browser chose, once it says so."""

    def lines() -> list[str]:
        assert process.poll() is None, "the browser ended at once"
        text = path.read_text() if path.exists() else ""
        return text.splitlines() if "\n" in text else []

    return int(eventually(lines, lambda: "the browser opened no DevTools port")[0])
