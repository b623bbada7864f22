#!/usr/bin/env python3
"""Break kvyard in many small ways, one at a time, and see whether a test notices.

    make mutants                          300 of them, drawn by seed 1, two at a time; goes on where it was stopped
    scripts/mutate.py --count 50 --seed 7 --package tiers
    scripts/mutate.py --list              what would be tried, without trying it
    scripts/mutate.py --retry --tests tests/tiers/test_store.py      the survivors again, with tests that were written since
    scripts/mutate.py --guess             with tests whose files name the place; then --retry with all that reach it
    scripts/mutate.py --report            what is known so far

A mutant is one place in ``src/kvyard`` where one operator, constant, condition or statement is another. The draw takes packages
in proportion to their lines of code, and places within a package at random. The draw is kept, so that tests written afterwards
can't change it. One run of the whole suite tells which tests reach each place (``reach.py``); a mutant is tried in a copy of
the tree against those alone, nearest and quickest first. Results are kept in ``build/mutants``. Mutants that nothing can tell
from the original are argued one by one in ``tests/equivalent_mutants.toml``.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from reach import Reach, survey

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvyard"
KEPT = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"
PATIENCE = 600
"""Seconds for one stage of tests. A mutant that takes longer hangs, which a person notices."""
TEST_PATIENCE = 60
"""Seconds for one test."""
USAGE = 4
"""What pytest exits with when it can't find a test."""
FIRST_STAGE = 12.0
"""Seconds of the tests that are tried first. They kill most, and a few files are quickly collected."""
RELATED = 3
"""Files of tests that are tried by guess."""
LAST_STAGE = 120.0
"""Seconds of the tests tried at most. What hundreds of seconds of tests run for another reason hardly notices a small fault."""

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "append": "appendleft", "sorted": "list"}


KEY = ("path", "text", "line", "column", "before", "after")
ARGUED = ("path", "text", "before", "after")


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    column: int
    before: str
    after: str
    text: str
    """The whole line as it stands, by which an argued equivalent is known again when lines move."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.before} -> {self.after}"

    @property
    def argument(self) -> tuple[object, ...]:
        """What it is known by where it is argued to be equivalent."""
        return tuple(getattr(self, name) for name in ARGUED)

    @property
    def key(self) -> tuple[object, ...]:
        """What it is known by in the file of results."""
        return tuple(getattr(self, name) for name in KEY)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may be instead."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield _with(node, ops=[COMPARED[type(node.ops[0])]()])
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in COMPUTED and not _is_text(node):
        yield _with(node, op=COMPUTED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, (ast.If, ast.While)) and isinstance(node.test, (ast.Name, ast.Call, ast.Attribute)):
        yield ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        yield ast.Pass()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
        yield _with(node, func=ast.Name(SWAPPED[node.func.id]))


def places(path: Path) -> Iterator[Mutant]:
    text = path.read_text()
    lines = text.splitlines()
    for node in _alive(ast.parse(text)):
        # A condition is changed where it stands, not with all that depends on it.
        old = node.test if isinstance(node, (ast.If, ast.While)) else node
        for new in changes(node):
            if not isinstance(old, (ast.expr, ast.stmt)) or old.lineno != old.end_lineno:
                continue
            before = lines[old.lineno - 1].encode()[old.col_offset : old.end_col_offset].decode()
            # Parentheses around what stands inside an expression.
            after = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(old, ast.expr) and not isinstance(new, (ast.Constant, ast.Name, ast.Call)):
                after = f"({after})"
            where = str(path.relative_to(ROOT))
            yield Mutant(where, old.lineno, old.col_offset, before, after, lines[old.lineno - 1].strip())


def _alive(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that do something at run time: no annotations, no texts, no declarations."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.Call) and _declares(node):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log" in ast.unparse(node.value.func):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "slice" if _is_type(node) else ""}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _alive(child)


def _declares(node: ast.Call) -> bool:
    """Whether a call says what an option is and what it is for, rather than doing something."""
    return ast.unparse(node.func).split(".")[-1] in {"add_argument", "Option", "field", "setting", "NewType", "TypeVar"}


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id[:1].isupper()


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and not _number(part)) for part in parts
    )


def _number(node: ast.Constant) -> bool:
    return isinstance(node.value, (int, float))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def draw(count: int, seed: int, package: str | None) -> list[Mutant]:
    """As many mutants of each package as its share of the lines; the same for the same seed and source."""
    rng = random.Random(seed)
    by_module: dict[str, list[Mutant]] = {}
    lines: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        name = relative.parts[0] if len(relative.parts) > 1 else ""
        if package is not None and name != package:
            continue
        by_module.setdefault(name, []).extend(places(path))
        lines[name] += len(path.read_text().splitlines())
    whole = sum(lines.values())
    drawn: list[Mutant] = []
    for name in sorted(by_module):
        share = round(count * lines[name] / whole)
        drawn += rng.sample(by_module[name], min(share, len(by_module[name])))
    rng.shuffle(drawn)
    return drawn


def stages(mutant: Mutant, reached: dict[str, float]) -> Iterator[list[str]]:
    """Tests to run, of those that reach it: nearest and quickest first; a stage leaves out what an earlier one ran."""
    if not reached:  # run when its module is imported, or by no test at all
        yield from related(mutant)
        return
    relative = Path(mutant.path).relative_to("src/kvyard")

    def order(test: str) -> tuple[int, float]:
        file = Path(test.partition("::")[0]).relative_to("tests")
        if file.parent == relative.parent and file.stem.startswith(f"test_{relative.stem}"):
            return 0, reached[test]
        # A package's own tests are likelier to notice than others, but not if they are slow.
        return 1, reached[test] * (1 if file.parts[0] == relative.parts[0] else 3)

    first: list[str] = []
    last: list[str] = []
    spent = 0.0
    for test in sorted(reached, key=order):
        if spent + reached[test] > LAST_STAGE and first:
            continue
        (last if last or (first and spent + reached[test] > FIRST_STAGE) else first).append(test)
        spent += reached[test]
    yield first
    yield last


def related(mutant: Mutant) -> Iterator[list[str]]:
    """The module's own tests, and then those whose files name what the mutant lies in: a guess, without a run of the suite."""
    relative = Path(mutant.path).relative_to("src/kvyard")
    own = ROOT / "tests" / relative.parent / f"test_{relative.stem}.py"
    if own.exists():
        yield [str(own.relative_to(ROOT))]
    module = ".".join(Path(mutant.path).relative_to("src").with_suffix("").parts).removesuffix(".__init__")
    names = [module, *_enclosing(mutant)]
    scored: list[tuple[int, int, str]] = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        score = sum(weight for name, weight in zip(names, (2, 2, 3), strict=False) if re.search(rf"\b{name}\b", text))
        score += 2 * (path.parent == own.parent) + (relative.stem in path.stem)
        if path != own and score > 2 and "/real/" not in str(path):
            scored.append((-score, len(text), str(path.relative_to(ROOT))))
    yield [path for _, _, path in sorted(scored)[:RELATED]]


