"""``kvyard sweep``: a grid from the command line."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION
from tests.waiting import eventually

from kvyard.cli.app import main
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.writing import write_trace

run = partial(exit_code, "sweep")


@pytest.mark.timeout(400)
def test_a_grid_and_then_more_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = [CONVERSATION, "--limit", 40, "--workers", 2, "--num-gpu-blocks", 1500]
    assert run(*base, "--vary", "host_blocks=0,4k", "--vary", "router=round-robin,kv", "-j", 2) == 0
    out, err = capsys.readouterr()
    assert out.count("round-robin") == 2 and "TTFT" in out and "reused" in out
    folder = tmp_path / "sweep-mooncake_conversation"
    assert f"written: {folder.name}/sweep.html" in err
    assert sorted(path.name for path in folder.iterdir()) == ["points", "runs", "sweep.csv", "sweep.html", "sweep.json"]
    assert run(*base, "--vary", "host_blocks=0,4000,6k", "--router", "kv", "-o", folder, "-j", 1) == 0
    assert "2 of 3 points were there from an earlier run" in capsys.readouterr().err
    with (folder / "sweep.csv").open() as file:
        assert [row["host_blocks"] for row in csv.DictReader(file)] == ["0", "4000", "6k"]
    points = sorted(map(str, (folder / "points").iterdir()))
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *points[:2]])
    assert exit_.value.code == 0
    assert "host_blocks=" in capsys.readouterr().out


def test_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONVERSATION, "--limit", 5, "--vary", "workers=1,2", "-o", tmp_path / "s", "-j", 1, "-q") == 0
    assert capsys.readouterr() == ("", "")


def test_a_point_that_fails_is_named_and_the_answer_is_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--limit", 5, "--workers", 1, "-o", tmp_path / "s", "-j", 1]
    assert run(CONVERSATION, "--vary", "num_gpu_blocks=1,2k", *options) == 1
    out, _ = capsys.readouterr()
    assert "num_gpu_blocks=1: none of the 5 requests fits" in " ".join(out.split())
    assert run(CONVERSATION, "--vary", "num_gpu_blocks=1,2k", *options, "-q") == 1
    assert "num_gpu_blocks=1: none of the 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([CONVERSATION], "--vary host_blocks=0,20k,80k"),
        ([CONVERSATION, "--vary", "host_blocks"], "nothing to vary"),
        ([CONVERSATION, "--vary", "hostblocks=1,2"], "did you mean host_blocks"),
        ([CONVERSATION, "--vary", "planner=1,2"], "planner: say autoscale"),
        ([CONVERSATION, "--vary", "router=kv,best"], "at the point router=best"),
        ([CONVERSATION, "--vary", "router=kv", "--router", "kv"], "both set and varied"),
        ([CONVERSATION, "--vary", "router=kv", "-j", "0"], "--jobs 0"),
        ([CONVERSATION, "--vary", "router=kv", "--slo", "x"], "ttft=500"),
        (["no-such-file", "--vary", "router=kv"], "no such file"),
    ],
)
def test_wrong_input_gets_a_sentence(
    argv: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err and not out
    assert not list(tmp_path.iterdir())


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(400)
def test_ctrl_c_ends_all_processes_and_keeps_what_is_done(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    write_trace(sessions(20_000, arrivals="poisson:rate=20", turns="fixed:1"), trace, "mooncake")
    code = "import sys; from kvyard.cli.app import main; main(sys.argv[1:])"
    argv = ["sweep", str(trace), "--trace-block-size", "16", "--block-size", "16", "--set", "plans=off"]
    # One point is short, the others are long.
    argv += ["--vary", "limit=20,19000,20000", "--workers", "2", "-j", "2", "-o", str(tmp_path / "s")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    points = tmp_path / "s" / "points"
    eventually(lambda: list(points.glob("*.json")) or process.poll() is not None, seconds=100)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "Interrupted with 2 points to go" in err
    assert [path.suffix for path in points.iterdir()] == [".json"]
    eventually(lambda: not alive(process.pid))  # Python's own tracker of resources ends a moment after the rest
    with (tmp_path / "s" / "sweep.csv").open() as file:
        assert [row["error"] for row in csv.DictReader(file)] == ["", "not run yet", "not run yet"]
    assert "20000" in out


def test_the_answer_is_no_if_no_point_meets_the_slo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sweep", CONVERSATION, "--limit", 20, "--vary", "workers=1,2", "-j", 1, "-q", "-o", tmp_path / "out"]
    assert exit_code(*argv, "--slo", "ttft_p99<1ms") == 1
    assert "ttft_p99" in capsys.readouterr().err
    assert exit_code(*argv, "--slo", "ttft_p99<1h") == 0


def test_a_log_file_gets_lines_of_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["sweep", CONVERSATION, "--limit", 20, "--vary", "workers=1,2", "-j", 1, "-o", tmp_path / "out"]
    assert exit_code(*argv) == 0
    assert " points, " not in capsys.readouterr().err
    monkeypatch.setattr("kvyard.replay.progress.EVERY", 0)
    argv[-1] = tmp_path / "more"
    assert exit_code(*argv) == 0
    said = capsys.readouterr().err
    assert "1 of 2 points, " in said and ", after 0:0" in said and "\r" not in said and "\x1b" not in said


def test_long_requests_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sweep", CONVERSATION, "--limit", 20, "--max-tokens", 8000, "--vary", "workers=1", "-j", 1]
    assert exit_code(*argv, "-o", tmp_path / "out") == 0
    report = json.loads(next((tmp_path / "out" / "points").glob("*.json")).read_text())
    lengths = [request.input_length + request.output_length for request in open_trace(CONVERSATION, limit=20)]
    assert report["requests"]["finished"] == sum(tokens <= 8000 for tokens in lengths) < 20
