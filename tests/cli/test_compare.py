"""``kvyard compare``: what people see, and what they see when something is wrong."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.report.support import reported

from kvyard.replay.report.files import write_report

run = partial(exit_code, "compare")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    write_report(reported(policy="round-robin", limit=100), paths[0])
    write_report(reported(policy="kv", limit=100), paths[1])
    return paths


def test_a_table(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files) == 0
    out = capsys.readouterr().out
    assert "round-robin" in out and "kv" in out and "TTFT mean" in out and "Reused in all" in out
    assert "router.policy: round-robin | kv" in out
    assert "\x1b" not in out


def test_json(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["runs"] == ["round-robin", "kv"] and value["notes"] == []
    mean = next(line for line in value["lines"] if line["key"] == "ttft.mean")
    assert mean["values"] == [reported(policy=name, limit=100).latency["ttft"].mean for name in value["runs"]]


def test_an_slo_of_all_runs(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs are judged by limits given here, though their reports have none of them."""
    worse, better = (reported(policy=name, limit=100).latency["ttft"].mean for name in ("round-robin", "kv"))
    assert worse > better
    assert run(*files, "--slo", f"ttft_mean<{(worse + better) / 2}") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "SLO met by kv; SLO NOT met by round-robin" in out and "round-robin misses the SLO: TTFT mean is" in out
    assert run(*files, "--slo", "session<5m") == 2
    assert "of which requests? Write session_p99=5m" in " ".join(capsys.readouterr().err.split())


def test_a_page(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files, "--html", tmp_path / "c.html") == 0
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    assert "c.html" in capsys.readouterr().err


def test_refusals(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"kind": "kvyard report", "version": 0}')
    for argv, words in (
        ([files[0]], "two reports or more"),
        ([files[0], tmp_path / "no.json"], "can't read"),
        ([files[0], bad], "version 0, and this kvyard reads version 1"),
        ([*files, "--html", tmp_path / "no" / "c.html"], "can't write"),
        ([*files * 5, "--html", tmp_path / "c.html"], "at most 8 runs side by side, not 10"),
    ):
        assert run(*argv) == 2
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
    assert run() == 2
