#!/usr/bin/env python3
"""Feed kvyard's readers with bytes that reach code which none before reached, and note what breaks.

    make fuzz                                 all targets, alternating, a minute in all
    make fuzz SECONDS=7200                    for two hours
    make fuzz SECONDS=600 ARGS='trace body'   these targets
    make fuzz SECONDS=600 ARGS='--jobs 8'     eight targets at a time
    scripts/fuzz.py --coverage                lines that the inputs found so far run, per target

Targets and kept inputs are in ``tests/fuzz``. Inputs that reach something new are gathered in ``build/fuzz/<target>/found``,
what breaks a target in ``build/fuzz/<target>/broken``, once per place, with the traceback beside it: copy such an input to
``tests/fuzz/corpus/<target>``, mend what it shows, and the default tests hold it from then on. ``build/fuzz/runs.jsonl`` has a
line per turn, ``build/fuzz/summary.txt`` all turns so far. A target whose turn reached nothing new sits out a round, then two,
four and eight, as long as that stays so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "fuzz"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
SLOW = 2.0
"""Seconds of CPU that one input may take, of 16 KiB at most."""
LONGEST = 16 << 10
SHORTER = {"continuation": 160, "logs": 6 << 10}
"""Targets that look at no more of an input, or do much for each byte."""
MOST_ROUNDS = 8
"""Rounds that a target sits out at most."""
MEMORY = 2048
"""MiB that a process may hold."""
TURN = 100.0
"""Seconds of CPU of a target's turn at most: where others want the machine, it may take long to get them."""


def fuzz_one(name: str, seconds: float, cpu_s: float) -> None:
    """Fuzz one target in this process, which ends with it: when either is spent."""
    began = time.monotonic()
    import atheris

    with atheris.instrument_imports(include=["kvyard"]):
        from tests.fuzz.mutating import mutate
        from tests.fuzz.targets import LATER, TARGETS

        if name in LATER:
            importlib.import_module(LATER[name])
    target = TARGETS[name]
    broken = KEPT / name / "broken"
    broken.mkdir(parents=True, exist_ok=True)
    known = {path.name for path in broken.glob("*.bin")}

    def note(data: bytes, where: str, text: str) -> None:
        file = re.sub(r"[^A-Za-z0-9_.-]+", "_", where)[:120] + ".bin"
        if file not in known:
            known.add(file)
            (broken / file).write_bytes(data)
            (broken / file).with_suffix(".txt").write_text(text)
            print(f"BROKEN {name}: {where}", flush=True)

    end = time.process_time() + cpu_s

    def once(data: bytes) -> None:
        began = time.process_time()
        try:
            target(data)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            frame = next((entry for entry in reversed(frames) if "kvyard" in entry.filename), frames[-1])
            where = f"{type(error).__name__}-{Path(frame.filename).stem}-{frame.name}-{frame.lineno}"
            note(data, where, "".join(traceback.format_exception(error)))
        ended = time.process_time()
        if ended - began > SLOW:
            note(data, "slow", f"{ended - began:.1f} s of CPU for {len(data)} bytes")
        if ended > end:
            os.kill(os.getpid(), signal.SIGUSR1)  # libFuzzer ends and says what it did

    inputs = KEPT / name / "found"
    inputs.mkdir(parents=True, exist_ok=True)
    folders = [str(inputs), *(str(path) for path in [CORPUS / name] if path.is_dir())]
    options = [
        f"-max_total_time={max(1, round(seconds - (time.monotonic() - began)))}",
        f"-max_len={SHORTER.get(name, LONGEST)}",
        f"-rss_limit_mb={MEMORY}",
        "-timeout=1200",  # by the clock, and the machine may be stopped; SLOW goes by CPU
    ]
    options += [f"-artifact_prefix={broken}/", "-print_final_stats=1", "-use_value_profile=1"]

    def other(data: bytes, most: int, seed: int) -> bytes:
        return mutate(data, most, seed) or atheris.Mutate(data, most)

    atheris.Setup([sys.argv[0], *options, *folders], once, custom_mutator=other)
    atheris.Fuzz()


def turn(name: str, seconds: float, cpu_s: float) -> dict[str, Any]:
    """Fuzz one target in a process of its own, and tell what came of it."""
    command = [sys.executable, str(Path(__file__)), "--one", name, "--seconds", str(seconds), "--cpu", str(cpu_s)]
    log = KEPT / name / "last.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(errors="replace")
    for line in output.splitlines():
        if line.startswith("BROKEN"):
            print(line, flush=True)
    executions = re.findall(r"number_of_executed_units: (\d+)", output) or re.findall(r"#(\d+)\s", output)
    covered = re.findall(r"cov: (\d+)", output)
    return {
        "target": name,
        "executions": int(executions[-1]) if executions else 0,
        "edges": int(covered[-1]) if covered else 0,
        "inputs": len(list((KEPT / name / "found").glob("*"))),
        "broken": len(list((KEPT / name / "broken").glob("*.bin"))),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "exit": process.returncode,
    }


def lines_of(code: CodeType) -> set[int]:
    own = {line for *_, line in code.co_lines() if line is not None and line > code.co_firstlineno}
    return own.union(*(lines_of(one) for one in code.co_consts if isinstance(one, CodeType)))


