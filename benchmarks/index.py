"""Our index against Dynamo's, on the same workload, alternating, in CPU time of all threads.

Both sides get ready request keys, so neither hashes nor decodes. Ours goes the whole way of an event: sequencer, catalog,
dedup and rows. The peer is ``dynamo.llm.RadixTree``, as in ../shared/peers/dynamo_index.py, whose workload both sides use;
its Python is found by KVYARD_DYNAMO_PYTHON (CONTRIBUTING.md says how to make one). Lookups must find the same: best match
and number of workers are compared before any time is.

Then what only our side can show: scoring from raw tokens against hashing them alone, and what clearing one worker costs.

    python benchmarks/index.py [--repeats 3] [--workers 64] [--blocks 10000] [--queries 500]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent.parent / "shared" / "peers"
DYNAMO = os.environ.get("KVYARD_DYNAMO_PYTHON", "/opt/peers/venv-dynamo/bin/python")


def one(side: str, work: dict[str, Any]) -> dict[str, Any]:
    python, script = (DYNAMO, "_index_dynamo.py") if side == "dynamo" else (sys.executable, "_index_kvyard.py")
    done = subprocess.run(
        [python, script, str(PEERS), json.dumps(work)], cwd=HERE, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=10_000, help="per worker")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--skip-tokens", action="store_true", help="leave out scoring from raw tokens")
    args = parser.parse_args()
    if not (PEERS / "dynamo_index.py").exists():
        sys.exit(f"the workload is that of {PEERS / 'dynamo_index.py'}, which isn't there")
    work = {"workers": args.workers, "blocks": args.blocks, "queries": args.queries, "tokens": False}
    sides = ["kvyard", "dynamo"] if Path(DYNAMO).exists() else ["kvyard"]
    if len(sides) == 1:
        print(f"no Dynamo at {DYNAMO}: our side only")
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side in sides:
            found[side].append(one(side, work))
    if len(sides) > 1:
        compare(found["kvyard"][0], found["dynamo"][0])
    print(f"{args.workers} workers of {args.blocks} blocks, medians of {args.repeats}, CPU time")
    print(f"{'figure':34} {'kvyard':>12} {'Dynamo':>12} {'ratio':>7}  spread of ratio")
    names = [name for name in found["kvyard"][0] if name.endswith(("_us", "_ns", "_bytes"))]
    for name in names:
        report(name, *([row.get(name) for row in found[side]] for side in sides))
    if not args.skip_tokens:
        for row in one("kvyard", {**work, "tokens": True})["scoring"]:
            print(
                f"{row['tokens']:>7} tokens, {row['workers']:>2} workers, blocks of {row['block']:>2}: "
                f"{row['score_ms']:7.2f} ms, hashing alone {row['hash_ms']:7.2f} ms, ratio {row['ratio']:.2f}"
            )


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Both sides must find the same before their times mean anything."""
    for name, value in ours["found"].items():
        if theirs["found"][name] != value:
            sys.exit(f"the sides differ on {name}: {value} and {theirs['found'][name]}")


def report(name: str, ours: list[Any], theirs: list[Any] | None = None) -> None:
    mine = statistics.median(ours)
    if theirs is None or theirs[0] is None:
        print(f"{name:34} {mine:12,.1f}")
        return
    other = statistics.median(theirs)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    print(f"{name:34} {mine:12,.1f} {other:12,.1f} {other / mine:6.1f}x  {min(ratios):.1f}-{max(ratios):.1f}")


if __name__ == "__main__":
    main()
