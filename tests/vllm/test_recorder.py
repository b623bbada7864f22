"""The recorder without an engine: told what golden logs say, it writes files that kvyard's own readers take."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvyard.clock import MS, SECOND, VirtualClock
from kvyard.errors import KvyardError
from kvyard.hashing import TokenChain, algorithm
from kvyard.lab.calibrate.passes import read_passes
from kvyard.lab.conform.scheduler import conform, read_lines
from kvyard.replay.traces import open_trace
from kvyard.vllm.recorder import EndedRequest, EngineRecorder, PassComposition

GOLDEN = Path(__file__).parents[1] / "golden" / "scheduler"
HOST = MS // 10
"""What the host takes before and after a pass, in the engine that is played here."""


class Played:
    """A golden log, told to a recorder as an engine would."""

    def __init__(self, log: str, folder: Path, **options: Any) -> None:
        lines = read_lines(GOLDEN / f"{log}.jsonl.xz")
        self.header = lines[0]
        self.requests = {line["request"]: line for line in lines if "request" in line}
        self.steps = [line for line in lines if "step" in line]
        self.clock = VirtualClock()
        sizes = [
            group.get("block_size", self.header["config"]["block_size"]) for group in self.header["config"]["groups"]
        ]
        self.size = min(sizes)
        header = {**self.header, "timing": None}
        self.recorder = EngineRecorder(folder, header, clock=self.clock, hash_block_size=self.size, **options)
        self.outputs = dict.fromkeys(self.requests, 0)
        self.computed = dict.fromkeys(self.requests, 0)
        self.idles = False
        """Whether the recorder is told before each step that the engine has nothing to do."""

    def chain(self, name: str, output: int) -> TokenChain:
        request = self.requests[name]
        first = request["output"][0]
        tokens = [token for low, count in request["prompt"] for token in range(low, low + count)]
        return TokenChain([*tokens, *range(first, first + output)], self.size, algorithm("sha256_cbor"))

    def end(self, name: str, *, aborted: bool, in_step: bool) -> None:
        chain = self.chain(name, self.outputs[name])
        prompt = chain.num_tokens - self.outputs[name]
        end = EndedRequest(list(chain.keys), prompt, self.outputs[name], self.requests[name]["output"][1])  # type: ignore[arg-type]
        self.recorder.ended(name, end, aborted=aborted, in_step=in_step)

    def play(self, steps: int | None = None) -> None:
        """The first ``steps`` steps, or all."""
        coming = sorted(
            self.requests.values(), key=lambda request: (request["arrival"], request["request"]), reverse=True
        )
        for at, step in enumerate(self.steps[:steps]):
            while coming and coming[-1]["arrival"] <= step["start"]:
                request = coming.pop()
                self.clock.sleep_until(request["arrival"])
                chain = self.chain(request["request"], 0)
                self.recorder.arrived(request["request"], list(chain.keys), chain.tokens, request["priority"])  # type: ignore[arg-type]
            for name in step.get("gone", ()):
                self.end(name, aborted=True, in_step=False)
            self.clock.sleep_until(step["start"])
            if self.idles:
                self.recorder.idle(self.clock.now())
            start = self.clock.now()
            for name in step.get("preempted", ()):
                self.recorder.preempted(name)
            hits = {**step.get("resumed", {}), **step.get("new", {})}
            self.computed |= hits
            shape = self.shape(step["tokens"])
            self.clock.sleep_until(start + HOST)
            counts = step["running"], step["waiting"], step["free"]
            self.recorder.decided(start, step["tokens"], hits, step.get("preempted", ()), counts, shape)
            end = start + step["ns"]
            aborts = sorted((self.requests[name]["abort"], name) for name in step.get("aborted", ()))
            for when, name in aborts:
                self.clock.sleep_until(when)
                self.end(name, aborted=True, in_step=True)
            self.clock.sleep_until(end - HOST)
            self.recorder.returned(self.clock.now())
            for name, count in step["tokens"].items():
                self.computed[name] += count
                prompt = sum(count for _, count in self.requests[name]["prompt"])
                if name in self.recorder.open and self.computed[name] >= prompt + self.outputs[name]:
                    self.recorder.sampled(name)
                    self.outputs[name] += 1
            for name in step.get("finished", ()):
                self.end(name, aborted=False, in_step=True)
            self.clock.sleep_until(end)
            following = self.steps[at + 1]["start"] if at + 1 < len(self.steps) else -1
            self.recorder.looked_at(following == end)
            if following != end:
                self.recorder.idle(end)

    def shape(self, tokens: dict[str, int]) -> PassComposition:
        prefills, contexts = [], []
        for name, count in tokens.items():
            past = self.computed[name]
            if past < sum(size for _, size in self.requests[name]["prompt"]) or count > 1:
                prefills.append((count, past))
            else:
                contexts.append(past + 1)
        return PassComposition(prefills, len(contexts), sum(contexts), max(contexts, default=0))

    def close(self) -> None:
        unfinished = {}
        for name in self.recorder.open:
            chain = self.chain(name, self.outputs[name])
            prompt, most = chain.num_tokens - self.outputs[name], self.requests[name]["output"][1]
            unfinished[name] = EndedRequest(list(chain.keys), prompt, self.outputs[name], most)  # type: ignore[arg-type]
        self.recorder.close(unfinished)


@pytest.mark.parametrize("log", ["turns-tight@6", "abort-tight@1", "abort-inside@1", "mamba@1", "boundary@3"])
def test_decisions_are_those_of_the_log_and_conform(log: str, tmp_path: Path) -> None:
    played = Played(log, tmp_path / "recording")
    played.play()
    played.close()
    verdict = conform(tmp_path / "recording" / "decisions.jsonl.gz")
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == len(played.steps)


def test_a_wrong_decision_shows(tmp_path: Path) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording")
    admission = next(step for step in played.steps[20:] if step.get("new"))
    name = next(iter(admission["new"]))
    admission["new"][name] += 16
    played.play()
    played.close()
    verdict = conform(tmp_path / "recording" / "decisions.jsonl.gz")
    assert verdict.difference is not None
    assert verdict.difference.field == "new"


def test_a_recording_may_end_while_requests_are_in_flight(tmp_path: Path) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording")
    played.play(60)
    assert played.recorder.open
    played.close()
    verdict = conform(tmp_path / "recording" / "decisions.jsonl.gz")
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == 60


def conforms(folder: Path, steps: int) -> None:
    verdict = conform(folder / "decisions.jsonl.gz")
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == steps


def give_up(played: Played, count: int | None = None) -> None:
    """So many of the open requests, or all, between two steps."""
    for name in list(played.recorder.open)[:count]:
        played.end(name, aborted=True, in_step=False)


def test_requests_given_up_after_the_last_step_are_written_when_the_engine_is_idle(tmp_path: Path) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording")
    played.play(60)
    give_up(played)
    played.clock.sleep_until(played.clock.now() + MS)
    played.recorder.idle(played.clock.now())
    conforms(tmp_path / "recording", 60)  # not closed


def test_the_step_after_an_idle_engine_names_who_was_given_up_before(tmp_path: Path) -> None:
    played = Played("abort-tight@1", tmp_path / "recording")
    assert any(step.get("gone") for step in played.steps)
    played.idles = True
    played.play()
    played.close()
    conforms(tmp_path / "recording", len(played.steps))


@pytest.mark.parametrize("count", [None, 1])
def test_requests_given_up_after_the_last_step_are_written_at_the_end(count: int | None, tmp_path: Path) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording")
    played.play(60)
    assert len(played.recorder.open) > 1
    give_up(played, count)
    played.clock.sleep_until(played.clock.now() + MS)
    played.close()
    conforms(tmp_path / "recording", 60)


def test_a_recording_may_end_inside_a_step(tmp_path: Path) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording")
    played.play(60)
    step = next(step for step in played.steps[60:] if set(step["tokens"]) <= set(played.recorder.open))
    give_up(played, 1)
    shape = PassComposition([], 1, 20, 20)
    played.recorder.decided(played.clock.now(), step["tokens"], {}, (), (1, 0, 9), shape)
    for name in list(played.recorder.open):
        played.end(name, aborted=True, in_step=True)
    played.recorder.close({})
    conforms(tmp_path / "recording", 60)


def test_nothing_is_written_before_the_last_output_has_left(tmp_path: Path) -> None:
    clock = VirtualClock()
    folder = tmp_path / "recording"
    recorder = EngineRecorder(folder, None, clock=clock, hash_block_size=16)
    recorder.arrived("a", [], [1, 2, 3], 0)
    recorder.decided(0, {"a": 3}, {"a": 0}, (), (1, 0, 9), PassComposition([(3, 0)], 0, 0, 0))
    clock.sleep_until(clock.now() + MS)
    recorder.returned(clock.now())
    recorder.ended("a", EndedRequest([], 3, 1, 1), aborted=False, in_step=True)
    recorder.looked_at(False)
    assert [file.stat().st_size for file in folder.iterdir()] == [0, 0]
    clock.sleep_until(clock.now() + SECOND)
    recorder.idle(clock.now())
    (row,) = read_passes(folder / "passes.jsonl").rows
    assert (row.ms, row.host_ms) == (1.0, 0.0)  # what came after the last step is none of it
    assert json.loads((folder / "summary.json").read_text())["passes"] == 1


def test_a_request_that_lived_between_two_steps_is_in_no_decision(tmp_path: Path) -> None:
    clock = VirtualClock()
    recorder = EngineRecorder(tmp_path / "recording", {}, clock=clock, hash_block_size=16)
    recorder.arrived("short", [], [1, 2, 3], 0)
    recorder.ended("short", EndedRequest([], 3, 0, 1), aborted=True, in_step=False)
    recorder.arrived("a", [], [1, 2, 3], 0)
    clock.sleep_until(MS)
    recorder.decided(MS, {"a": 3}, {"a": 0}, (), (1, 0, 9), PassComposition([(3, 0)], 0, 0, 0))
    recorder.returned(clock.now())
    recorder.ended("a", EndedRequest([], 3, 1, 1), aborted=False, in_step=True)
    recorder.looked_at(False)
    recorder.counters.spent_ns = 1_234_567
    recorder.close({})
    _, *lines = read_lines(tmp_path / "recording" / "decisions.jsonl.gz")
    assert [line["request"] for line in lines if "request" in line] == ["r2"]
    assert [line.get("gone") for line in lines if "step" in line] == [None]
    # The scheduler sees who came when it decides.
    assert [line["arrival"] for line in lines if "request" in line] == [MS]
    assert json.loads((tmp_path / "recording" / "summary.json").read_text())["us_per_step"] == 1234.57


def test_the_trace_and_the_passes_can_be_read(tmp_path: Path) -> None:
    played = Played("turns-tight@6", tmp_path / "recording")
    played.play()
    played.close()
    folder = tmp_path / "recording"
    rows = list(open_trace(folder / "trace.jsonl"))
    finished = [name for name in played.requests if played.outputs[name]]
    assert sorted(row.output_length for row in rows) == sorted(played.outputs[name] for name in finished)
    assert {row.id_block_size for row in rows} == {played.size}
    passes = read_passes(folder / "passes.jsonl").rows
    assert len(passes) == len(played.steps)
    for measured, step in zip(passes, played.steps, strict=True):
        assert measured.batch + sum(new for new, _ in measured.prefills) == sum(step["tokens"].values())
        assert measured.host_ms is not None
        assert measured.ms + measured.host_ms == pytest.approx(step["ns"] / MS)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["requests"], summary["passes"], summary["errors"]) == (len(played.requests), len(passes), 0)


def test_a_recording_contains_no_text(tmp_path: Path) -> None:
    played = Played("turns-tight@6", tmp_path / "recording")
    played.play()
    played.close()
    chain = played.chain(next(iter(played.requests)), 0)
    lines = read_lines(tmp_path / "recording" / "decisions.jsonl.gz")
    text = json.dumps(lines) + (tmp_path / "recording" / "trace.jsonl").read_text()
    for key in chain.keys:
        assert isinstance(key, bytes)
        assert str(int.from_bytes(key[-8:], "big")) not in text


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="exists: name another folder"):
        EngineRecorder(tmp_path, None, clock=VirtualClock(), hash_block_size=16)


def test_a_full_disk_ends_the_files_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording")
    played.play(50)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        played.recorder.flush()
        played.recorder.flush()
    said = [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()]
    assert played.recorder.counters.errors == 2
    assert (played.recorder.counters.passes, played.recorder.counters.decisions) == (0, 0)
    assert len(said) == 3  # the trace says so itself
    Played("threshold-tight@1", tmp_path / "other").play(10)
    played.close()


def test_an_engine_without_requests_has_everything_written(tmp_path: Path) -> None:
    played = Played("turns-tight@6", tmp_path / "recording")
    played.play()
    # Not closed: vLLM kills engines that take long to end.
    verdict = conform(tmp_path / "recording" / "decisions.jsonl.gz")
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == len(played.steps)
    assert len(read_passes(tmp_path / "recording" / "passes.jsonl").rows) == len(played.steps)
    assert json.loads((tmp_path / "recording" / "summary.json").read_text())["decisions"] == len(played.steps)
    played.close()


def test_a_file_ends_at_its_limit(tmp_path: Path) -> None:
    played = Played("threshold-tight@1", tmp_path / "recording", limit=2000)
    played.play(200)
    played.recorder.flush()
    played.recorder.decided(played.clock.now(), {}, {}, (), (0, 0, 9), PassComposition([], 1, 4, 4))
    played.clock.sleep_until(played.clock.now() + MS)
    played.recorder.returned(played.clock.now())
    played.recorder.looked_at(False)
    played.close()
    for name in ("passes.jsonl", "decisions.jsonl.gz"):
        assert 2000 <= (tmp_path / "recording" / name).stat().st_size < 300_000
    summary = json.loads((tmp_path / "recording" / "summary.json").read_text())
    assert summary["errors"] == 0
    written = (tmp_path / "recording" / "passes.jsonl").read_bytes().count(b"\n")
    steps = [line for line in read_lines(tmp_path / "recording" / "decisions.jsonl.gz") if "step" in line]
    assert (summary["passes"], summary["decisions"]) == (written, len(steps))


def test_overlapping_passes_are_timed_by_when_they_end(tmp_path: Path) -> None:
    clock = VirtualClock()
    recorder = EngineRecorder(tmp_path / "recording", {}, clock=clock, hash_block_size=16, overlapping=True)
    recorder.arrived("a", [], [1, 2, 3], 0)
    shape = PassComposition([(3, 0)], 0, 0, 0)
    clock.sleep_until(SECOND)
    recorder.decided(SECOND, {"a": 3}, {"a": 0}, (), (1, 0, 9), shape)
    recorder.decided(SECOND, {"a": 1}, {}, (), (1, 0, 9), PassComposition([], 1, 4, 4))
    clock.sleep_until(SECOND + 7 * MS)
    recorder.returned(clock.now())
    recorder.looked_at(True)
    clock.sleep_until(SECOND + 11 * MS)
    recorder.returned(clock.now())
    recorder.looked_at(True)
    recorder.close({})
    passes = read_passes(tmp_path / "recording" / "passes.jsonl").rows
    assert [row.ms for row in passes] == [7.0, 4.0]
    assert not (tmp_path / "recording" / "decisions.jsonl.gz").exists()


def test_pipeline_stages_leave_no_time_of_a_single_pass(tmp_path: Path) -> None:
    clock = VirtualClock()
    options: dict[str, Any] = {"overlapping": True, "timed": False}
    recorder = EngineRecorder(tmp_path / "recording", {}, clock=clock, hash_block_size=16, **options)
    shape = PassComposition([(3, 0)], 0, 0, 0)
    for name in "ab":
        recorder.arrived(name, [], [1, 2, 3], 0)
        recorder.decided(clock.now(), {name: 3}, {name: 0}, (), (1, 0, 9), shape)
    for name in "ab":
        clock.sleep_until(clock.now() + MS)
        recorder.returned(clock.now())
        recorder.sampled(name)
        recorder.ended(name, EndedRequest([], 3, 1, 1), aborted=False, in_step=True)
        recorder.looked_at(name == "a")
    recorder.idle(clock.now())
    assert sorted(file.name for file in (tmp_path / "recording").iterdir()) == ["summary.json", "trace.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "recording" / "trace.jsonl").read_text().splitlines()]
    assert [row["ttft"] for row in rows] == [1, 2]
