"""``kvyard plan`` against a grid: is its fleet within 5 % of the cheapest of up to 400 listed ones, and what does it take?

    python benchmarks/plan.py [--limit 2000] [--only NAME ...] [--every] [--splits]

Two traces, two models and two SLOs each, and three questions that no fleet can answer. The grid is independent of the search:
for each card, degree of tensor parallelism, cache type and host memory the most workers that cost less than 1.06 times the
plan are replayed, and fewer as long as they keep the SLO; ``--every`` replays all points that are cheaper, for who doubts that
fewer workers are never better. ``--splits`` takes a grid of prefill and decode workers instead, and leaves out pairs if one of
their kind with as many or more of both roles misses the SLO. The second trace has sessions without a common clock and runs in a
closed loop; most of its requests are longer than these models take, so that its cases are of its first ones that fit.
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
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from kvyard.errors import KvyardError
from kvyard.lab.jobs import TracePart
from kvyard.lab.study import Study
from kvyard.lab.study.cost import cost, parted
from kvyard.lab.study.goals import judged
from kvyard.replay.report.slo import parse_limits
from kvyard.replay.settings import make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.changes import sliced
from kvyard.replay.traces.writing import write_trace

ROOT = Path(__file__).resolve().parent.parent
MOONCAKE = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
WEKA = ROOT.parent / "shared" / "traces" / "weka" / "claude_code_710.jsonl.xz"
GPUS = ("h100", "h200")
CASES: dict[str, dict[str, Any]] = {
    "mooncake 32b tight": {
        "trace": MOONCAKE,
        "model": "Qwen/Qwen3-32B",
        "max_tokens": 32768,
        "slo": "ttft_p99<2s,itl_p99<50ms",
    },
    "mooncake 32b loose": {
        "trace": MOONCAKE,
        "model": "Qwen/Qwen3-32B",
        "max_tokens": 32768,
        "slo": "ttft_p90<5s,itl_p99<200ms",
    },
    "mooncake 8b tight": {
        "trace": MOONCAKE,
        "model": "llama-3.1-8b",
        "max_tokens": 65536,
        "slo": "ttft_p99<2s,itl_p99<50ms",
    },
    "mooncake 8b loose": {
        "trace": MOONCAKE,
        "model": "llama-3.1-8b",
        "max_tokens": 65536,
        "slo": "ttft_p90<5s,itl_p99<200ms",
    },
    "weka 32b tight": {
        "trace": WEKA,
        "model": "Qwen/Qwen3-32B",
        "max_tokens": 32768,
        "slo": "ttft_p90<2s,itl_p99<100ms",
        "concurrency": 32,
    },
    "weka 32b loose": {
        "trace": WEKA,
        "model": "Qwen/Qwen3-32B",
        "max_tokens": 32768,
        "slo": "ttft_p90<8s",
        "concurrency": 32,
    },
    "weka 8b tight": {
        "trace": WEKA,
        "model": "llama-3.1-8b",
        "max_tokens": 65536,
        "slo": "ttft_p90<2s,itl_p99<100ms",
        "concurrency": 32,
    },
    "weka 8b loose": {
        "trace": WEKA,
        "model": "llama-3.1-8b",
        "max_tokens": 65536,
        "slo": "ttft_p90<8s",
        "concurrency": 32,
    },
}
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "prompts too long": {"trace": MOONCAKE, "model": "Qwen/Qwen3-32B", "slo": "ttft_p99<2s"},
    "a floor": {"trace": MOONCAKE, "model": "Qwen/Qwen3-32B", "max_model_len": 131072, "slo": "ttft_p99<2s"},
    "too slow a card": {
        "trace": MOONCAKE,
        "model": "llama-3.1-70b",
        "gpu": "l40s",
        "max_tokens": 65536,
        "slo": "itl_p99<10ms",
    },
}
MOST = 400


def fitting(case: dict[str, Any], limit: int, folder: Path) -> dict[str, Any]:
    """Return the case with a file of the first ``limit`` requests that fit, if its trace has sessions: of its first requests
    few fit, of too few sessions.
    """
    if case["trace"] != WEKA:
        return case
    path = folder / f"weka-{case['max_tokens']}-{limit}.jsonl"
    if not path.exists():
        write_trace(sliced(open_trace(WEKA), max_tokens=case["max_tokens"], first=limit), path)
    return {name: value for name, value in case.items() if name != "max_tokens"} | {"trace": path}


def flags(case: dict[str, Any], limit: int) -> list[str]:
    """Return the case as flags of ``kvyard plan``."""
    given = {"gpu": ",".join(GPUS), **case, "limit": limit}
    trace = given.pop("trace")
    return [
        str(trace),
        *(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))),
    ]


def run_plan(case: dict[str, Any], limit: int, folder: Path) -> tuple[int, dict[str, Any], float, str]:
    """Run the command as a user does; returns its exit code, its JSON, its CPU seconds and what it said on stderr."""
    before = getrusage(RUSAGE_CHILDREN)
    argv = [sys.executable, "-m", "kvyard", "plan", *flags(case, limit), "-o", str(folder), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, cpu, done.stderr


def grid(case: dict[str, Any], splits: bool) -> list[tuple[float, dict[str, Any]]]:
    """Return the grid's points that there can be, the cheapest first."""
    base = {name: value for name, value in case.items() if name not in ("trace", "slo", "max_tokens")}
    found = []
    sizes: list[dict[str, Any]] = [{"workers": count} for count in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)]
    hosts: tuple[int, ...] = (0, 64)
    if splits:
        sizes = [{"prefill": prefill, "decode": decode} for prefill, decode in product((1, 2, 3, 4, 6), repeat=2)]
        hosts = (0,)
    for gpu, degree, dtype, host, size in product(GPUS, (1, 2, 4, 8), ("auto", "fp8"), hosts, sizes):
        if sum(size.values()) * degree > 48:
            continue
        point = {"gpu": gpu, "tensor_parallel_size": degree, "kv_cache_dtype": dtype, **size}
        if host:
            point["host_bytes"] = f"{host * degree}GiB"
        try:
            settings, prices = parted({**base, **point})
            found.append((cost(settings, make_config(settings), prices), settings))
        except KvyardError:
            continue
    return sorted(found, key=lambda pair: pair[0])[:MOST]


