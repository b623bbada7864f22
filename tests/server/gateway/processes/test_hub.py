"""The hub and its channels where one side doesn't keep up, and a parent that can't start processes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.processes.support import several
from tests.server.gateway.scripted_engine import ScriptedEngine, answer
from tests.server.gateway.support import PATIENCE

from kvyard.clock import VirtualClock
from kvyard.server.gateway.processes import channel as channels
from kvyard.server.gateway.processes import hub as hubs
from kvyard.server.gateway.processes.changes import EngineChange
from kvyard.server.gateway.processes.channel import Channel, encode
from kvyard.server.gateway.processes.figures import Figures
from kvyard.server.gateway.processes.frames import HUB, FrameKind, FrameReader, frame
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.gateway.processes.records import RecordedCall, ToldLog
from kvyard.server.gateway.recording import ArrivedRequest, TrafficRecorder

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
            monkeypatch.setattr(channels, "HUB_PATIENCE", 3600.0)
            hangs, goes_on = threading.Event(), threading.Event()

            def hang() -> None:
                hangs.set()
                goes_on.wait(PATIENCE)

            hung = threading.Thread(target=lambda: between.do(hang))
            hung.start()
            assert hangs.wait(PATIENCE)
            try:
                health = first.client.get("/health")
                silent = [one["about"] for one in health.json()["reasons"] if one["code"] == "process-silent"]
                assert health.status_code == 200 and "parent process" in silent, health.text
                monkeypatch.setattr(channels, "HUB_PATIENCE", 0.05)  # probes don't wait as long as all else
                assert first.client.get("/metrics").status_code == 503
                first.complete("x", 503, {"authorization": "Bearer a"})
                first.complete("x", 200, {"authorization": "Bearer b"})
                stored = first.client.get("/v1/responses/resp_1", headers={"authorization": "Bearer b"})
                assert stored.status_code == 503, "that it isn't there would be a guess"
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


def test_a_process_that_joins_amid_a_change_applies_it() -> None:
    """It wasn't told of it, and it wasn't made when it asked for what was."""
    hub, change = Hub(3), EngineChange(op="drain", engine="e", number=5)
    pairs = [socket.socketpair() for _ in range(3)]
    first, second, third = (theirs for _, theirs in pairs)
    asks = frame(FrameKind.ASK, HUB, encode((7, "changes", b"")))
    with first, second, third:
        hub.add(1, pairs[0][0])
        first.sendall(frame(FrameKind.CHANGE, HUB, encode(change)))
        hub.wait(0)
        hub.add(2, pairs[1][0])
        hub.add(3, pairs[2][0])
        second.sendall(asks)
        hub.wait(0)
        first.sendall(frame(FrameKind.CHANGED, HUB, bytes([1]) + encode(change)) * 2)
        hub.wait(0)
        third.sendall(asks)  # it finds it among those that were made
        hub.wait(0)
        heard = [
            [one for one in FrameReader().feed(end.recv(1 << 16)) if one[0] is not FrameKind.JOINED]
            for end in (first, second, third)
        ]
        hub.close()
    answers = [(FrameKind.ANSWER, HUB, encode((7, encode(made)))) for made in ([], [change])]
    told = (FrameKind.CHANGE, 1, encode(change))
    assert heard == [[told], [answers[0], told], [answers[1]]]


def test_lines_to_be_written_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
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


def came(at: int, id_: str, tokens: int) -> RecordedCall:
    arrived = ArrivedRequest(id=None, keys=(), num_tokens=tokens, key_tokens=1)
    return RecordedCall(at=at, id=id_, keys=b"", arrived=arrived)


def test_requests_of_a_lost_process_do_not_block_the_recording(tmp_path: Path) -> None:
    """Rows are written in order of arrival; and a request of the same name may come again."""
    clock = VirtualClock()
    hub = Hub(2, TrafficRecorder(tmp_path / "rows.jsonl", clock=clock), clock)

    def told(end: socket.socket, call: RecordedCall) -> None:
        end.sendall(frame(FrameKind.RECORD, HUB, encode(call)))
        hub.wait(0)

    ends = []
    for number in (1, 2):
        ours, theirs = socket.socketpair()
        hub.add(number, ours)
        ends.append(theirs)
    first, second = ends
    told(first, came(10, "lost", 5))
    told(second, came(20, "b", 7))
    told(second, RecordedCall(at=30, id="b", output=1))
    hub.remove(1)
    hub.flush()
    assert [json.loads(line)["input_length"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [7]
    ours, again = socket.socketpair()
    hub.add(1, ours)
    told(again, came(40, "lost", 5))
    told(again, RecordedCall(at=50, id="lost", output=1))
    hub.flush()
    assert [json.loads(line)["input_length"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [7, 5]
    for end in (first, second, again):
        end.close()
    hub.close()


def test_looks_that_are_not_answered_are_counted() -> None:
    """Of those that are ready: another may take its time. Whatever one says is an answer."""
    hub = Hub(1)
    ours, theirs = socket.socketpair()
    with theirs:
        hub.add(1, ours)
        assert hub.look() == {}
        for said in (frame(FrameKind.READY, HUB, b"0"), frame(FrameKind.ANSWER, HUB, encode((0, b"")))):
            theirs.sendall(said)
            hub.wait(0)
            assert [hub.look() for _ in range(3)] == [{1: 0}, {1: 1}, {1: 2}]
        hub.close()


def test_one_that_starts_says_nothing_of_engines() -> None:
    hub = Hub(2)
    ends = []
    for number, up in ((1, 1.0), (2, 0.0)):
        ours, theirs = socket.socketpair()
        hub.add(number, ours)
        ends.append(theirs)
        name = "kvyard_gateway_engine_up"
        kept: Figures = [(name, "gauge", "", [(name, {"engine": "e"}, up)])]
        theirs.sendall(frame(FrameKind.KEEP, HUB, encode(kept)))
    first, second = ends
    first.sendall(frame(FrameKind.READY, HUB, b"1") + frame(FrameKind.ASK, HUB, encode((1, "figures", b""))))
    hub.wait(0)
    (told,) = (body for kind, _, body in FrameReader().feed(first.recv(1 << 16)) if kind is FrameKind.ANSWER)
    figures = msgspec.msgpack.decode(msgspec.msgpack.decode(told)[1])
    assert [samples for part in figures for _, _, _, samples in part] == [[[name, {"engine": "e"}, 1.0]]]
    first.close()
    second.close()
    hub.close()


def test_a_fault_of_the_hub_costs_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parent all processes would end."""
    hub = Hub(1)
    ours, theirs = socket.socketpair()
    with theirs:
        hub.add(1, ours)
        monkeypatch.setattr(hub, "_admit", lambda *asked: 1 / 0)
        for what in ("admit", "changes"):
            asked = encode(([], 0)) if what == "admit" else b""
            theirs.sendall(frame(FrameKind.ASK, HUB, encode((1, what, asked))))
        theirs.sendall(frame(FrameKind.READY, HUB, b"no number"))
        theirs.sendall(frame(FrameKind.READY, HUB, b"3"))
        hub.wait(0)
        assert hub.is_ready(1) and hub.engines == 3
        assert [kind for kind, _, _ in FrameReader().feed(theirs.recv(1 << 16))] == [FrameKind.ANSWER]
        hub.close()


