"""The hub and its channels where one side doesn't keep up, and a parent that can't start processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("starlette", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.processes.support import several
from tests.server.gateway.scripted_engine import ScriptedEngine, answer
from tests.server.gateway.support import PATIENCE, eventually

from kvyard.server.gateway.processes import channel as channels
from kvyard.server.gateway.processes import hub as hubs
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.frames import HUB, FrameKind, FrameReader, frame
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.gateway.processes.records import ToldLog

pytestmark = pytest.mark.zmq

SAID = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'


def test_a_hub_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs it is refused; health says so, and requests without rates go on."""
    monkeypatch.setattr(channels, "PATIENCE", 0.05)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "a"\nrequests_per_minute = 600\n[[keys]]\nname = "b"\nkey = "b"')
    with ScriptedEngine(lambda head, body: [answer("200 OK", SAID)]) as engine:
        settings: dict[str, Any] = {"engines": [{"url": engine.url}], "keys_file": str(keys)}
        with several(2, **settings) as ((first, _), between):
            first.ready(1)
            monkeypatch.setattr(channels, "HUB_PATIENCE", 0.05)
            goes_on = threading.Event()
            hung = threading.Thread(target=lambda: between.do(lambda: goes_on.wait(PATIENCE) or None))
            hung.start()
            try:
                health = first.client.get("/health")
                silent = [one["about"] for one in health.json()["reasons"] if one["code"] == "process-silent"]
                assert health.status_code == 200 and "parent process" in silent, health.text
                assert first.client.get("/metrics").status_code == 503
                first.complete("x", 503, {"authorization": "Bearer a"})
                first.complete("x", 200, {"authorization": "Bearer b"})
            finally:
                goes_on.set()
                hung.join(PATIENCE)
            monkeypatch.setattr(channels, "HUB_PATIENCE", PATIENCE)
            eventually(lambda: first.client.get("/metrics").status_code == 200)
            first.complete("x", 200, {"authorization": "Bearer a"})


def test_the_hub_answers_one_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others told it may be left out, and told again; nobody would tell it the hub's answers again."""
    monkeypatch.setattr(hubs, "MOST_WAITING", 1 << 20)
    hub = Hub(2)
    ours, theirs = socket.socketpair()
    with theirs:
        hub.add(1, ours)
        for _ in range(64):
            hub.send(FrameKind.BOOKINGS, 1, 2, bytes(1 << 16))
        theirs.sendall(frame(FrameKind.ASK, HUB, encode((7, "changes", b""))))
        hub.wait(0)
        theirs.setblocking(False)
        reader, kinds = FrameReader(), list[FrameKind]()
        for _ in range(64):
            hub.wait(0)
            try:
                kinds += [kind for kind, _, _ in reader.feed(theirs.recv(1 << 20))]
            except BlockingIOError:
                break
        assert kinds.count(FrameKind.ANSWER) == 1 and 0 < kinds.count(FrameKind.BOOKINGS) < 64
        hub.close()


def test_what_is_to_be_written_waits_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST_WAITING", 1 << 20)

    async def lines() -> ToldLog:
        ours, theirs = socket.socketpair()
        with ours:
            channel = Channel(theirs, 1, 2)
            await channel.open()
            log = ToldLog("-", lambda text: channel.send(FrameKind.LINES, HUB, text))
            for _ in range(64):
                log.write(bytes((1 << 16) - 1) + b"\n")
            assert channel.send(FrameKind.SETTLE, HUB), "what counts is told nevertheless"
        channel.close()
        return log

    log = asyncio.run(lines())
    assert 0 < log.lost < 64 and "doesn't keep up" in log.error


GROUP = """
import asyncio, errno, os, signal, sys
from kvyard.errors import KvyardError
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.gateway.processes.process_group import ProcessGroup

fails, calls, fork = int(sys.argv[1]), 0, os.fork

def forked():
    global calls
    calls += 1
    if calls == fails:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

def serve(channel, times):
    async def until_the_end():
        ended = asyncio.Event()
        channel.heard[FrameKind.END] = lambda peer, body: ended.set()
        await channel.open()
        channel.send(FrameKind.READY, HUB, b"0")
        await ended.wait()
    asyncio.run(until_the_end())

def ready(pids):
    print("ready", len(pids), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

os.fork = forked
try:
    sys.exit(ProcessGroup(2, Hub(2), serve, drain_seconds=1, ready=ready).run())
except KvyardError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's SO_REUSEPORT")
@pytest.mark.parametrize(
    ("failing", "code", "said"),
    [(2, 0, "ready 2"), pytest.param(1, 1, "process 1 can't be started", marks=pytest.mark.slow)],
)
def test_a_process_that_cannot_be_started_is_tried_again(failing: int, code: int, said: str) -> None:
    """With the others untouched, and unless it is the first of all: then there is nothing to keep."""
    command = [sys.executable, "-c", GROUP, str(failing)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr
