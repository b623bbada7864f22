"""Which tests reach a place in the source, and how long each takes: seen in one run of the whole suite.

`mutate.py` asks, so that a mutant is tried against the tests that run its line, and against no other. A copy of the tree gets a
call before each statement in question, which notes the test that is running. Processes that a test starts inherit its name.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NOTE = '''"""Notes which test reaches a place: put here by scripts/reach.py."""
import os

seen: set[tuple[int, str]] = set()
file = os.open({notes!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def hit(place: int) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (place, test) not in seen:
        seen.add((place, test))
        os.write(file, f"{{place}}\\t{{test}}\\n".encode())
'''
DURATION = re.compile(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*)$")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)")
Place = tuple[str, int]
"""A path and a line."""


@dataclass(frozen=True)
class Reach:
    tests: dict[Place, dict[str, float]]
    """Of each place the tests that run it, with the seconds each takes. A place that only imports run has none."""

    @classmethod
    def read(cls, file: Path) -> Reach:
        kept = json.loads(file.read_text())
        return cls({(path, line): tests for path, line, tests in kept})

    def write(self, file: Path) -> None:
        file.write_text(json.dumps([[path, line, tests] for (path, line), tests in self.tests.items()]))


def instrument(source: str, lines: dict[int, int]) -> str:
    """The source with a call before the statement at each line, which is numbered. What only imports run is left out."""
    tree = ast.parse(source)
    inserted: list[tuple[list[ast.stmt], ast.stmt, int]] = []
    for line, number in lines.items():
        innermost: tuple[list[ast.stmt], ast.stmt] | None = None
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not _holds(node.body, line):
                continue
            for inner in ast.walk(node):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(inner, name, None)
                    if isinstance(block, list):
                        for statement in block:
                            if _spans(statement, line):
                                innermost = _closer(innermost, (block, statement))
        if innermost is not None:
            inserted.append((*innermost, number))
    for block, statement, number in inserted:
        call = ast.parse(f"__import__('kvyard._reach', fromlist=['hit']).hit({number})").body[0]
        block.insert(next(index for index, other in enumerate(block) if other is statement), call)
    return ast.unparse(ast.fix_missing_locations(tree))


def _holds(block: list[ast.stmt], line: int) -> bool:
    return any(_spans(statement, line) for statement in block)


def _spans(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _closer(
    known: tuple[list[ast.stmt], ast.stmt] | None, other: tuple[list[ast.stmt], ast.stmt]
) -> tuple[list[ast.stmt], ast.stmt]:
    if known is None:
        return other
    extent = [(node.end_lineno or node.lineno) - node.lineno for node in (known[1], other[1])]
    return other if extent[1] <= extent[0] else known


def survey(tree: Path, places: Iterable[Place]) -> Reach:
    """Run the whole suite in ``tree``, a copy that is changed for it, and tell which tests reach each place."""
    numbered = dict(enumerate(sorted(set(places))))
    by_path: dict[str, dict[int, int]] = defaultdict(dict)
    for number, (path, line) in numbered.items():
        by_path[path][line] = number
    for path, lines in by_path.items():
        target = tree / path
        target.write_text(instrument(target.read_text(), lines))
    notes, log = tree.parent / "notes.tsv", tree.parent / "suite.log"
    notes.unlink(missing_ok=True)
    (tree / "src" / "kvyard" / "_reach.py").write_text(NOTE.format(notes=str(notes)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:schemathesis",
    ]
    command += ["-vv", "--durations=0", "--durations-min=0", "--tb=no"]
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "CI": "true"}
    with log.open("w") as out:
        subprocess.run(command, cwd=tree, env=env, stdout=out, stderr=subprocess.STDOUT, check=False)
    return _read(numbered, notes.read_text(), log.read_text())


def _read(numbered: dict[int, Place], notes: str, log: str) -> Reach:
    seconds: dict[str, float] = defaultdict(float)
    failed: set[str] = set()
    for line in log.splitlines():
        if match := DURATION.match(line):
            seconds[_function(match[2])] += float(match[1])
        elif match := FAILED.match(line):
            failed.add(_function(match[1]))
    of_file: dict[str, set[str]] = defaultdict(set)
    for test in seconds:
        of_file[test.split("::")[0]].add(test)
    tests: dict[Place, dict[str, float]] = {place: {} for place in numbered.values()}
    for line in notes.splitlines():
        number, _, current = line.partition("\t")
        name, _, phase = current.rpartition(" ")
        if not name:
            continue
        # What a fixture runs is looked at by any test of its file.
        at = _function(name)
        reached = {at} if phase == "(call)" else of_file[at.split("::")[0]] | {at}
        for test in reached - failed:
            tests[numbered[int(number)]][test] = round(seconds[test], 3)
    return Reach(tests)


def _function(test: str) -> str:
    """A test without its parameters, whose texts may not be what a command line takes."""
    return test.partition("[")[0].strip()
