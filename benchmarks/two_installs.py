"""CPU time of two versions of the package, alternating: is a change slower anywhere?

    python benchmarks/two_installs.py OLD NEW [--repeats 5] [--only routing] [--requests 3000]

``OLD`` and ``NEW`` are folders that hold an installed ``kvyard``, made by ``pip install --no-deps --target FOLDER CHECKOUT``.
Each round runs every part once with the one and once with the other, in fresh processes. Parts take their own CPU time,
without imports. A line has the medians, the median ratio of new to old by round, and the spread of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _peers import conversation_trace

HERE = Path(__file__).resolve().parent
SMALL: dict[str, Any] = {"block_size": 64, "num_gpu_blocks": 16384, "predicted_ttl_s": 0}
REPLAYS: dict[str, dict[str, Any]] = {
    "8 kv, block 64": {"workers": 8, "router": "kv", **SMALL},
    "8 kv, block 16": {"workers": 8, "router": "kv", **SMALL, "block_size": 16, "num_gpu_blocks": 65536},
    "4 kv, host": {"workers": 4, "router": "kv", **SMALL, "host_blocks": 65536, "host_bandwidth": "32/32"},
    "1 round-robin": {"workers": 1, "router": "round-robin", **SMALL},
    "8 least-time": {"workers": 8, "router": "least-time", **SMALL},
    "4 + 4 kv": {"prefill": 4, "decode": 4, "router": "kv", "nic": "none", **SMALL},
}
SGLANG: dict[str, tuple[int, dict[str, Any]]] = {
    "4 workers, page 64": (4000, {"workers": 4, "block_size": 64, "num_gpu_blocks": 16384}),
    "4 workers, page 64, evictions": (4000, {"workers": 4, "block_size": 64, "num_gpu_blocks": 2500}),
    "1 worker, page 64": (1500, {"workers": 1, "block_size": 64, "num_gpu_blocks": 4096, "speedup": 4}),
    "4 workers, page 16": (1500, {"workers": 4, "block_size": 16, "num_gpu_blocks": 40000}),
    "2 workers, page 1": (200, {"workers": 2, "block_size": 1, "num_gpu_blocks": 400000}),
}
"""Requests and settings of replays with ``backend=sglang``."""
BLOCKS: dict[str, dict[str, Any]] = {
    "full": {},
    "full + window, events": {"groups": "full+swa", "events": True},
    "full, decode": {"decode": 128, "requests": 400},
}
ROUTES = [("kv", 8, 160), ("kv", 100, 160), ("kv", 8, 3200), ("least-time", 8, 160), ("least-time", 100, 160)]


def best(call: Callable[[], object], rounds: int = 5) -> float:
    """CPU seconds of the quickest of ``rounds`` calls."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def replays(requests: int) -> dict[str, float]:
    """CPU seconds from the trace's path to the report."""
    from kvyard.replay.run import replay

    trace = conversation_trace()
    replay(trace, limit=20, **REPLAYS["8 kv, block 64"])
    return {
        f"replay: {name}": best(lambda chosen=settings: replay(trace, limit=requests, **chosen), 1)
        for name, settings in REPLAYS.items()
    }


def sglang(requests: int) -> dict[str, float]:
    """CPU seconds of replays with SGLang's scheduler and cache, the quickest of 3."""
    from kvyard.replay.run import replay

    trace = conversation_trace()
    replay(trace, limit=50, backend="sglang", **SGLANG["4 workers, page 64"][1])
    times = {}
    for name, (limit, settings) in SGLANG.items():
        times[f"sglang: {name}"] = best(
            lambda limit=limit, chosen=settings: replay(trace, limit=limit, backend="sglang", **chosen), 3
        )
    return times


def blocks(requests: int) -> dict[str, float]:
    """CPU seconds of the block manager per request."""
    from _blocks_kvyard import main

    times = {}
    for name, work in BLOCKS.items():
        count = work.get("requests", requests)
        times[f"blocks: {name}"] = main(json.dumps({"requests": count, **work}))["managed"] / count
    return times


def index(requests: int) -> dict[str, float]:
    """CPU seconds per block stored, per lookup and per block removed."""
    from _index_kvyard import steps

    work = {"workers": 24, "blocks": 6000, "queries": 200, "tokens": False}
    times: dict[str, list[float]] = {}
    for name, value in steps(str(HERE / "peers"), work):
        if name is not None and name.endswith(("_ns", "_us")):
            times.setdefault(name, []).append(value / (1e9 if name.endswith("_ns") else 1e6))
    return {f"index: {name}": statistics.median(values) for name, values in times.items()}


def events(requests: int) -> dict[str, float]:
    """CPU seconds to batch, encode and decode."""
    from kvyard.events import Batcher, GroupMeta, Tier
    from kvyard.events.wire import Decoder, Encoder
    from kvyard.hashing import Run, TokenChain, algorithm

    def batch() -> Any:
        batcher = Batcher([GroupMeta(block_size=16), GroupMeta(block_size=16)])
        for number, chain in enumerate(chains):
            batcher.entered(Run(chain), number % 2, Tier.G1, True)
        return batcher.end_iteration(0)

    chains = [TokenChain(range(n * 1024, (n + 1) * 1024), 16, algorithm("xxh3")) for n in range(8)]
    made = batch()
    payload = Encoder("vllm").encode(made)  # 30 kB: larger ones are at the mercy of the allocator
    return {
        "events: batch": best(batch, 200),
        "events: encode": best(lambda: Encoder("vllm").encode(made), 200),
        "events: decode": best(lambda: Decoder().decode(payload), 200),
    }


def routing(requests: int) -> dict[str, float]:
    """Median CPU seconds of ``Router.route``."""
    from router import run

    return {
        f"routing: {policy}, {workers} workers, {length} blocks": run(
            policy, workers, length, 40 if workers < 100 else 400, 2000 if length < 1000 else 500
        )
        for policy, workers, length in ROUTES
    }


PARTS = {part.__name__: part for part in (replays, sglang, blocks, index, events, routing)}


def measured(install: Path, part: str, requests: int) -> dict[str, float]:
    """Run one part with one version, in a process of its own."""
    command = [sys.executable, str(HERE / Path(__file__).name), str(install), str(install), "--part", part]
    environment = {**os.environ, "PYTHONPATH": str(install)}
    done = subprocess.run(
        [*command, "--requests", str(requests)], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(f"{part} failed with {install}:\n{done.stderr[-2000:]}")
    times: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--only", default="", help=f"parts whose name contains this: {', '.join(PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args.requests)))
        return
    for part in [name for name in PARTS if args.only in name]:
        rounds = [
            [measured(install, part, args.requests) for install in (args.old, args.new)] for _ in range(args.repeats)
        ]
        for name in rounds[0][0]:
            old, new = ([both[side][name] for both in rounds] for side in (0, 1))
            ratios = sorted(after / before for before, after in zip(old, new, strict=True))
            print(
                f"{name:46} {shown(statistics.median(old)):>9} {shown(statistics.median(new)):>9} "
                f"{statistics.median(ratios):6.3f}  ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                flush=True,
            )


def shown(seconds: float) -> str:
    """A time in a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


if __name__ == "__main__":
    main()
