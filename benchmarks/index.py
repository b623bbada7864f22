"""Our index against Dynamo's, on the same workload, alternating, in CPU time of all threads.

Both sides go through the same steps in turns, some milliseconds each, so that a busy machine is as busy for one as for the
other; ratios are taken step by step. Both get ready request keys, so neither hashes nor decodes. Ours goes the whole way of
an event: sequencer, catalog, dedup and rows. The peer is ``dynamo.llm.RadixTree``, as in ``peers/dynamo_index.py``, whose
workload both sides use (``make peers`` makes its environment). Lookups must find the same on both sides: best match and
number of workers are compared.

Then what only our side can show: scoring from raw tokens against hashing them alone, and what clearing one worker costs.
Ours is what a plain install gives (see ``_plain.py``); ``--source`` measures the uncompiled checkout.

    python benchmarks/index.py [--repeats 5] [--workers 64] [--blocks 10000] [--queries 500] [--source]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _peers import SCRIPTS, peer_python
from _plain import plain_environment

HERE = Path(__file__).resolve().parent
ENVIRONMENT: dict[str, str] = {}
"""Of our side's processes."""


class Side:
    """One side's process, which does a step whenever it is asked to. The peer's has a ``python`` of its own."""

    def __init__(self, python: str | None, work: dict[str, Any]) -> None:
        self.name = script = "_index_dynamo.py" if python else "_index_kvyard.py"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [python or sys.executable, script, str(SCRIPTS), json.dumps(work)],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=None if python else ENVIRONMENT,
        )

    def step(self) -> list[Any] | None:
        """What the next step gave; ``None`` after the last. Exits, saying why, where the process died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            step: list[Any] | None = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            self._process.wait()
            self._errors.seek(0)
            sys.exit(f"{self.name} failed:\n{self._errors.read()[-2000:]}")
        return step


def alternate(pythons: list[str | None], work: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Run the sides step by step, in turns; every figure with its value on each side."""
    sides = [Side(python, work) for python in pythons]
    while True:
        steps = [side.step() for side in sides]
        if any(step is None for step in steps):
            return
        figures = {step[0] for step in steps if step is not None}
        assert len(figures) == 1, f"the sides are out of step: {figures}"
        figure = figures.pop()
        if figure is not None:
            yield figure, [step[1] for step in steps if step is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=64, help="at least 25")
    parser.add_argument("--blocks", type=int, default=10_000, help="per worker")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--skip-tokens", action="store_true", help="leave out scoring from raw tokens")
    parser.add_argument("--source", action="store_true", help="measure the uncompiled checkout, not a plain install")
    args = parser.parse_args()
    ENVIRONMENT.update(plain_environment(args.source))
    if args.workers < 25:
        sys.exit("24 workers evict and one more is cleared: use at least 25")
    work = {"workers": args.workers, "blocks": args.blocks, "queries": args.queries, "tokens": False}
    peer = peer_python("dynamo")
    sides = [None, peer] if peer else [None]
    figures: dict[str, list[list[Any]]] = {}
    for _ in range(args.repeats):
        for figure, values in alternate(sides, work):
            if figure.startswith("found"):
                # Both sides must find the same before their times mean anything.
                if len({json.dumps(value) for value in values}) > 1:
                    sys.exit(f"the sides differ on what they {figure}: {values}")
            else:
                figures.setdefault(figure, []).append(values)
    print(f"{args.workers} workers of {args.blocks} blocks, CPU time, {args.repeats} runs in turns")
    print(f"{'median of':32} {'times':>5} {'kvyard':>10} {'Dynamo':>10} {'ratio':>7}  middle half, all")
    for figure, taken in figures.items():
        report(figure, taken)
    if not args.skip_tokens:
        tokens()


def report(figure: str, taken: list[list[float]]) -> None:
    medians = [statistics.median(values) for values in zip(*taken, strict=True)]
    line = f"{figure:32} {len(taken):5}" + "".join(f" {value:10,.1f}" for value in medians)
    if len(medians) > 1:
        ratios = sorted(theirs / ours for ours, theirs in taken)
        low, high = (ratios[len(ratios) * part // 4] for part in (1, 3))
        line += f" {statistics.median(ratios):6.1f}x  {low:.1f}-{high:.1f}, {ratios[0]:.1f}-{ratios[-1]:.1f}"
    print(line)


def tokens() -> None:
    """What only our side can show, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "_index_kvyard.py", str(SCRIPTS), json.dumps({"tokens": True})],
        cwd=HERE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    result = json.loads(done.stdout)
    print(f"naming the 2048 blocks of a prompt of 32768 tokens: {result['chaining_us']:,.0f} us")
    for row in result["scoring"]:
        print(
            f"{row['tokens']:>7} tokens, {row['workers']:>2} workers, blocks of {row['block']:>2}: "
            f"{row['score_ms']:7.2f} ms, hashing alone {row['hash_ms']:7.2f} ms, ratio {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
