"""Our replay against NVIDIA Dynamo's, on the same trace, alternating, in CPU time from the file's path to the report.

Every run is a fresh process; imports are left out on both sides. Ours is what a plain install gives (see ``_plain.py``);
``--source`` measures the uncompiled checkout. ``make peers`` makes Dynamo's environment; without it only our side runs.

    python benchmarks/replay.py [--repeats 3] [--only kv]     speed, memory, and what both found
    python benchmarks/replay.py --agree                       round-robin at more sizes, kv over five seeds
    python benchmarks/replay.py --growth                      our side by requests and by workers
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from _peers import DYNAMO_REPLAY, conversation_trace, peer_python
from _plain import plain_environment

TRACE = conversation_trace()
GPU_TOKENS = 16384 * 64
BYTES_PER_TOKEN = 131_072

SPEED: dict[str, dict[str, Any]] = {
    "8 kv, block 64": {"workers": 8, "router": "kv"},
    "8 kv, block 16": {"workers": 8, "router": "kv", "block_size": 16},
    "4 kv, host 4 x G1": {"workers": 4, "router": "kv", "host_ratio": 4.0},
    "1 round-robin": {"workers": 1, "router": "round-robin"},
    "4 + 4 round-robin": {"prefill": 4, "decode": 4, "router": "round-robin"},
    "4 + 4 kv": {"prefill": 4, "decode": 4, "router": "kv"},
}
"""``prefill`` and ``decode``: workers with roles, whose hand-overs take no time. What both find there: ``handovers.py``."""
AGREE: dict[str, dict[str, Any]] = {
    "1 round-robin, block 64": {"workers": 1, "router": "round-robin"},
    "4 round-robin, block 64": {"workers": 4, "router": "round-robin"},
    "8 round-robin, block 64": {"workers": 8, "router": "round-robin"},
    "8 round-robin, block 16": {"workers": 8, "router": "round-robin", "block_size": 16},
    "8 round-robin, block 512": {"workers": 8, "router": "round-robin", "block_size": 512},
}
FIGURES = ("ttft", "ttft_p99", "itl", "reuse")
ENVIRONMENT: dict[str, str] = {}
"""Of our side's processes."""


def ours(point: dict[str, Any]) -> dict[str, Any]:
    """Run one point in this process."""
    from kvyard.replay.run import replay

    size = point.get("block_size", 64)
    blocks = GPU_TOKENS // size
    settings: dict[str, Any] = {
        "router": point["router"],
        "block_size": size,
        "num_gpu_blocks": blocks,
        "seed": point.get("seed", 0),
        "predicted_ttl_s": 0,  # the peer's replay doesn't predict
    }
    if "prefill" in point:
        settings |= {"prefill": point["prefill"], "decode": point["decode"], "nic": "none"}
    else:
        settings["workers"] = point["workers"]
    if point.get("requests"):
        settings["limit"] = point["requests"]
    if point.get("host_ratio"):
        settings |= {
            "host_blocks": int(blocks * point["host_ratio"]),
            "host_bandwidth": "32/32",
            "link_discipline": "fifo",
            "last_block": "recompute-block",
        }
    began = time.process_time()
    report = replay(TRACE, **settings).report
    spent = time.process_time() - began
    latency = report.latency
    return {
        "cpu": spent,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ttft": latency["ttft"].mean,
        "ttft_p99": latency["ttft"].p99,
        "itl": latency["itl"].mean,
        "reuse": report.reuse["all"].value,
    }


