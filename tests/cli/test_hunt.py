"""``kvyard hunt`` without an engine: what it says when a search ends, is refused, or isn't one."""

from __future__ import annotations

import json
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from kvyard.cli.app import main

Hunt = Callable[[str], tuple[object, str]]
FOUND = {"finding": {"kind": "stuck", "detail": "nothing runs"}, "script": "01-stuck.py"}


def python_that_says(folder: Path, line: object, code: int = 0) -> str:
    """A program that prints a line, in the place of an engine's Python."""
    path = folder / "python"
    path.write_text(
        f"#!/bin/sh\ncat <<'END'\n{line if isinstance(line, str) else json.dumps(line)}\nEND\nexit {code}\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def hunt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Hunt:
    def run(python: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["hunt", "--python", python, "--out", str(tmp_path / "hunt"), "--seconds", "1"])
        said = capsys.readouterr()
        return exit_.value.code, " ".join((said.out + said.err).split())

    return run


def test_findings_are_listed_and_exit_with_1(hunt: Hunt, tmp_path: Path) -> None:
    result = {"engine": "vllm 1.2", "seed": 0, "tried": 7, "findings": [FOUND]}
    code, said = hunt(python_that_says(tmp_path, {"result": result}, 1))
    assert code == 1
    assert "vllm 1.2, seed 0: 7 cases, 1 findings" in said
    assert "01-stuck.py: stuck: nothing runs" in said


def test_a_refusal_is_a_sentence(hunt: Hunt, tmp_path: Path) -> None:
    code, said = hunt(python_that_says(tmp_path, {"refused": "vLLM can't be imported by x"}, 2))
    assert code == 2
    assert "vLLM can't be imported by x: name one that has it with --python" in said


def test_a_program_that_is_no_python_is_a_sentence(hunt: Hunt, tmp_path: Path) -> None:
    code, said = hunt(python_that_says(tmp_path, "hello", 3))
    assert code == 2
    assert "the search ended with exit code 3" in said


def test_a_python_without_our_dependencies_is_a_sentence(hunt: Hunt, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    code, said = hunt(str(tmp_path / "bare" / "bin" / "python"))
    assert code == 2
    assert "exit code 1: ModuleNotFoundError: No module named 'msgspec'; install kvyard's dependencies where" in said


def test_a_file_as_folder_is_refused(hunt: Hunt, tmp_path: Path) -> None:
    (tmp_path / "hunt").write_text("mine")
    code, said = hunt(python_that_says(tmp_path, "hello"))
    assert code == 2
    assert "is a file" in said
    assert (tmp_path / "hunt").read_text() == "mine"
