"""``kvyard tune`` against a grid of 1,000 points: how near to the grid's best does it come, with how many replays?

Two traces, 2,000 requests of each; both are searched on the first 70 % of their time. The grid has the number of workers, host
memory, routing policy and tokens per pass. It takes long, so it is run once and kept in ``benchmarks/data/tune``. Points beyond
the budget are not replayed unless ``--all`` is given: both goals are about points below it, so the best is the same.

    python benchmarks/tune.py [--seeds 5] [--trace NAME] [--goal TEXT]    searches, each beside the kept grid's best
    python benchmarks/tune.py --grid [--all] [--trace NAME] [--only ROUTER]   the grid, in one process; it can be interrupted
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from _plain import ROOT, plain_environment

HERE = Path(__file__).resolve()
DATA = HERE.parent / "data" / "tune"
KEPT = ROOT / "build" / "tune-grid"
TRACES = {
    "conversation": ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz",
    "synthetic": DATA / "mooncake_synthetic_3000.jsonl.xz",
}
LIMITS = {"conversation": "ttft_p99=2000,itl_p99=50", "synthetic": "ttft_p99=1250,itl_p99=30"}
BUDGET = {"conversation": 20, "synthetic": 15}
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
    options.add_argument("--only", choices=ROUTERS)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--goal")
    options.add_argument("--source", action="store_true", help="measure the uncompiled checkout")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if not asked.inside:
        command = [sys.executable, str(HERE), "--inside", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=plain_environment(asked.source), check=False).returncode)
    for name in [asked.trace] if asked.trace else TRACES:
        if asked.grid:
            run_grid(name, asked.only, asked.all)
        else:
            search(name, asked.seeds, [asked.goal] if asked.goal else goals(name))


def goals(name: str) -> list[str]:
    return ["min cost", f"min ttft_mean with cost<{BUDGET[name]}"]


def run_grid(name: str, only: str | None, every: bool) -> None:
    """All points on the part that is searched on; ``only`` those of one policy are made again, the others stay as they are."""
    from kvyard import __version__
    from kvyard.replay.jobs import LocalExecutor, Task
    from kvyard.replay.report.files import read_report
    from kvyard.replay.settings import make_config
    from kvyard.replay.traces import open_trace
    from kvyard.replay.tune.cost import Prices, cost
    from kvyard.replay.tune.goals import figures
    from kvyard.replay.tune.parts import cut

    trace = TRACES[name]
    part = cut(open_trace(trace, limit=REQUESTS), TEST).train
    folder = KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    points = list(product(WORKERS, HOST, ROUTERS, TOKENS))
    for number, values in enumerate(points, 1):
        point = dict(zip(AXES, values))
        settings = {**BASE, **point}
        config = make_config(settings)
        price = cost(settings, config, Prices())
        if price > BUDGET[name] and not every:
            rows.append({**point, "cost": round(price, 4)})
            continue
        path = folder / f"{'-'.join(map(str, values))}.json"
        if not path.exists() or point["router"] == only:
            task = Task(str(trace), {"limit": REQUESTS}, config, None, "", str(path), path.stem, part)
            LocalExecutor().run([task], lambda key, why: print(f"{key}: {why}") if why else None)
        report = read_report(path)
        found = figures(report, price)
        rows.append({**point, **{figure: round(found[figure], 4) for figure in FIGURES}})
        if number % 100 == 0:
            print(f"{name}: {number} of {len(points)}, {time.monotonic() - begun:.0f} s", flush=True)
    made = f"kvyard {__version__} at {commit.stdout.strip()}"
    columns = [*AXES, *FIGURES]
    lines = ",\n".join(json.dumps([row.get(column) for column in columns]) for row in rows)
    text = f'{{"made_by": {json.dumps(made)},\n"columns": {json.dumps(columns)},\n"points": [\n{lines}\n]}}\n'
    (DATA / f"{name}.json").write_text(text)
    print(f"{name}: {len(rows)} points written")


def grid_best(name: str, goal: str, limits: str) -> dict[str, Any]:
    """The best point of the kept grid."""
    from kvyard.replay.tune import parse_goals, parse_limits

    kept = json.loads((DATA / f"{name}.json").read_text())
    every = [dict(zip(kept["columns"], values)) for values in kept["points"]]
    rows = [row for row in every if row["ttft_p99"] is not None]
    (wanted,) = parse_goals(goal)
    fine = [row for row in rows if all(one.violation(row[one.name]) <= 0 for one in parse_limits(limits))]
    best = min(fine, key=lambda row: wanted.loss(row[wanted.name]))
    assert wanted.name == "cost" or "cost<" in limits or len(rows) == len(every), (
        "points that were left out may be better"
    )
    assert best["cost"] <= min((row["cost"] for row in every if row not in rows), default=best["cost"])
    return best


def search(name: str, seeds: int, asked: list[str]) -> None:
    """Searches with several seeds, each beside the grid's best."""
    from kvyard.replay.tune import parse_goals, parse_limits, tune

    for text in asked:
        goal, _, more = text.partition(" with ")
        limits = ",".join(one for one in (LIMITS[name], more) if one)
        best = grid_best(name, goal, limits)
        (wanted,) = parse_goals(goal)
        print(f"\n{name}: {goal} with {limits}")
        print(
            f"  grid of 1,000: {wanted.name} {best[wanted.name]:.2f} at {', '.join(f'{axis} {best[axis]}' for axis in AXES)}"
        )
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                begun = time.process_time()
                done = tune(
                    TRACES[name],
                    SEARCH,
                    parse_goals(goal),
                    parse_limits(limits),
                    folder=folder,
                    trials=TRIALS,
                    test=TEST,
                    seed=seed,
                    limit=REQUESTS,
                    **BASE,  # type: ignore[arg-type]
                )
                took = time.process_time() - begun
            answer = done.answer
            assert answer is not None
            value = answer.figures[wanted.name]
            off = value / best[wanted.name] - 1
            at = next((i for i, one in enumerate(evaluated(done), 1) if one.point == answer.point), 0)
            where = ", ".join(f"{axis} {answer.point[axis]}" for axis in AXES)
            met = "met" if done.met else "MISSED"
            test = "met" if answer.test_violation <= 0 else "missed"
            print(
                f"  seed {seed}: {value:.2f} ({off:+.1%}) at {where}; SLO {met}, on the test part {test}; "
                f"{done.replayed} replayed, best after {at}, {took:.0f} s of CPU",
                flush=True,
            )


def evaluated(done: Any) -> list[Any]:
    """Points that needed a replay, each once, in order."""
    seen: dict[str, Any] = {}
    for one in done.looks:
        if one.config is not None and one.state != "skipped":
            seen.setdefault(one.name, one)
    return list(seen.values())


if __name__ == "__main__":
    main()
