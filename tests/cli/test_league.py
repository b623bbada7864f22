"""``kvyard league`` from the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.traces.support import CONVERSATION

run = partial(exit_code, "league")


def test_tables_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = [CONVERSATION, "--limit", 30, "--workers", 2, "--policies", "kv,lmetric", "-j", 1]
    assert run(*base, "--jitter", "3s", "--loads", "1,2") == 0
    out, err = capsys.readouterr()
    assert (
        sum(line.startswith("lmetric") for line in out.splitlines()) == 4
        and "2x load, ticks spread over 3s" in out
        and "reused" in out
    )
    folder = tmp_path / "league-mooncake_conversation"
    assert f"written: {folder.name}/league.html" in err
    names = ["league.csv", "league.html", "league.json", "points", "runs"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert run(*base, "-q") == 0
    assert capsys.readouterr() == ("", "")


def test_no_jitter_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--limit", 5, "--workers", 1, "--policies", "random", "-j", 1, "-o", tmp_path / "x"]
    assert run(CONVERSATION, *small, "--jitter", "0ms") == 0
    assert capsys.readouterr().out.count("1x load") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "kv,,x"], "--policies 'kv,,x': names or numbers"),
        (["--loads", "fast"], "--loads is 'fast': it must be a number"),
        (["--seeds", "-1"], "a seed is a whole number"),
        (["--router", "kv"], "say --policies instead"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
        (["--policies", "kvv"], "unknown routing policy 'kvv': did you mean kv?"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CONVERSATION, *arguments, "-o", tmp_path / "x") == 2
    assert words in " ".join(capsys.readouterr().err.split())
