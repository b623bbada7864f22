"""Output of commands: results for programs, words for people, and neither in the other's way."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.support import exit_code

ROWS = [
    {"timestamp": 100 * at, "input_length": 600, "output_length": 8, "hash_ids": [at % 3, at % 3 + 9]}
    for at in range(8)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line as people type it, with ``kvyard`` for the command."""
    command = command.replace("kvyard ", f"'{sys.executable}' -m kvyard ", 1)
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        errors="replace",
        env={**os.environ, **environment},
        check=False,
    )


def test_the_report_on_stdout_is_all_there_is_on_stdout(
    trace: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert exit_code("replay", trace, "--report", "-") == 0
    streams = capsysbinary.readouterr()
    written = streams.out
    assert json.loads(written)["requests"]
    assert b"Time to first token" in streams.err
    assert exit_code("replay", trace, "--json") == 0
    streams = capsysbinary.readouterr()
    assert streams.out == written
    assert b"Time to first token" not in streams.err
    assert exit_code("replay", trace, "-q", "--per-request", "-") == 0
    assert len([json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]) == len(ROWS)


def test_one_stdout_for_one_result(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("replay", trace, "--json", "--html", "-") == 2
    assert "stdout" in capsys.readouterr().err
    assert exit_code("replay", trace, "--json", "--report", "x") == 2
    assert exit_code("trace", "info", trace, "--json", "--html", "/dev/stdout") == 2


def test_a_trace_goes_through_a_pipe(trace: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert exit_code("trace", "slice", trace, "-", "--first", 3) == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("command", ["convert", "slice", "scale"])
def test_no_command_overwrites_what_it_reads(trace: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    link = trace.with_name("link.jsonl")
    link.symlink_to(trace)
    assert exit_code("trace", command, trace, link, *(["--speedup", 2] if command == "scale" else [])) == 2
    assert "what is read" in capsys.readouterr().err
    assert exit_code("replay", trace, "--report", link) == 2
    assert trace.read_bytes() == before


def test_all_commands_overwrite_alike(trace: Path, tmp_path: Path) -> None:
    report, page, out = tmp_path / "r.json", tmp_path / "p.html", tmp_path / "o.jsonl"
    for path in (report, page, out):
        path.write_text("older")
    assert exit_code("replay", trace, "-q", "--report", report, "--html", page) == 0
    assert json.loads(report.read_text()) and "<html" in page.read_text()
    for command in (("compare", report, report), ("trace", "info", trace), ("profile", "show", "h200-llama3-8b")):
        page.write_text("older")
        assert exit_code(*command, "--html", page) == 0, command
        assert "<html" in page.read_text()
    assert exit_code("trace", "convert", trace, out) == 0
    assert len(out.read_text().splitlines()) == len(ROWS)


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device node takes root")
@pytest.mark.parametrize("flag", ["--report", "--html", "--per-request"])
def test_results_to_a_device_leave_it_a_device(trace: Path, tmp_path: Path, flag: str) -> None:
    node = tmp_path / "null"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert exit_code("replay", trace, "-q", flag, node) == 0
    assert stat.S_ISCHR(node.stat().st_mode)


def test_a_full_disk_is_one_sentence(trace: Path, tmp_path: Path) -> None:
    for command in ("--help", f"replay {trace} --json"):
        done = shell(f"kvyard {command} > /dev/full", tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "No space left on device" in done.stderr


def test_a_reader_that_goes_away_ends_it_quietly(trace: Path, tmp_path: Path) -> None:
    for command in ("--help", f"trace slice {trace} -"):
        done = shell(f"kvyard {command} 2> err | true; cat err; exit ${{PIPESTATUS[0]}}", tmp_path)
        assert done.returncode in (0, 141)
        assert "Traceback" not in done.stdout and "BrokenPipe" not in done.stdout


def test_a_terminal_without_unicode(trace: Path, tmp_path: Path) -> None:
    done = shell(f"kvyard replay {trace}", tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert "Time to first token" in done.stdout and done.stdout.isascii()


def test_closed_streams(trace: Path, tmp_path: Path) -> None:
    done = shell("kvyard trace formats >&- 2>&-", tmp_path)
    assert done.returncode == 0
    done = shell(f"kvyard replay {trace} >&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"timestamp": 1e26}, "146 years"),
        ({"timestamp": 10**30}, "146 years"),
        ({"input_length": 10**12}, "tokens"),
        ({"output_length": 10**12}, "tokens"),
    ],
)
@pytest.mark.parametrize("command", [("replay",), ("trace", "info")])
def test_numbers_beyond_measure_are_refused(
    tmp_path: Path, row: dict[str, float], words: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({**ROWS[1], **row}) + "\n")
    assert exit_code(*command, path) == 2
    assert words in capsys.readouterr().err


def test_advice_names_flags_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wide.jsonl"
    row = {"timestamp": 0, "input_length": 2000, "output_length": 3, "hash_ids": [1, 2]}
    path.write_text(json.dumps(row) + "\n")
    for command in (("replay",), ("trace", "info"), ("sweep",)):
        more = ["--vary", "workers=1", "-o", tmp_path / "out"] if command == ("sweep",) else []
        assert exit_code(*command, path, *more) == 2
        assert "pass --trace-block-size 1024" in capsys.readouterr().err
        assert exit_code(*command, path, *more, "--trace-block-size", 1024) == 0
        capsys.readouterr()


def test_a_mistyped_flag_is_answered_with_flags_that_the_help_shows(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("replay", trace, "--wokers", 3) == 2
    assert "--workers" in capsys.readouterr().err
    assert exit_code("replay", "--help") == 0
    shown = capsys.readouterr().out
    for wrong in ("--wokers", "--speeed", "--prefil-workers", "--dp-sze", "--topicc", "--event-lags"):
        assert exit_code("replay", trace, wrong, 3) == 2
        said = capsys.readouterr().err.partition("Did you mean ")[2]
        for name in said.strip().rstrip("?").split(" or "):
            assert name in shown, (wrong, said)


def test_an_unknown_model_is_answered_with_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("model", "nope") == 2
    assert "llama-3.1-8b" in capsys.readouterr().err


def test_sweep_and_league_for_programs(trace: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for command in (("sweep", trace, "--vary", "workers=1,2"), ("league", trace, "--policies", "kv,random")):
        assert exit_code(*command, "--jobs", 1, "-o", tmp_path / command[0], "--json") == 0
        written = (tmp_path / command[0] / f"{command[0]}.json").read_bytes()
        assert json.loads(written) and capsysbinary.readouterr().out == written


def test_a_large_output_is_announced_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvyard.cli.trace.LARGE", 1 << 20)
    path, out = tmp_path / "long.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 300_000, "output_length": 1}) + "\n")
    os.mkfifo(out)
    code, said = [], []

    def convert() -> None:
        code.append(exit_code("trace", "convert", path, out, "--to", "vllm-custom"))

    thread = threading.Thread(target=convert)
    thread.start()
    with out.open("rb") as pipe:  # opens once the command does, which is when it begins to write
        said.append(capsys.readouterr().err)
        size = sum(len(part) for part in iter(lambda: pipe.read(1 << 20), b""))
    thread.join(60)
    assert code == [0]
    assert "about 1.26 MiB" in said[0]
    assert abs(size / (1.2617 * (1 << 20)) - 1) < 0.03


def test_help_in_groups_and_by_its_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("replay", "-h") == 0
    out = capsys.readouterr().out
    headings = [line.rstrip(":") for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:5] == ["Arguments", "Fleet", "Traffic", "Router", "Engine"]
    assert headings[-2:] == ["Output", "Options"]
    assert "Memory below the device" in headings
    assert exit_code("trace", "info", "-h") == 0
    assert exit_code("-h") == 0


def test_a_shell_completes_commands_and_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("--completion", "bash") == 0
    assert "complete -o default -F" in capsys.readouterr().out
    assert exit_code("--completion", "nope") == 2
    monkeypatch.setenv("_KVYARD_COMPLETE", "complete_bash")
    for words, found in (
        ("kvyard re", "replay"),
        ("kvyard replay --wor", "--workers"),
        ("kvyard trace conv", "convert"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        capsys.readouterr()
        assert exit_code() == 0
        assert found in capsys.readouterr().out.split(), words


def test_an_unknown_setting_is_answered_with_three_names_at_most(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("replay", trace, "--set", "num_gpu_blockz=3") == 2
    err = capsys.readouterr().err
    assert "did you mean num_gpu_blocks" in err and len(err) < 160
    assert exit_code("replay", trace, "--set", "zzz=3") == 2
    assert len(capsys.readouterr().err) < 160


def test_a_trace_in_sixty_columns(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert exit_code("trace", "info", trace) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if "input tokens" in line)
    assert len(row) <= 60
