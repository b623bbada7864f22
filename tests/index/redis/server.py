"""A real redis-server for tests: on a port of its own, in a folder of its own, to be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import free_ports
from tests.waiting import eventually

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
PATIENCE = 60.0


class RedisServer:
    """One server at one address, whatever becomes of its processes."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str, wait: bool = True) -> None:
        assert PROGRAM is not None
        command = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self.options, *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it answers, with whatever."""

        def answers() -> str:
            with contextlib.suppress(OSError):
                return self.ask("PING")
            return ""

        eventually(answers, (self.folder / "log").read_text)

    def ask(self, *words: str) -> str:
        """One command by hand, over a connection of its own; the raw answer."""
        text = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words)
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as conn:
            conn.sendall(b"*%d\r\n" % len(words) + text)
            return conn.recv(1 << 16).decode(errors="replace")

    def kill(self) -> None:
        """-9, as a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
            self.kill()


def run_redis(folder: Path) -> Iterator[RedisServer]:
    """A server in ``folder`` until the caller, a fixture, goes on; skips its tests where the program isn't there."""
    if PROGRAM is None:
        pytest.skip("needs redis-server: scripts/setup-test-deps.sh")
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