def _enclosing(mutant: Mutant) -> list[str]:
    """The names of the class and the function that a mutant lies in."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_text())):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("__"):
            continue
        if node.lineno <= mutant.line <= (node.end_lineno or node.lineno):
            names.append((node.lineno, node.name))
    return [name for _, name in sorted(names)]


def attempt(mutant: Mutant, tree: Path, stages: Iterable[list[str]]) -> dict[str, object]:
    """Run a mutant's tests in ``tree``, which is as it was afterwards."""
    target = tree / mutant.path
    original = target.read_text()
    lines = original.splitlines(keepends=True)
    line, column = lines[mutant.line - 1].encode(), mutant.column
    changed = line[:column] + mutant.after.encode() + line[column + len(mutant.before.encode()) :]
    lines[mutant.line - 1] = changed.decode()
    result: dict[str, object] = {**asdict(mutant), "verdict": "survived", "by": "", "seconds": 0.0}
    began = time.monotonic()
    try:
        _write(target, "".join(lines))
        for tests in stages:
            if not tests:
                continue
            verdict = _run(tests, tree)
            if verdict != "passed":
                result["verdict"], result["by"] = ("killed", verdict) if verdict != "hangs" else ("killed", "too long")
                break
    finally:
        _write(target, original)
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def _write(target: Path, text: str) -> None:
    """Change a module. What Python compiled of it goes: it is known by its second and its length only."""
    target.write_text(text)
    for old in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        old.unlink()


def _run(tests: list[str], tree: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:schemathesis",
        f"--timeout={TEST_PATIENCE}",
        *tests,
    ]
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "CI": "true"}
    with subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as child:
        try:
            out, _ = child.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return "hangs"
    if child.returncode in (0, 5):  # 5: nothing was collected
        return "passed"
    if child.returncode == USAGE and "ERROR collecting" not in out:
        raise RuntimeError(f"the tests can't be run: {out[-500:]}")
    named = [line for line in out.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return named[0].split(" - ")[0] if named else out[-200:]


def plant(number: int) -> Path:
    """A copy of the tree as it is committed, for one process to break."""
    tree = KEPT / f"tree-{number}" / "main"
    if tree.exists():
        shutil.rmtree(tree)
    tree.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tree)], check=True)
    shared, link = ROOT.parent / "shared", tree.parent / "shared"
    if shared.exists() and not link.exists():
        link.symlink_to(shared)
    return tree


def argued() -> dict[tuple[str, str, str, str], str]:
    """Why each mutant that is known to be equivalent is."""
    if not EQUIVALENT.exists():
        return {}
    listed = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {(mutant["path"], mutant["text"], mutant["before"], mutant["after"]): mutant["because"] for mutant in listed}


def report(results: list[dict[str, object]]) -> None:
    reasons = argued()
    verdicts: dict[str, Counter[str]] = {}
    left = []
    for result in results:
        key = (str(result["path"]), str(result["text"]), str(result["before"]), str(result["after"]))
        verdict = "equivalent" if result["verdict"] == "survived" and key in reasons else str(result["verdict"])
        package = Path(str(result["path"])).relative_to("src/kvyard").parts[0].removesuffix(".py")
        verdicts.setdefault(package, Counter())[verdict] += 1
        if verdict == "survived":
            left.append(result)
    for result in left:
        print(f"{result['path']}:{result['line']}: {result['before']} -> {result['after']}\n    {result['text']}")
    whole = sum(verdicts.values(), Counter())
    for package, counted in [*sorted(verdicts.items()), ("all", whole)]:
        killed, tried = counted["killed"], counted.total()
        print(
            f"{package:12} {killed:4} of {tried:4} killed, {counted['equivalent']:3} equivalent, {counted['survived']:3} left"
        )
    if tried := whole.total():
        print(f"{whole['killed'] / tried:.1%} killed, {whole['equivalent'] / tried:.1%} equivalent")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what runs is ended, and the tree is as it was
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=300, help="how many to draw (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument("--package", help="only this package of kvyard")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--minutes", type=float, help="begin no other after this time")
    parser.add_argument("--list", action="store_true", help="show what would be tried")
    parser.add_argument(
        "--guess", action="store_true", help="try tests whose files name the place, not all that reach it"
    )
    parser.add_argument("--retry", action="store_true", help="try the survivors again")
    parser.add_argument("--tests", nargs="+", default=[], help="run these first: tests that were written since")
    parser.add_argument("--report", action="store_true", help="show what is known")
    asked = parser.parse_args()
    name = f"{asked.package or 'all'}-{asked.seed}"
    drawn = kept_draw(KEPT / f"{name}.drawn.jsonl", asked)
    if asked.list:
        print(*(mutant.name for mutant in drawn), sep="\n")
        return 0
    file = KEPT / f"{name}.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    tried = {tuple(one[k] for k in KEY): one for one in known}
    of_draw = {mutant.key: mutant for mutant in drawn}
    results = {key: tried[key] for key in of_draw if key in tried}
    if asked.report:
        report(list(results.values()))
        return 0
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode:
        print("mutate: commit first: mutants are made of what is committed", file=sys.stderr)
        return 2
    if asked.retry:
        reasons = argued()
        todo = [
            mutant
            for key, mutant in of_draw.items()
            if key in results and results[key]["verdict"] != "killed" and mutant.argument not in reasons
        ]
    else:
        todo = [mutant for key, mutant in of_draw.items() if key not in results]
    now = {mutant.key: moved for mutant in todo if (moved := find(mutant)) is not None}
    if not now:
        report(list(results.values()))
        return 0
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    seen = KEPT / f"{name}.{head.stdout.strip()}.reach.json"
    if not seen.exists() and not asked.guess:
        print("mutate: the whole suite once, to see which tests reach what", flush=True)
        survey(plant(0), [(mutant.path, mutant.line) for mutant in now.values()]).write(seen)
    reach = Reach({}) if asked.guess else Reach.read(seen)
    trees = [plant(number) for number in range(asked.jobs)]
    end = time.monotonic() + asked.minutes * 60 if asked.minutes else float("inf")
    with file.open("a") as out, concurrent.futures.ThreadPoolExecutor(asked.jobs) as threads:

        def one(key: tuple[object, ...]) -> dict[str, object] | None:
            if time.monotonic() > end:
                return None
            reached = reach.tests.get((now[key].path, now[key].line), {})
            tree = trees.pop()
            try:
                order = related(now[key]) if asked.guess else stages(now[key], reached)
                return attempt(now[key], tree, chain([asked.tests], order))
            finally:
                trees.append(tree)

        try:
            for index, (key, done) in enumerate(zip(now, threads.map(one, now), strict=True)):
                if done is None:
                    break
                results[key] = done = {**done, **asdict(of_draw[key])}  # its line as drawn
                out.write(json.dumps(done) + "\n")
                out.flush()
                shown = f"{done['path']}:{done['line']} {done['before']} -> {done['after']}"
                print(
                    f"{index + 1}/{len(now)} {done['verdict']:8} {done['seconds']:6} s  {shown}  {done['by']}",
                    flush=True,
                )
        except KeyboardInterrupt:
            threads.shutdown(cancel_futures=True)
            print("mutate: stopped; the same command goes on from here", file=sys.stderr)
    report(list(results.values()))
    return 0


def kept_draw(file: Path, asked: argparse.Namespace) -> list[Mutant]:
    """The draw that was made first, or one made and kept now."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        drawn = draw(asked.count, asked.seed, asked.package)
        file.write_text("".join(json.dumps(asdict(mutant)) + "\n" for mutant in drawn))
    return [Mutant(**json.loads(line)) for line in file.read_text().splitlines()]


def find(mutant: Mutant) -> Mutant | None:
    """A mutant where its line stands now, if it stands once or where it was."""
    path = ROOT / mutant.path
    lines = path.read_text().splitlines() if path.exists() else []
    numbers = [number for number, line in enumerate(lines, 1) if line.strip() == mutant.text]
    if mutant.line in numbers:
        return mutant
    if len(numbers) != 1:
        print(f"mutate: {mutant.name}: its line is no longer there", file=sys.stderr)
        return None
    return replace(mutant, line=numbers[0])


if __name__ == "__main__":
    sys.exit(main())
