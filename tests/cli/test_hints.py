"""``kvyard hints`` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.traces.support import CONVERSATION


def test_tables_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = [
        "hints",
        CONVERSATION,
        "--limit",
        30,
        "--workers",
        2,
        "--recalls",
        "0.5,1",
        "--falses",
        "0",
        "--seeds",
        "0",
        "-j",
        1,
    ]
    assert exit_code(*base) == 0
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert "session-end" in said and "beside no hints: Reused in all" in said and "TTFT mean" in said
    folder = tmp_path / "hints-mooncake_conversation"
    assert f"written: {folder.name}/hints.html" in err
    assert sorted(path.name for path in folder.iterdir()) == ["hints.csv", "hints.html", "hints.json", "points"]
    assert exit_code(*base, "-q") == 0
    assert capsys.readouterr() == ("", "")
    assert exit_code(*base, "--no-timing", "-o", "quick") == 0
    out, err = capsys.readouterr()
    assert "longest match, no time" in out
    *_, last = [line for line in err.splitlines() if line.endswith("replayed")]
    done, every = (int(word) for word in last.split() if word.isdigit())
    assert done == every > 1
    assert sorted(path.name for path in (tmp_path / "quick").iterdir()) == ["hints.csv", "hints.html", "hints.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hint", "ttl"], "for how long"),
        (["--hint", "ttl:seconds=5", "--no-timing"], "needs a clock"),
        (["--recalls", "x"], "--recalls"),
        (["--seeds", "-1"], "a seed is a whole number"),
        (["--set", "eviction=nope"], "eviction"),
    ],
)
def test_senseless_options_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("hints", CONVERSATION, "-o", tmp_path / "x", *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_trace_with_hints_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hinted.jsonl"
    assert (
        exit_code("trace", "hint", CONVERSATION, out, "--limit", 500, "--hints", "session-end:recall=0.5", "--seed", 3)
        == 0
    )
    assert "hints are read by kvyard only" in capsys.readouterr().err
    assert exit_code("trace", "info", out, "--limit", 500, "--capacity", 1000) == 0
    assert "of session end" in capsys.readouterr().out
    assert exit_code("trace", "hint", CONVERSATION, tmp_path / "b.jsonl", "--limit", 5, "--hints", "nothing") == 2
    assert "choose session-end or ttl" in capsys.readouterr().err
