"""``kvyard tune`` against a grid of 1,000 points: how near to the grid's best does it come, with how many replays?

Two traces, 2,000 requests of each; both are searched on the first 70 % of their time. The grid has the number of workers, host
memory, routing policy and tokens per pass. It takes long, so it was run once and is kept in ``benchmarks/data/tune``: from the
cheapest point on, up to the first cost at which one keeps the limits. What costs more can't be the best; ``--all`` goes on.

    python benchmarks/tune.py [--seeds 3] [--trace NAME]        searches, each beside the kept grid's best
    python benchmarks/tune.py --grid [--all] [--trace NAME]     the grid, in one process; it can be interrupted
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from _plain import ROOT, plain_environment

HERE = Path(__file__).resolve()
DATA = HERE.parent / "data" / "tune"
KEPT = ROOT / "build" / "tune"
"""Replays and searches; what is there isn't made again."""
TRACES = {
    "conversation": ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz",
    "synthetic": DATA / "mooncake_synthetic_3000.jsonl.xz",
}
LIMITS = {"conversation": "ttft_p99=2000,itl_p99=50", "synthetic": "ttft_p99=1250,itl_p99=30"}
REQUESTS = 2000
TEST = 0.3
TRIALS = 60
BASE = {"block_size": 64, "num_gpu_blocks": 4096}
WORKERS = (3, 4, 5, 6, 7, 8, 9, 10, 12, 16)
HOST = ("0", "8GiB", "16GiB", "32GiB", "64GiB", "96GiB", "128GiB", "256GiB", "512GiB", "1TiB")
ROUTERS = ("round-robin", "kv", "least-time", "lmetric", "cache-aware")
TOKENS = (2048, 8192)
SEARCH = f"router={'|'.join(ROUTERS)},host_bytes=0..1TiB,workers=3..16,max_num_batched_tokens=2048|8192"
FIGURES = ("cost", "ttft_mean", "ttft_p99", "itl_p99", "reuse")
AXES = ("workers", "host_bytes", "router", "max_num_batched_tokens")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--grid", action="store_true")
    options.add_argument("--trace", choices=list(TRACES))
    options.add_argument("--all", action="store_true")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--source", action="store_true", help="measure the uncompiled checkout")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if not asked.inside:
        command = [sys.executable, str(HERE), "--inside", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=plain_environment(asked.source), check=False).returncode)
    for name in [asked.trace] if asked.trace else TRACES:
        if asked.grid:
            run_grid(name, asked.all)
        else:
            search(name, asked.seeds)


