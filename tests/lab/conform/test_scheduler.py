"""Our engine decides what vLLM's scheduler decided, step by step; a difference is shown with what led there."""

from __future__ import annotations

import gzip
import json
import lzma
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code

from kvyard.lab.conform import LogError
from kvyard.lab.conform.scheduler import LoggedRun, Record, SchedulerLog, conform, log_format, read_lines

TESTS = Path(__file__).resolve().parents[2]
OWN = sorted((TESTS / "golden" / "scheduler").glob("*.xz"))
SHARED = sorted((TESTS.parents[1] / "shared" / "golden_scheduler").glob("*.xz"))
LIGHT = TESTS / "golden" / "scheduler" / "light@1.jsonl.xz"


run = partial(exit_code, "conform")


def changed(tmp_path: Path, kind: str, number: int, **fields: object) -> Path:
    """The light log with one of its lines of a kind changed."""
    lines = read_lines(LIGHT)
    of_kind: list[Record] = [line for line in lines if kind in line]
    of_kind[number].update(fields)
    path = tmp_path / "changed@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "path", {path.name: path for path in SHARED + OWN}.values(), ids=lambda path: path.name.removesuffix(".jsonl.xz")
)
def test_our_engine_decides_what_vllm_decided(path: Path) -> None:
    """One pass at a time and with plans."""
    verdict = conform(path)
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == sum("step" in line for line in read_lines(path))


def test_one_line_a_file_and_a_total_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    operations = next((TESTS / "golden" / "blocks").glob("full@*.xz"))
    count = len(lzma.decompress(operations.read_bytes()).splitlines())
    assert run(LIGHT, operations) == 0
    out = capsys.readouterr().out
    assert "light@1: 581 steps, identical\n" in out
    assert out.endswith(f"2 of 2 logs identical, {count} operations, 581 steps\n")


def test_a_difference_is_shown_with_what_led_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(changed(tmp_path, "step", 20, free=1)) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "changed@1: differs at step 20, in free"
    assert out[2] == "  recorded   free = 1"
    assert out[4].startswith('  before     {"step":17,')


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("step", "ns", 1),
        ("step", "start", 1),
        ("step", "line", 1),
        ("step", "tokens", {}),
        ("step", "running", 99),
        ("step", "waiting", 99),
        ("step", "new", {"r000": 1}),
        ("step", "resumed", {"r000": 1}),
        ("step", "preempted", ["r000"]),
        ("step", "gone", ["r000"]),
        ("step", "aborted", ["r000"]),
        ("step", "finished", ["r000"]),
        ("end", "at", 1),
        ("end", "first_token", 1),
        ("end", "output", 1),
        ("end", "cached", 1),
        ("end", "preemptions", 1),
        ("end", "reason", "aborted"),
    ],
)
def test_every_field_is_compared(tmp_path: Path, line: str, field: str, value: object) -> None:
    difference = conform(changed(tmp_path, line, 7, **{field: value})).difference
    assert difference is not None
    assert difference.field == (field if line == "step" else f"{field} of r007")
    assert difference.line == (7 if line == "step" else 581)


def test_steps_that_never_came_differ(tmp_path: Path) -> None:
    lines = read_lines(LIGHT)
    lines.remove(next(line for line in lines if line.get("step") == 580))
    path = tmp_path / "short@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    difference = conform(path).difference
    assert difference is not None
    assert (difference.line, difference.field, difference.ours) == (580, "number of steps", 581)


@pytest.mark.parametrize(("name", "value"), [("abort", float("nan")), ("abort", 1e300), ("arrival", 0.5)])
def test_times_that_are_none_are_refused(tmp_path: Path, name: str, value: float) -> None:
    lines = read_lines(LIGHT)
    next(line for line in lines if "request" in line)[name] = value
    path = tmp_path / "odd@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LogError, match=rf"odd@1\.jsonl: request .* has {name}=.*: times are whole nanoseconds"):
        conform(path)


def test_a_short_log_of_long_answers_takes_no_longer_than_its_steps(tmp_path: Path) -> None:
    """Sixteen million steps, if the replay went on where the log ends."""
    lines = read_lines(LIGHT)
    requests = [line for line in lines if "request" in line]
    lines[0]["config"] |= {"max_model_len": 1 << 24, "num_blocks": 1 << 21}
    requests[0]["output"] = [1, 16_000_000]
    path = tmp_path / "long@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[0], requests[0]]))
    log = SchedulerLog(path)
    run = LoggedRun(log, plans=False)
    run.go()
    assert len(run.steps) <= 2
    found = conform(path).difference
    assert found is not None and found.field == "number of steps"


def test_a_damaged_file_is_refused_and_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = bytearray(gzip.compress(lzma.decompress(LIGHT.read_bytes())))
    packed[40:60] = bytes(20)
    path = tmp_path / "light@1.jsonl.gz"
    path.write_bytes(packed)
    assert run(path) == 2
    assert "light@1.jsonl.gz" in capsys.readouterr().err


def test_a_bad_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(changed(tmp_path, "format", 0, format="scheduler-log/9")) == 2
    assert "is of format 'scheduler-log/9', not 'scheduler-log/1'" in capsys.readouterr().err
    path = tmp_path / "bad@1.jsonl"
    path.write_text('{"format": "scheduler-log/1"}\n')
    with pytest.raises(LogError, match=r"bad@1.jsonl: is no scheduler log: a line has no 'config'"):
        conform(path)
    path.write_text('{"format": "scheduler-log/1"}\nnonsense\n')
    with pytest.raises(LogError, match=r"bad@1\.jsonl: can't be read"):
        conform(path)
    assert log_format(tmp_path / "none.jsonl.xz") is None