def coverage(names: list[str]) -> None:
    """Print of each target how many lines of the functions' files it runs, of those whose functions it enters at all."""
    from tests.fuzz.targets import TARGETS

    for name in names:
        hit: dict[str, set[int]] = defaultdict(set)

        def local(frame: FrameType, event: str, _: object, hit: dict[str, set[int]] = hit) -> Any:
            hit[frame.f_code.co_filename].add(frame.f_lineno)
            return local

        def entered(frame: FrameType, event: str, _: object, local: Any = local) -> Any:
            return local if "/kvyard/" in frame.f_code.co_filename else None

        inputs = [
            path for folder in (KEPT / name / "found", CORPUS / name) if folder.is_dir() for path in folder.iterdir()
        ]
        sys.settrace(entered)
        try:
            for path in inputs:
                try:
                    TARGETS[name](path.read_bytes())
                except Exception as error:
                    print(f"  {path}: {type(error).__name__}")
        finally:
            sys.settrace(None)
        print(f"{name}: {len(inputs)} inputs")
        for file, lines in sorted(hit.items()):
            bodies = set[int]()
            whole = compile(Path(file).read_text(), file, "exec")
            for function in _functions(whole):
                bodies |= lines_of(function)
            if bodies:
                print(
                    f"    {len(lines & bodies) / len(bodies):4.0%} of {len(bodies):4} lines  {file.split('/kvyard/')[-1]}"
                )


def _functions(code: CodeType) -> list[CodeType]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [one for one in inner if one.co_flags & 2] + [
        deep for one in inner if not one.co_flags & 2 for deep in _functions(one)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("targets", nargs="*", help="some of those in tests/fuzz/targets.py (all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (60)")
    parser.add_argument(
        "--cpu", type=float, default=float("inf"), help="end earlier, when it took so many seconds of CPU"
    )
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time (1)")
    parser.add_argument("--coverage", action="store_true", help="show what is reached")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    if asked.one:
        fuzz_one(asked.one, asked.seconds, asked.cpu)
        return 0
    names = asked.targets or sorted(
        re.findall(r"^def ([a-z]+)\(data: bytes\)", (ROOT / "tests/fuzz/targets.py").read_text(), re.M)
    )
    if asked.coverage:
        coverage(names)
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    KEPT.mkdir(parents=True, exist_ok=True)
    rounds = {name: Rounds() for name in names}
    each = min(TURN, asked.seconds * asked.jobs / len(names))
    fuzz_all(rounds, min(asked.jobs, len(names)), time.monotonic() + asked.seconds, each, asked.cpu)
    return 1 if any(target.broken for target in rounds.values()) else 0


def fuzz_all(rounds: dict[str, Rounds], jobs: int, end: float, turn_s: float, cpu_s: float) -> None:
    """Give targets turns until the time ``end`` or until all took ``cpu_s`` seconds, ``jobs`` of them at a time."""
    running = set[str]()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if time.monotonic() >= end - 1 or sum(target.cpu_s for target in rounds.values()) >= cpu_s:
                    return
                name = min(
                    (target for target in rounds if target not in running), key=lambda target: rounds[target].due
                )
                running.add(name)
                (KEPT / name).mkdir(exist_ok=True)
            result = turn(name, end - time.monotonic(), turn_s)
            with lock:
                running.remove(name)
                rounds[name].took(result)
                with (KEPT / "runs.jsonl").open("a") as runs:
                    runs.write(json.dumps(result) + "\n")
                print(rounds[name].line(name), flush=True)
                (KEPT / "summary.txt").write_text(summary(rounds))

    workers = [threading.Thread(target=work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class Rounds:
    """What came of one target's turns so far, and when it has the next."""

    def __init__(self) -> None:
        self.turns = self.executions = self.edges = self.inputs = self.broken = 0
        self.cpu_s = 0.0
        self.due = 0
        """The round of its next turn."""
        self._sat_out = 0

    def took(self, result: dict[str, Any]) -> None:
        """Count a turn."""
        gained = result["edges"] > self.edges
        self.turns += 1
        self.executions += result["executions"]
        self.cpu_s += result["cpu_s"]
        self.edges, self.inputs, self.broken = max(self.edges, result["edges"]), result["inputs"], result["broken"]
        self._sat_out = 0 if gained else min(MOST_ROUNDS, 2 * self._sat_out or 1)
        self.due += 1 + self._sat_out

    def line(self, name: str) -> str:
        """Its state in words."""
        return (
            f"{name:14} {self.turns:3} turns {self.executions:11,} executions {self.edges:6} edges {self.inputs:5} inputs "
            f"{self.broken:3} broken {self.cpu_s:8.1f} s of CPU"
        )


def summary(rounds: dict[str, Rounds]) -> str:
    """All targets, a line each, and their sum."""
    lines = [one.line(name) for name, one in rounds.items()]
    executions, cpu_s = (sum(getattr(one, what) for one in rounds.values()) for what in ("executions", "cpu_s"))
    return "\n".join([*lines, f"all: {executions:,} executions, {cpu_s:.0f} s of CPU, {time.strftime('%H:%M:%S')}", ""])


if __name__ == "__main__":
    sys.exit(main())
