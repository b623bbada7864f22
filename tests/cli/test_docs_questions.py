"""The ten questions: each command runs (on a few requests; the slow suite runs them as they stand) and ends in an answer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvyard.cli.app import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start" / "questions.md").read_text()
ENDS = {
    "plan": "Take ",
    "replay": r"limits? this fleet",
    "sweep": r"(Take|No point|has the lowest) ",
    "league": "Take |the same mean TTFT",
    "hints": "beside no hints: Reused",
}
COMMANDS = [
    line
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in re.findall(r"^\$ kvyard (.*)$", block, re.MULTILINE)
    if line.split()[0] in ENDS and "--live" not in line
]


def test_there_are_ten() -> None:
    assert re.findall(r"^## (\d+)\. ", PAGE, re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("command", COMMANDS, ids=lambda text: text.split("-o ")[-1].split()[0])
def test_answers(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(command)
    if "--limit" in argv:
        argv[argv.index("--limit") + 1] = "6"
    else:
        argv += ["--limit", "300"]
    with pytest.raises(SystemExit) as exit_:
        main([*argv, "-j", "1"] if argv[0] != "replay" else argv)
    assert exit_.value.code == 0
    assert re.search(ENDS[argv[0]], capsys.readouterr().out)
