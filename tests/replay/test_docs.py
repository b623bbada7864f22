"""The commands of two pages run, and so do the scripts in examples/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.replay.traces.support import ROOT, SAMPLES

from kvyard.cli.app import main
from kvyard.replay.settings import SETTINGS, make_config

PAGES = [ROOT / "docs" / "start" / "replay.md", ROOT / "docs" / "how-to" / "size-a-host-tier.md"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the paths of the pages lead somewhere."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "trace.jsonl").write_text((SAMPLES / "mooncake_synthetic.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands(page: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text()
    for file in re.findall(r"```toml\n# (.*?)\n", text):
        (here / file).write_text(re.findall(rf"```toml\n# {file}\n(.*?)```", text, re.DOTALL)[0])
    commands = [
        line
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)
    ]
    assert len(commands) >= 2
    for command in commands:
        argv = shlex.split(command)
        assert argv.pop(0) == "kvyard"
        if "--limit" in argv:
            argv[argv.index("--limit") + 1] = "8"
        else:
            argv += ["--limit", "8"]
        if argv[0] == "sweep":
            argv += ["-j", "1"]
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        # Of eight requests a sweep may find no point that meets its SLO, which ends with 1.
        assert exit_.value.code in ({0, 1} if "--slo" in argv else {0}), (command, capsys.readouterr().err)
    assert "TTFT" in capsys.readouterr().out or page.stem == "replay"


def test_the_fleet_of_the_page(here: Path) -> None:
    text = re.findall(r"```toml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)[0]
    (here / "f.toml").write_text(text.replace("# fail", "fail"))
    config = make_config(SETTINGS.read(here / "f.toml"))
    assert [(kind.name, kind.count) for kind in config.workers] == [("large", 4), ("small", 4), ("spare", 1)]
    assert config.workers[2].fail == 45 * 60 * 10**9


@pytest.mark.timeout(400)
def test_the_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--limit", "60", "--out", tmp_path / "demo", "--jobs", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the first 60 of its 12,031 requests" in done.stdout and "Routing by cache" in done.stdout
    assert not done.stderr
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"comparison.html", "round-robin.html", "kv.html", "kv-host.html", "kv-host.json"} <= names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_study(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "host_tier_study.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "has 80 % of the gain" in done.stdout
    assert (tmp_path / "build" / "host-tier-study" / "sweep.html").is_file()