GROUP = """
import asyncio, errno, os, signal, sys
from kvyard.errors import KvyardError
from kvyard.server.gateway.processes.frames import HUB, FrameKind
from kvyard.server.gateway.processes.hub import Hub
from kvyard.server.gateway.processes import process_group

process_group.LOOK, process_group.MOST_LOOKS = 0.05, 10
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
        if channel.number == 2 and not times:
            signal.pause()  # it hangs
        if times:
            os.kill(os.getppid(), signal.SIGTERM)
        await ended.wait()
    asyncio.run(until_the_end())

def ready(pids):
    print("ready", len(pids), flush=True)

os.fork = forked
try:
    sys.exit(process_group.ProcessGroup(2, Hub(2), serve, drain_seconds=1, ready=ready).run())
except KvyardError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's SO_REUSEPORT")
@pytest.mark.parametrize(
    ("failing", "code", "said"),
    [(2, 0, "ready 2"), pytest.param(1, 1, "process 1 can't be started", marks=pytest.mark.slow)],
)
def test_processes_that_cannot_be_started_or_hang(failing: int, code: int, said: str) -> None:
    """One that can't be started is tried again, with the others untouched, and unless it is the first of all: then there is
    nothing to keep. One that hangs is killed, and started again.
    """
    command = [sys.executable, "-c", GROUP, str(failing)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    if not code:
        assert re.search(r"process 2 \(\d+\) hangs, and is killed", done.stderr), done.stderr
        assert "ended by signal 9 and is started again" in done.stderr
