"""Servers under attack: processes whose memory is measured, and loops whose longest hold is."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from tests.server.read_process import ReadProcess
from tests.server.support import PATIENCE
from tests.waiting import eventually

MIB = 1 << 20
KINDS = ("gateway", "processes", "index", "mock")
MOST_HOLD_S = 0.05
"""Seconds of CPU for which one callback may hold a server's loop."""


class ServerProcess(ReadProcess):
    """A kvyard server in a process of its own, with whatever it needs behind it."""

    def __init__(self, *arguments: str, stderr: int | None = None, prefix: Sequence[str] = ()) -> None:
        """``prefix`` is the command that starts it."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVYARD_")}
        super().__init__(
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvyard", *arguments, "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if stderr is None else stderr,
                env=environment,
                text=True,
                errors="replace",
            )
        )

    @property
    def url(self) -> str:
        def found() -> str:
            assert self.process.poll() is None, self.text
            urls = re.findall(r"(http://127.0.0.1:\d+)", self.text)
            return urls[0] if urls else ""

        return str(eventually(found, lambda: self.text))

    @property
    def rss(self) -> int:
        """Resident bytes of the process and of those that it has started."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in family(self.process.pid))
        return pages * os.sysconf("SC_PAGESIZE")

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


@contextlib.contextmanager
def serving(kind: str) -> Iterator[ServerProcess]:
    """A gateway of one or two processes in front of a mock, an index service, or a mock, each ready."""
    with contextlib.ExitStack() as stack:
        if kind in ("gateway", "processes"):
            mock = stack.enter_context(ServerProcess("mock", "--workers", "1"))
            more = ("--processes", "2") if kind == "processes" else ()
            found = stack.enter_context(ServerProcess("gateway", "--fleet", mock.url, "--tokenizer", "bytes", *more))
            eventually(lambda: httpx.get(f"{found.url}/ready", trust_env=False).status_code == 200, lambda: found.text)
        elif kind == "index":
            found = stack.enter_context(ServerProcess("index", "serve"))
        else:
            found = stack.enter_context(ServerProcess("mock", "--workers", "1"))
        ping(found.url)
        yield found


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def ping(url: str) -> float:
    """Seconds until /health or /ping is answered."""
    began = time.monotonic()
    reply = httpx.get(f"{url}/health", timeout=PATIENCE, trust_env=False)
    assert reply.status_code in (200, 503)
    return time.monotonic() - began


def send_what_goes(connection: socket.socket, data: bytes) -> int:
    """Send until the server takes no more or hangs up; returns the bytes that it took."""
    connection.settimeout(1.0)
    view, sent = memoryview(data), 0
    with contextlib.suppress(OSError):
        while sent < len(data):
            sent += connection.send(view[sent : sent + 65536])
    return sent


class LoopHolds:
    """Seconds of CPU that single callbacks of the event loops of this process took."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.where = ""
        self.failed: list[str] = []
        """Reports of what took too long."""

    def note(self, seconds: float, callback: Callable[..., object]) -> None:
        if seconds > self.longest:
            self.longest, self.where = seconds, repr(callback)[:300]


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> LoopHolds:
    """Measures the loops of servers that run in threads of this process."""
    found = LoopHolds()
    run = Handle._run

    def measured(handle: Handle) -> None:
        began = time.thread_time()
        run(handle)
        found.note(time.thread_time() - began, handle._callback)  # type: ignore[attr-defined]

    monkeypatch.setattr(Handle, "_run", measured)
    return found
