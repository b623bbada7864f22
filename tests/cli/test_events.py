"""``kvyard events``: watching, recording, playing and checking, over real sockets and from files."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from tests.cli.support import exit_code
from tests.events.check.test_rules import FULL, removed, stored

from kvyard.events import Mirror, Tier
from kvyard.events.recording import About, Recording, RecordingWriter
from kvyard.events.transport import State
from kvyard.events.transport.frames import Frame
from kvyard.events.wire import Decoder

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
from tests.events.transport.live import PATIENCE, Engine, Reader
from tests.ports import free_ports

needs_sockets = pytest.mark.zmq


run = partial(exit_code, "events")


def write(path, *batches: list, seqs=None, apart: int = 0) -> str:
    with RecordingWriter(path, About(endpoint="tcp://somewhere:1")) as writer:
        for at, events in enumerate(batches):
            seq = at if seqs is None else seqs[at]
            payload = msgspec.msgpack.encode([1.0 + at, events, 0])
            writer.write(at * apart, Frame(b"t", seq, payload).parts())
    return str(path)


class Busy:
    """An engine that keeps announcing, from another thread, for as long as somebody may be listening."""

    def __init__(self, **options) -> None:
        self.engine = Engine(**options)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        name = 0
        while not self._stop.wait(0.01):
            name += 1
            self.engine.step(name, name + 1000)
            self.engine.leave(name - 1, name + 999)
            self.engine.iterate()

    def __enter__(self) -> Engine:
        self.engine.publisher.start()
        self._thread.start()
        return self.engine

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self.engine.publisher.close()


class TestCheck:
    def test_clean_file(self, tmp_path, capsys):
        path = write(tmp_path / "r", [stored(1, 2, **FULL)], [removed(1, group_idx=0)])
        assert run("check", path) == 0
        out = capsys.readouterr().out
        assert "looks like vLLM" in out and "Nothing is wrong." in out
        unchecked = "capacity wasn't checked: give the number of blocks on each device with --blocks"
        assert unchecked in out
        assert run("check", path, "--blocks", "2") == 0
        assert unchecked not in capsys.readouterr().out

    def test_file_with_problems(self, tmp_path, capsys):
        path = write(tmp_path / "r", [stored(1, 2, **FULL)], [removed(1, group_idx=0)], seqs=[0, 3])
        assert run("check", path, "--json") == 1
        value = json.loads(capsys.readouterr().out)
        assert value["findings"][0]["code"] == "gap" and value["engine"] == "vllm" and not value["clean"]

    def test_leaks(self, tmp_path, capsys):
        path = write(tmp_path / "r", [stored(1, 2, **FULL)], [removed(group_idx=0)])
        assert run("check", path, "--blocks", "1") == 1
        out = capsys.readouterr().out
        assert "empty-remove: 1 removals name no block." in out and "over-capacity: " in out and "2 of 1" in out

    def test_json_lines(self, tmp_path, capsys):
        path = tmp_path / "drains.jsonl"
        path.write_text('[{"event_id": 0, "data": {"type": "created"}, "window_size": 64}]\n')
        assert run("check", str(path)) == 0
        assert "TensorRT-LLM" in capsys.readouterr().out

    def test_file_cut_short(self, tmp_path, capsys):
        path = write(tmp_path / "r", [stored(1)], [stored(2)])
        whole = (tmp_path / "r").read_bytes()
        (tmp_path / "r").write_bytes(whole[:-3])
        assert run("check", path) == 0
        assert "middle of a message" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["check", "nowhere"], "can't read nowhere: No such file"),
            (["check", "tcp://nonsense"], "has no port"),
            (["check", "tcp://127.0.0.1:1", "--engine", "x"], "unknown wire format 'x'"),
            (["check", "tcp://127.0.0.1:1", "--duration", "0.01"], "nothing to check"),
            (["tail", "localhost:5557"], "not an endpoint"),
            (["tail", "tcp://127.0.0.1:9", "--rank", "-1"], "a rank is 0 or more"),
            (["record", "tcp://127.0.0.1:9", "/no/such/dir/f"], "can't write"),
            (["play", "nowhere", "tcp://*:0"], "can't read nowhere"),
            (["proxy", "x", "tcp://*:0"], "not an endpoint"),
        ],
    )
    @needs_sockets
    def test_refusals_are_one_sentence(self, argv, message, capsys):
        assert run(*argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("Error: ") and message in err and err.count("\n") == 1

    @needs_sockets
    def test_live(self, capsys):
        with Busy() as engine:
            endpoints = [engine.publisher.endpoint, "--replay", engine.publisher.replay_endpoint]
            assert run("check", *endpoints, "--duration", "0.5", "--engine", "kvyard", "--json") == 0
        value = json.loads(capsys.readouterr().out)
        assert value["facts"]["streams"][""]["first"] == 0 and value["facts"]["stored_blocks"] > 5


@needs_sockets
class TestTail:
    def test_lines(self, capsys):
        with Busy(topic="kv@x") as engine:
            assert run("tail", engine.publisher.endpoint, "--count", "5", "--topic", "kv@") == 0
        streams = capsys.readouterr()
        assert "stored   G1 group 0  2 blocks of 1: " in streams.out and "rank 0" in streams.out
        assert "-- stale: batches before" in streams.out or "-- fresh" in streams.out
        assert "kv@x: " in streams.err and " batches, " in streams.err

    def test_json_with_replay(self, capsys):
        engine = Engine()
        with engine:
            for name in range(3):
                engine.step(name)
            engine.enter(7, tier=Tier.G2)
            engine.leave(1)
            engine.iterate()
            engine.flush()
            replay = engine.publisher.replay_endpoint
            assert run("tail", engine.publisher.endpoint, "--replay", replay, "--count", "1", "--json") == 0
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"] for line in said] == ["state", "cleared", "stored", "stored", "stored"]
        assert said[-1]["tier"] == "G2" and said[-1]["origin"] == "snapshot"
        held = engine.map.held()
        assert {key for line in said for key in line.get("hashes", ())} == held[0, Tier.G1] | held[0, Tier.G2]

    def test_interrupt_ends_with_what_was_seen(self):
        with Busy() as engine:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvyard", "events", "tail", engine.publisher.endpoint],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**__import__("os").environ, "PYTHONUNBUFFERED": "1"},
            )
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0 and "batches" in err and "Traceback" not in err


@needs_sockets
class TestRecordAndPlay:
    def test_a_recording_is_played(self, tmp_path, capsys):
        path = str(tmp_path / "r.gz")
        with Busy(topic="t") as engine:
            endpoints = [engine.publisher.endpoint, path, "--replay", engine.publisher.replay_endpoint]
            assert run("record", *endpoints, "--count", "40") == 0
        assert "40 messages" in capsys.readouterr().err
        recorded = list(Recording(path))
        assert [message.frame().seq for message in recorded] == list(range(40))
        assert [message.at for message in recorded] == sorted(message.at for message in recorded)
        assert run("check", path, "--engine", "kvyard") == 0

        port = free_ports(2)
        mirror, _ = play_into_a_reader(path, port, "--speed", "0")
        assert mirror.held == truth(recorded).held != {}

    def test_faults_on_the_way(self, tmp_path):
        """The way to try a router: what it ends up with behind faults is what it ends up with without."""
        batches = [[stored(at + 1, parent=at or None), *([removed(at - 5)] if at > 5 else [])] for at in range(200)]
        path = write(tmp_path / "r", *batches)
        faults = [
            "--drop",
            "0.1",
            "--duplicate",
            "0.1",
            "--reorder",
            "0.1",
            "--truncate",
            "0.05",
            "--corrupt",
            "0.05",
            "--seed",
            "4",
        ]
        mirror, said = play_into_a_reader(path, free_ports(2), "--speed", "0", *faults)
        assert mirror.held == truth(Recording(path)).held != {}
        assert "dropped" in said

    def test_timing(self, tmp_path):
        """Recorded over 20 minutes: at that speed it takes 0.12 s, and at another the test would run out of time."""
        path = write(tmp_path / "r", *([stored(at)] for at in range(5)), apart=300_000_000_000)
        before = time.monotonic()
        assert run("play", path, "tcp://127.0.0.1:0", "--speed", "10000") == 0
        assert time.monotonic() - before >= 0.12

    def test_malformed_messages_are_played_as_they_are(self, tmp_path, capsys):
        with RecordingWriter(tmp_path / "r", About()) as writer:
            writer.write(0, [b"a", b"b"])
        assert run("play", str(tmp_path / "r"), "tcp://127.0.0.1:0") == 0
        assert "1 messages played, 1 sent" in capsys.readouterr().err


@needs_sockets
def test_proxy():
    port = free_ports(2)
    with Busy() as engine:
        argv = [engine.publisher.endpoint, f"tcp://*:{port}", "--replay", f"tcp://*:{port + 1}"]
        with until_interrupted("proxy", *argv, "--drop", "0.3") as said:
            with Reader(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}") as reader:
                reader.until(lambda: reader.state == State.FRESH and reader.counters.gaps > 2)
    assert "dropped" in said[0]


@contextlib.contextmanager
def until_interrupted(*argv: str) -> Iterator[list[str]]:
    """``kvyard events`` as a process that is interrupted at the end; then its messages are in the list."""
    command = [sys.executable, "-m", "kvyard", "events", *argv]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield said
            process.send_signal(signal.SIGINT)
            said.append(process.communicate(timeout=PATIENCE)[1])
            assert process.returncode == 0 and "Traceback" not in said[0], said
        finally:
            process.kill()


def play_into_a_reader(path: str, port: int, *options: str) -> tuple[Mirror, str]:
    """Return a subscriber's mirror after ``kvyard events play``, once it has settled; and the command's output."""
    argv = ["play", path, f"tcp://*:{port}", "--replay", f"tcp://*:{port + 1}", "--subscribers", "1", "--stay", "-1"]
    last = len(list(Recording(path))) - 1
    with (
        until_interrupted(*argv, *options) as said,
        Reader(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}") as reader,
    ):
        reader.until(lambda: reader.state == State.FRESH and reader.subscriber.statuses()[0].seq == last)
        # What still is on its way has time to do harm.
        later = time.monotonic() + 1
        reader.until(lambda: time.monotonic() > later)
    return reader.mirror, said[0]


def truth(messages) -> Mirror:
    mirror, decoder = Mirror(), Decoder()
    for message in messages:
        mirror.apply(decoder.decode(message.frame().payload).events)
    return mirror


def test_without_zmq_it_says_what_to_install():
    code = (
        "import sys\nsys.modules['zmq'] = None\nfrom kvyard.cli.app import main\nmain(['events', 'tail', 'tcp://h:1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2 and done.stderr == "Error: event streams need ZeroMQ: pip install 'kvyard[zmq]'\n"


def test_importing_events_does_not_import_zmq():
    code = "import kvyard.events, kvyard.events.transport, kvyard.events.check, sys\nprint('zmq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout == "False\n"


def test_checking_a_file_needs_no_zmq(tmp_path):
    path = write(tmp_path / "r", [stored(1, **FULL)])
    code = (
        f"import sys\nsys.modules['zmq'] = None\nfrom kvyard.cli.app import main\nmain(['events', 'check', {path!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