def best_of(
    case: dict[str, Any], limit: int, folder: Path, below: float, arguments: argparse.Namespace
) -> tuple[float | None, int, int]:
    """Return the price of the cheapest point that keeps the SLO, the points of the grid and how many were replayed.

    Points that cost 1.06 times ``below`` or more can't change the verdict and aren't replayed.
    """
    points = grid(case, arguments.splits)
    study = Study(case["trace"], folder, limit=limit)
    limits, part = parse_limits(case["slo"]), TracePart(max_tokens=case.get("max_tokens"))
    kinds: dict[tuple[Any, ...], list[tuple[float, dict[str, Any]]]] = {}
    for price, settings in points:
        if price < 1.06 * below:
            kind = tuple(settings.get(name) for name in ("gpu", "tensor_parallel_size", "kv_cache_dtype", "host_bytes"))
            kinds.setdefault(kind, []).append((price, settings))
    best, replayed = None, 0
    for sizes in kinds.values():
        missed: list[tuple[int, ...]] = []
        for price, settings in reversed(sizes):
            size = tuple(settings.get(name, 0) for name in ("workers", "prefill", "decode"))
            if not arguments.every and any(
                all(own <= least for own, least in zip(size, other, strict=True)) for other in missed
            ):
                continue
            point = study.point({}, make_config(settings), part)
            report = study.replay([point]).get(point.key)
            replayed += 1
            if report is not None and judged(report, price, limits)[1] <= 0:
                best = price if best is None else min(best, price)
            else:
                missed.append(size)
    return best, len(points), replayed


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--every", action="store_true", help="all points of the grid that are cheaper than the plan")
    parser.add_argument("--splits", action="store_true", help="a grid of prefill and decode workers")
    parser.add_argument("--folder", type=Path, help="where results are kept, for a second call to go on from")
    parser.add_argument("--no-grid", action="store_true", help="the search alone")
    arguments = parser.parse_args()
    print(
        f"{'case':<20} {'plan':>8} {'grid':>8} {'ratio':>6} {'fleets':>6} {'CPU s':>6}  grid points, replayed; answer"
    )
    for name, case in CASES.items():
        if (arguments.only and name not in arguments.only) or not case["trace"].exists():
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = temporary if arguments.folder is None else arguments.folder / name.replace(" ", "-")
            Path(folder).mkdir(parents=True, exist_ok=True)
            case = fitting(case, arguments.limit, Path(folder))
            code, found, cpu, said = run_plan(case, arguments.limit, Path(folder) / "plan")
            answer = found.get("answer")
            if answer is None:
                print(f"{name:<20} exit {code}: {said.strip() or ' '.join(found.get('says', []))}")
                continue
            price, points, replayed = (None, 0, 0)
            if not arguments.no_grid:
                price, points, replayed = best_of(
                    case, arguments.limit, Path(folder) / "plan", answer["cost"], arguments
                )
            ratio = f"{answer['cost'] / price:6.3f}" if price else "   <1 "
            print(
                f"{name:<20} {answer['cost']:8.2f} {price or 0:8.2f} {ratio} {len(found['fleets']):6} {cpu:6.1f}"
                f"  {points}, {replayed}; {answer['fleet']}",
                flush=True,
            )
    for name, case in IMPOSSIBLE.items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            code, _, cpu, said = run_plan(case, arguments.limit, Path(folder) / "plan")
            print(f"{name:<20} exit {code} after {time.monotonic() - began:.1f} s, {cpu:.1f} s of CPU: {said.strip()}")


if __name__ == "__main__":
    main()
