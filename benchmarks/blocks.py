"""Our block manager against vLLM's, on the same workload, alternating, in CPU time.

First both run with a checksum over every block table: same ids, same hits, same counts. Then they take turns, each in a fresh
process, and the medians are compared. With events both stop where event objects have been drained. ``make peers``
makes vLLM's environment; without it only our side runs. Ours is what a plain install gives (see ``_plain.py``); ``--source``
measures the uncompiled checkout.

    python benchmarks/blocks.py [--repeats 5] [--requests 4000] [--source]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _peers import VLLM_ORACLE, peer_python
from _plain import plain_environment

HERE = Path(__file__).resolve().parent
ENVIRONMENT: dict[str, str] = {}
"""Of our side's processes, where it isn't this one's."""

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full + window": {"groups": "full+swa"},
    "full + 3 windows": {"groups": "full+3swa"},
    "full, events": {"events": True},
    "full + window, events": {"groups": "full+swa", "events": True},
    "full, decode": {"decode": 128, "share": 5},
    "full + window, decode": {"groups": "full+swa", "decode": 128, "share": 5},
}


def one(python: str | None, work: dict[str, Any]) -> dict[str, Any]:
    """Run one side once: vLLM's by its ``python``, ours without."""
    side = "vllm" if python else "kvyard"
    command = [python, "_blocks_vllm.py", str(VLLM_ORACLE)] if python else [sys.executable, "_blocks_kvyard.py"]
    environment = None if python else ENVIRONMENT or None
    done = subprocess.run(
        [*command, json.dumps(work)], cwd=HERE, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--source", action="store_true", help="measure the uncompiled checkout, not a plain install")
    args = parser.parse_args()
    ENVIRONMENT.update(plain_environment(args.source))
    peer = peer_python("vllm")
    print(f"{'case':24} {'unit':12} {'kvyard':>12} {'vLLM':>12} {'ratio':>7}  spread of ratio")
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        work = {"requests": args.requests // case.get("share", 1), **case}
        work.pop("share", None)
        if peer:
            compare(peer, work)
        figures: dict[str, list[float]] = {"kvyard": [], "vllm": []}
        key, unit = ("us_per_step", "us/step") if work.get("decode") else ("block_ops_per_s", "block ops/s")
        for _ in range(args.repeats):
            figures["kvyard"].append(one(None, work)[key])
            if peer:
                figures["vllm"].append(one(peer, work)[key])
        report(name, unit, figures)


def compare(peer: str, work: dict[str, Any]) -> None:
    """Both sides must agree on every block table and count before their times mean anything."""
    checked = {**work, "requests": min(800, work["requests"]), "check": True}
    ours, theirs = one(None, checked), one(peer, checked)
    for side in (ours, theirs):
        side["counts"].pop("events")
    if ours["checksum"] != theirs["checksum"] or ours["counts"] != theirs["counts"]:
        sys.exit(f"the sides differ on {checked}: {ours['counts']} and {theirs['counts']}")


def report(name: str, unit: str, figures: dict[str, list[float]]) -> None:
    ours = statistics.median(figures["kvyard"])
    if not figures["vllm"]:
        print(f"{name:24} {unit:12} {ours:12,.1f}")
        return
    theirs = statistics.median(figures["vllm"])
    ratios = [
        (a / b if unit.endswith("/s") else b / a) for a, b in zip(figures["kvyard"], figures["vllm"], strict=True)
    ]
    ratio = ours / theirs if unit.endswith("/s") else theirs / ours
    print(f"{name:24} {unit:12} {ours:12,.1f} {theirs:12,.1f} {ratio:6.1f}x  {min(ratios):.1f}-{max(ratios):.1f}")


if __name__ == "__main__":
    main()
