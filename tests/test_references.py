"""Docs, comments and docstrings name only modules and files that exist."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs"]
SOURCES = ["src", "tests", "scripts", "benchmarks", "examples"]
ELSEWHERE = {
    "_torch/pyexecutor/scheduler/scheduler.py",
    "benchmarks/multi-round-qa/multi-round-qa.py",
    "loadgen/load_generator.py",
    "loadgen_config.py",
    "vllm/benchmarks/serve.py",
}
"""Files of other projects."""
FILE = re.compile(r"(?<![\w/.~<>{}*-])((?:[\w-]+/)*[\w-]+\.py)(?![\w/*{])")
STATEMENT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
"""Tokens before one that begins a statement."""
MODULE = re.compile(r"``?(kvyard(?:\.[a-z_][a-z_0-9]*)+)(?:\.[A-Z]\w*)?(?:\(\))?``?")


@cache
def files() -> frozenset[str]:
    """Every Python file of the tree, and every end of its path that begins with a name."""
    found = (path.relative_to(ROOT) for name in (*SOURCES, "docs", "deploy") for path in (ROOT / name).rglob("*.py"))
    ends = {"/".join(path.parts[start:]) for path in found for start in range(len(path.parts))}
    return frozenset(ends | {path.name for path in ROOT.glob("*.py")})


@cache
def is_known(module: str) -> bool:
    """True for a module, something in one, or a group of entry points."""
    parts = module.split(".")
    for count in range(len(parts), 1, -1):
        path = ROOT.joinpath("src", *parts[:count])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_dir() or file.exists():
            return count == len(parts) or (file.exists() and all(part in file.read_text() for part in parts[count:]))
    text = (ROOT / "src" / "kvyard" / "__init__.py").read_text()
    return parts[1] in text or any(f'"{module}"' in path.read_text() for path in (ROOT / "src").rglob("*.py"))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page; comments and docstrings of a source."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.split("\n"), 1)
        return
    before, depth = tokenize.NEWLINE, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and not depth and before in STATEMENT:
            yield from enumerate(token.string.split("\n"), token.start[0])
        depth += (
            (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}")) if token.type == tokenize.OP else 0
        )
        before = token.type


def stale(path: Path) -> Iterator[str]:
    for number, line in prose(path):
        for name in FILE.findall(line):
            if name not in files() and not name.startswith(("build/", "test_MODULE")) and name not in ELSEWHERE:
                yield f"{path.relative_to(ROOT)}:{number}: there is no {name}"
        for name in MODULE.findall(line):
            if not is_known(name):
                yield f"{path.relative_to(ROOT)}:{number}: there is no {name}"


@pytest.mark.parametrize("folder", [*PAGES, *SOURCES])
def test_every_module_and_file_that_is_named_exists(folder: str) -> None:
    top = ROOT / folder
    paths = [top] if top.is_file() else [*top.rglob("*.py"), *top.rglob("*.md")]
    assert paths
    wrong = [line for path in sorted(paths) for line in stale(path)]
    assert not wrong, "\n".join(wrong)
