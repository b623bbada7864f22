"""``kvyard tune`` from the command line."""

from __future__ import annotations

import builtins
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.support import exit_code
from tests.cli.test_app import modules_loaded_by
from tests.replay.traces.support import CONVERSATION, ROOT
from tests.waiting import eventually

SMALL = ["--limit", 60, "--block-size", 512, "--num-gpu-blocks", 512, "--trials", 4]


run = partial(exit_code, "tune")


def test_an_answer_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [CONVERSATION, *SMALL, "--search", "router=kv|round-robin,workers=2..5", "--slo", "ttft_p99<5s"]
    assert run(*argv, "--price-card", "1.5") == 0
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert "Min cost with ttft_p99 ≤ 5 s" in said and "it is the cheapest" in said
    assert "On the test part (22 requests" in said
    folder = tmp_path / "tune-mooncake_conversation"
    assert f"written: {folder.name}/tune.toml" in err
    names = {"points", "study.journal", "tune.csv", "tune.html", "tune.json", "tune.toml"}
    assert {path.name for path in folder.iterdir()} == names
    assert "card = 1.5" in (folder / "tune.toml").read_text()
    assert run(*argv, "--price-card", "1.5", "-q") == 0
    assert capsys.readouterr() == ("", "")
    assert run(*argv, "--price-card", "1.5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["met"] is True
    assert run(CONVERSATION, "--config", folder / "tune.toml", *SMALL[:2], "--search", "overlap_credit=0..2", "--goal",
               "min ttft_mean", "--trials", 2, "-o", "again") == 0  # fmt: skip
    assert "card = 1.5" in (tmp_path / "again" / "tune.toml").read_text()


def test_no_point_meets_the_slo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [CONVERSATION, *SMALL, "--search", "workers=2..3", "--slo", "ttft_p99=1", "-o", tmp_path / "x"]
    assert run(*argv) == 1
    assert "No point of 2 meets the SLO (ttft_p99 ≤ 1 ms). The closest is workers 3" in " ".join(
        capsys.readouterr().out.split()
    )
    assert run(*argv, "-q") == 1
    assert capsys.readouterr().err.startswith("No point of 2 meets the SLO")


def test_no_point_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [CONVERSATION, "--limit", 20, "--num-gpu-blocks", 1, "--trials", 2, "--search", "workers=1..2"]
    assert run(*argv, "-o", tmp_path / "x") == 1
    err = capsys.readouterr().err
    assert (
        "No point could be replayed. The first because none of the" in err
        and not (tmp_path / "x" / "tune.toml").exists()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to search, as in --search"),
        (["--search", "workers=2..3", "--goal", "max cost"], "did you mean 'min cost'?"),
        (["--search", "workers=2..3", "--slo", "ttft=500"], "of which requests? Write ttft_p99=500"),
        (["--search", "workers"], "--search 'workers' can't be read"),
        (["--search", "workers=2..3", "--workers", "4"], "workers is both set and searched"),
        (["--search", "workers=2..3", "--jobs", "0"], "--jobs 0: at least 1"),
        (["--search", "workers=2..3", "--test", "1"], "--test 1: the share"),
        (["--search", "workers=2..3", "--price-card", "-1"], "price_card is -1.0: a price is a number of at least 0"),
        (["--search", "workers=2..3", "--router", "best"], "unknown routing policy 'best'"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "x"
    assert run(CONVERSATION, "--limit", 60, *arguments, "-o", folder) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert words in err and "Traceback" not in err and not folder.exists()


def test_without_optuna_it_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run(CONVERSATION, *SMALL, "--search", "workers=2..3", "-o", tmp_path / "x") == 2
    assert capsys.readouterr().err == "Error: a search needs optuna: pip install 'kvyard[search]'\n"


def test_optuna_is_imported_when_it_is_needed() -> None:
    loaded = modules_loaded_by("from kvyard.cli.app import build\nbuild().commands['tune'].load()")
    assert "kvyard.cli.tune" in loaded and not loaded & {"optuna", "ray", "sqlalchemy", "rich.table"}


def test_the_commands_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "how-to" / "tune.md").read_text()
    blocks = re.findall(r"```console\n\$ (.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert len(blocks) == 2
    for block in blocks:
        argv = shlex.split(block.replace("\\\n", " "))
        assert argv[:2] == ["kvyard", "tune"]
        argv[argv.index("--limit") + 1] = "60"
        assert run(*argv[2:], "--trials", 2, "-q") in (0, 1)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "kvyard", "tune", str(CONVERSATION), "--limit", "2000", "-o", str(tmp_path / "t")]
    argv += ["--search", "workers=4..8,host_bytes=0..64GiB", "-j", "2", "--block-size", "64"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    points = tmp_path / "t" / "points"
    eventually(lambda: len(list(points.glob("*.json"))) >= 3 or process.poll() is not None, seconds=100)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "of 60 points; the same command goes on from there" in err
    assert (tmp_path / "t" / "tune.json").is_file()