def run_grid(name: str, every: bool) -> None:
    """Points on the part that is searched on, the cheapest first."""
    from kvyard import __version__
    from kvyard.lab.jobs import LocalExecutor, Task
    from kvyard.lab.study.cost import Prices, cost
    from kvyard.lab.study.grid import fingerprint, point_key
    from kvyard.lab.tune import parse_limits
    from kvyard.lab.tune.parts import cut
    from kvyard.lab.tune.trial import judged
    from kvyard.replay.report.files import read_report
    from kvyard.replay.settings import make_config
    from kvyard.replay.traces import open_trace

    trace = TRACES[name]
    reading = {"format": None, "skip_bad": False, "sort": False, "block_size": None, "limit": REQUESTS}
    source = open_trace(trace, **reading)  # type: ignore[arg-type]
    part = cut(source, TEST).train
    # As a search names them: a replay that one of the two has made serves the other.
    about = {"trace": fingerprint(trace), "reading": {**reading, "format": source.format}, "part": part}
    folder = KEPT / name / "points"
    folder.mkdir(parents=True, exist_ok=True)
    points = []
    for values in product(WORKERS, HOST, ROUTERS, TOKENS):
        settings = {**BASE, **dict(zip(AXES, values, strict=True))}
        config = make_config(settings)
        points.append((cost(settings, config, Prices()), values, config))
    points.sort(key=lambda point: point[:2])
    limits = parse_limits(LIMITS[name])
    rows: list[dict[str, Any]] = []
    best = float("inf")
    begun = time.monotonic()
    for number, (price, values, config) in enumerate(points, 1):
        row: dict[str, Any] = {**dict(zip(AXES, values, strict=True)), "cost": round(price, 4)}
        rows.append(row)
        if price > best and not every:
            continue
        key = point_key(config, about)
        path = folder / f"{key}.json"
        if not path.exists():
            task = Task(str(trace), reading, config, None, "", str(path), key, part)
            LocalExecutor().run([task], lambda key, why: print(f"{key}: {why}") if why else None)
        found, missed = judged(read_report(path), price, limits)
        row |= {figure: round(found[figure], 4) for figure in FIGURES}  # type: ignore[arg-type]
        if missed <= 0:
            best = min(best, price)
        if number % 20 == 0:
            print(f"{name}: {number} of {len(points)}, {time.monotonic() - begun:.0f} s", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    columns = [*AXES, *FIGURES]
    lines = ",\n".join(json.dumps([row.get(column) for column in columns]) for row in rows)
    made = json.dumps(f"kvyard {__version__} at {commit}")
    text = f'{{"made_by": {made},\n"columns": {json.dumps(columns)},\n"points": [\n{lines}\n]}}\n'
    (DATA / f"{name}.json").write_text(text)
    print(f"{name}: {sum('reuse' in row for row in rows)} of {len(rows)} points replayed, the others cost too much")


def grid_best(name: str) -> tuple[dict[str, Any], int]:
    """The cheapest point of the kept grid that keeps the limits, and how many were replayed to know that."""
    from kvyard.lab.tune import parse_limits

    file = DATA / f"{name}.json"
    if not file.exists():
        raise SystemExit(f"{file.relative_to(ROOT)} isn't there: make it first, with --grid --trace {name}")
    kept = json.loads(file.read_text())
    rows = [dict(zip(kept["columns"], values, strict=True)) for values in kept["points"]]
    done = [row for row in rows if row["ttft_p99"] is not None]
    fine = [row for row in done if all(one.violation(row[one.name]) <= 0 for one in parse_limits(LIMITS[name]))]
    best = min(fine, key=lambda row: row["cost"])
    assert all(row["cost"] >= best["cost"] for row in rows if row not in done), "a cheaper one was not replayed"
    return best, len(done)


def search(name: str, seeds: int) -> None:
    """Searches with several seeds, each beside the grid's best."""
    from kvyard.lab.tune import parse_goals, parse_limits, tune

    best, count = grid_best(name)
    print(f"\n{name}: min cost with {LIMITS[name]}")
    where = ", ".join(f"{axis} {best[axis]}" for axis in AXES)
    print(f"  grid of 1,000 (of which {count} had to be replayed): {best['cost']:.2f} at {where}")
    for seed in range(seeds):
        done = tune(
            TRACES[name],
            SEARCH,
            parse_goals("min cost"),
            parse_limits(LIMITS[name]),
            folder=KEPT / name,
            trials=TRIALS,
            test=TEST,
            seed=seed,
            limit=REQUESTS,
            **BASE,  # type: ignore[arg-type]
        )
        answer = done.answer
        assert answer is not None
        at = next(number for number, one in enumerate(evaluated(done), 1) if one.point == answer.point)
        where = ", ".join(f"{axis} {answer.point[axis]}" for axis in AXES)
        print(
            f"  seed {seed}: {answer.cost:.2f} ({round(answer.cost, 4) / best['cost'] - 1:+.1%}) at {where}; "
            f"SLO {'met' if done.met else 'MISSED'}, on the test part {'met' if answer.test_violation <= 0 else 'missed'}; "
            f"{done.replayed} replayed, this one as number {at}",
            flush=True,
        )


def evaluated(done: Any) -> list[Any]:
    """Points that needed a replay, each once, in order."""
    seen: dict[str, Any] = {}
    for one in done.trials:
        if one.config is not None and one.state != "skipped":
            seen.setdefault(one.identity, one)
    return list(seen.values())


if __name__ == "__main__":
    main()