def run_ours(point: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(f"kvyard failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_peer(python: str, point: dict[str, Any]) -> dict[str, Any]:
    asked = {
        "trace": "conversation",
        "workers": point.get("workers", 0),
        "split": {"prefill": point["prefill"], "decode": point["decode"]} if "prefill" in point else None,
        "router": "kv_router" if point["router"] == "kv" else "round_robin",
        "block_size": point.get("block_size", 64),
        "host_ratio": point.get("host_ratio", 0.0),
        "requests": point.get("requests"),
    }
    command = [python, str(DYNAMO_REPLAY), "--conversation", str(TRACE), "--one", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "DYN_LOG": "error"})
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    report = found["report"]
    return {
        "cpu": found["cpu_s"],
        "rss": found["peak_rss_mb"],
        "ttft": report["mean_ttft_ms"],
        "ttft_p99": report["p99_ttft_ms"],
        "itl": report["mean_itl_ms"],
        "reuse": report["first_admission_prefix_cache_reused_ratio"],
    }


def middle(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def compare_speed(points: dict[str, dict[str, Any]], repeats: int, peer: str | None) -> None:
    print(
        f"{'case':20} {'kvyard s':>9} {'peer s':>8} {'ratio':>6} {'spread':>10} {'MB':>5} {'peer MB':>8}  TTFT, ITL (ms), reuse"
    )
    for name, point in points.items():
        mine: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        for _ in range(repeats):
            mine.append(run_ours(point))
            if peer:
                theirs.append(run_peer(peer, point))
        line = f"{name:20} {middle(mine, 'cpu'):9.2f}"
        if peer:
            ratios = sorted(b["cpu"] / a["cpu"] for a, b in zip(mine, theirs, strict=True))
            line += (
                f" {middle(theirs, 'cpu'):8.2f} {middle(theirs, 'cpu') / middle(mine, 'cpu'):5.1f}x"
                f" {ratios[0]:4.1f}-{ratios[-1]:4.1f} {middle(mine, 'rss'):5.0f} {middle(theirs, 'rss'):8.0f}"
            )
        print(line + "  " + figures(mine[-1]) + (f"   peer {figures(theirs[-1])}" if peer else ""), flush=True)


def figures(run: dict[str, Any]) -> str:
    return f"{run['ttft']:.1f}, {run['itl']:.2f}, {run['reuse']:.4f}"


def compare_results(peer: str | None) -> None:
    print(f"{'case':26} {'side':7} {'TTFT mean':>12} {'TTFT p99':>12} {'ITL mean':>10} {'reuse':>8}")
    for name, point in AGREE.items():
        mine = run_ours(point)
        show(name, "kvyard", mine)
        if peer:
            theirs = run_peer(peer, point)
            show("", "peer", theirs)
            apart = {key: (mine[key] / theirs[key] - 1) * 100 for key in FIGURES}
            print(
                f"{'':26} {'apart':7} {apart['ttft']:11.2f}% {apart['ttft_p99']:11.2f}% "
                f"{apart['itl']:9.2f}% {apart['reuse']:7.2f}%",
                flush=True,
            )
    point = {"workers": 8, "router": "kv"}
    mine_all = [run_ours({**point, "seed": seed}) for seed in range(5)]
    show("8 kv, block 64, 5 seeds", "kvyard", {key: statistics.mean(run[key] for run in mine_all) for key in FIGURES})
    if peer:
        theirs_all = [run_peer(peer, point) for _ in range(5)]
        show("", "peer", {key: statistics.mean(run[key] for run in theirs_all) for key in FIGURES})


def show(name: str, side: str, run: dict[str, Any]) -> None:
    print(
        f"{name:26} {side:7} {run['ttft']:12.2f} {run['ttft_p99']:12.2f} {run['itl']:10.3f} {run['reuse']:8.4f}",
        flush=True,
    )


def growth() -> None:
    print(f"{'requests':>9} {'workers':>8} {'kvyard s':>9} {'us/request':>11} {'MB':>6}")
    for requests, workers in [(1000, 8), (4000, 8), (12031, 8), (4000, 1), (4000, 64), (4000, 512)]:
        run = run_ours({"workers": workers, "router": "kv", "requests": requests})
        print(
            f"{requests:9} {workers:8} {run['cpu']:9.2f} {run['cpu'] / requests * 1e6:11.0f} {run['rss']:6.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--agree", action="store_true", help="compare results instead of speed")
    parser.add_argument("--growth", action="store_true", help="our side by requests and by workers")
    parser.add_argument("--source", action="store_true", help="measure the uncompiled checkout, not a plain install")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(ours(json.loads(args.point))))
        return
    ENVIRONMENT.update(plain_environment(args.source))
    peer = peer_python("dynamo")
    if args.growth:
        growth()
    elif args.agree:
        compare_results(peer)
    else:
        points = {name: point for name, point in SPEED.items() if not args.only or args.only in name}
        compare_speed(points, args.repeats, peer)


if __name__ == "__main__":
    main()
