"""Replays over processes of this machine: a lost one is run again, a part of a trace is what it says."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.jobs import LocalExecutor, Task, TracePart, local, perform
from kvyard.lab.jobs.executor import ATTEMPTS
from kvyard.replay import replay
from kvyard.replay.report.files import to_json
from kvyard.replay.settings import make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.writing import write_trace

CONFIG = make_config({"workers": 2, "block_size": 16, "num_gpu_blocks": 500})
WHOLE = TracePart()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "talks.jsonl"
    write_trace(sessions(60), path, "mooncake")
    return path


def task(trace: Path, folder: Path, key: str = "a", part: TracePart = WHOLE) -> Task:
    return Task(str(trace), {"trace_block_size": 16}, CONFIG, None, key, str(folder / f"{key}.json"), key, part)


def killed(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Makes the first ``times`` processes that start die at once; returns their numbers."""
    victims: list[int] = []
    start = local._Crew._start

    def started(self: local._Crew, one: Task) -> None:
        start(self, one)
        if len(victims) < times:
            process = next(reversed(self._at_work.values()))[1]
            victims.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(local._Crew, "_start", started)
    return victims


@pytest.mark.timeout(400)
def test_a_lost_replay_is_run_again(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victims = killed(monkeypatch, 1)
    ends: list[tuple[str, str | None]] = []
    tasks = [task(trace, tmp_path, "a"), task(trace, tmp_path, "b")]
    LocalExecutor(2).run(tasks, lambda key, why: ends.append((key, why)))
    assert len(victims) == 1 and sorted(ends) == [("a", None), ("b", None)]
    for one in tasks:
        assert Path(one.path).read_bytes() == perform(one)


@pytest.mark.timeout(400)
def test_a_job_lost_each_time_is_given_up(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victims = killed(monkeypatch, ATTEMPTS)
    ends: list[tuple[str, str | None]] = []
    LocalExecutor(2).run([task(trace, tmp_path)], lambda key, why: ends.append((key, why)))
    assert len(victims) == ATTEMPTS and len(ends) == 1
    assert f"ended {ATTEMPTS} times, at last with exit code -9" in (ends[0][1] or "")
    assert not Path(tmp_path / "a.json").exists()


def test_a_job_killed_while_it_sends_its_report_is_run_again(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HalfSent:
        """Remains of a killed process: the head of a message of 100 bytes, and three of them."""

        exitcode = -9

        def __init__(self, target: object, args: tuple[Task, Connection], daemon: bool) -> None:
            self._pipe = args[1]

        def start(self) -> None:
            os.write(self._pipe.fileno(), struct.pack("!i", 100) + b"abc")

        def join(self) -> None:
            pass

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=HalfSent)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    ends: list[tuple[str, str | None]] = []
    LocalExecutor(2).run([task(trace, tmp_path)], lambda key, why: ends.append((key, why)))
    assert len(ends) == 1 and f"ended {ATTEMPTS} times, at last with exit code -9" in (ends[0][1] or "")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_defect_is_named_and_ends_one_replay_alone(trace: Path, tmp_path: Path, jobs: int) -> None:
    ends: dict[str, str | None] = {}
    broken = task(trace, tmp_path, "broken")._replace(reading={"trace_block_size": 16, "no_such_argument": 1})
    LocalExecutor(jobs).run([broken, task(trace, tmp_path)], ends.__setitem__)
    assert ends["a"] is None and Path(tmp_path / "a.json").exists()
    why = ends["broken"] or ""
    assert why.startswith("TypeError in ") and "no_such_argument" in why and "memory" not in why


def test_the_parts_of_a_trace_are_all_of_it() -> None:
    whole = open_trace(CONVERSATION, limit=60)
    cut = [one.arrival for one in whole][40]
    before, after = TracePart(until=cut), TracePart(since=cut)
    ids = [one.id for one in before.of(whole)] + [one.id for one in after.of(whole)]
    assert ids == [one.id for one in whole]
    assert next(iter(after.of(whole))).arrival == 0


def test_a_part_is_replayed_alone(trace: Path, tmp_path: Path) -> None:
    part = TracePart(skip=10, first=20)
    same = replay(part.of(open_trace(trace, trace_block_size=16)), config=CONFIG, label="a").report
    assert perform(task(trace, tmp_path, part=part)) == to_json(same)
    assert sum(same.requests.values()) >= 20 and same.requests["finished"] == 20


def test_less_than_one_job() -> None:
    with pytest.raises(KvyardError, match="jobs must be at least 1, got 0"):
        LocalExecutor(0)


def test_ctrl_c_waits_until_a_process_is_started() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # it doesn't block the signal, so it takes it
    other.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    steps = 0
    try:
        with pytest.raises(KeyboardInterrupt), local._uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(20):
                time.sleep(0.001)
                steps += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        other.join()
    assert steps == 20
