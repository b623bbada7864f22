"""Logs whose reader stops: requests are answered all the same, lines are counted, and SIGTERM ends the server."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.hostile.support import ServerProcess, serving
from tests.server.support import PATIENCE

from kvyard.server import line_writer
from kvyard.server.gateway.access_log import AccessLine, AccessLog
from kvyard.server.line_writer import BACKLOG, LineHandler, LineWriter

LINE = b"x" * 99 + b"\n"


def test_a_fifo_without_reader(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    log = AccessLog(str(path))  # which would wait for a reader
    for _ in range(40_000):
        log.add(AccessLine(time=1.0, path="/v1/completions", status=200, outcome="finished"))
    log.flush()
    assert log.lost > 0 and log.error == line_writer.SLOW
    found = b""
    with open(path, "rb", buffering=0) as reader:
        os.set_blocking(reader.fileno(), False)
        while part := reader.read(1 << 20):
            found += part
            log.flush()
    log.close()
    assert log.error == "" and len(found.splitlines()) == 40_000 - log.lost, "what was kept came"
    assert all(line.startswith(b"{") and line.endswith(b"}") for line in found.splitlines())


def test_a_slow_reader_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = LineWriter(str(path))
    with open(path, "rb", buffering=0) as reader:
        found = b""
        for _ in range(100):
            writer.write(LINE * 1000)
            found += reader.read(90_000)
        while len(found) < 100 * 1000 * len(LINE):
            writer.flush()
            found += reader.read(1 << 20)
    assert writer.lost == 0 and writer.error == "" and found == LINE * 100_000


def test_a_reader_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()

    class Stderr:
        fileno = staticmethod(lambda: writing)

    monkeypatch.setattr(sys, "stderr", Stderr)
    writer = LineWriter("-")
    os.close(reading)
    writer.write(LINE * 3)
    assert writer.lost == 3 and "pipe" in writer.error.lower()
    writer.close()
    assert os.fstat(writing), "stderr itself stays open"
    os.close(writing)


@pytest.mark.parametrize("kind", ["pipe", "pipe of another user", "socket"])
def test_stderr_that_nobody_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = socket.socketpair() if kind == "socket" else None
    reading, writing = os.pipe() if pair is None else (pair[0].fileno(), pair[1].fileno())

    class Stderr:
        fileno = staticmethod(lambda: writing)

    opened = os.open

    def refused(path: str, *more: int) -> int:
        if str(path).startswith("/proc/self/fd"):
            raise PermissionError
        return opened(path, *more)

    if kind == "pipe of another user":
        monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(sys, "stderr", Stderr)
    handler = LineHandler()
    monkeypatch.undo()
    assert os.get_blocking(writing), "others who have it open may wait"
    logger = logging.Logger("it")
    logger.addHandler(handler)
    for _ in range(3 * BACKLOG // 1000):
        logger.error("y" * 1000)
    assert handler._writer.lost > 0
    found = b""
    while b"lines were left out" not in found:
        found += os.read(reading, 1 << 20)
        logger.error("again")
    handler.close()
    if pair is None:
        os.close(reading)
        os.close(writing)
    else:
        pair[0].close()
        pair[1].close()


@pytest.mark.zmq
@pytest.mark.slow
@pytest.mark.parametrize("to", ["stderr", "fifo"])
def test_a_gateway_whose_log_is_not_read_answers_and_ends(to: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    ready = tmp_path / "ready"
    reading, writing = os.pipe()
    with serving("mock") as mock:
        arguments = ["gateway", "--fleet", mock.url, "--tokenizer", "bytes", "--ready-file", str(ready)]
        arguments += ["--access-log", "-" if to == "stderr" else str(path)]
        with ServerProcess(*arguments, stderr=writing) as server:
            os.close(writing)
            urls = eventually(lambda: ready.exists() and ready.read_text())
            url = httpx.Response(200, text=urls).json()["urls"][0]
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                eventually(lambda: client.get("/ready").status_code == 200)
                for at in range(8000):
                    reply = client.post(
                        "/v1/completions",
                        json={"prompt": f"{at}", "max_tokens": -1},
                        headers={"x-request-id": f"{at:0>128}"},  # lines that fill the pipe and the backlog soon
                    )
                    assert reply.status_code == 400
                lost = [line for line in client.get("/metrics").text.splitlines() if "access_log_lost_total " in line]
                assert float(lost[-1].split()[1]) > 0
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
    os.close(reading)


def test_the_log_of_a_process_goes_through_it() -> None:
    """``kvyard``'s servers log by the handler above."""
    code = "from kvyard.cli.serving import log_to_stderr; import logging; log_to_stderr(False); print(logging.root.handlers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LineHandler" in done.stdout
