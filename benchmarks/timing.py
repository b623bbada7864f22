"""What timing costs: a replay with tables and with the roofline beside one with the polynomial, in CPU time, by turns.

All have the same trace, scheduling and blocks, and a speed-up that makes their passes as long as the polynomial's in the mean,
since slower passes are fewer. Every run is a fresh process. Ours is what a plain install gives; ``--source`` measures the
uncompiled checkout. Tables are those of a folder that the script writes (LLMServingSim's format), with every axis filled.

    python benchmarks/timing.py [--source] [--repeats 5] [--requests 3000]
    python benchmarks/timing.py --start       sixteen pairs of card and model, from the cache
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import conversation_trace
from _plain import plain_environment

TRACE = conversation_trace()
MODEL = {"model": "llama-3.1-8b", "gpu": "h100", "num_gpu_blocks": 65536, "block_size": 16}
KINDS = ("polynomial", "roofline", "tables")
CARDS = ("a100", "h100", "h200", "b200")
MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "qwen3-30b-a3b")


def write_tables(folder: Path) -> Path:
    """A profile as LLMServingSim's profiler writes it: 40 token counts, a mixed grid of 8 x 8 x 9 x 11 shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*range(1, 16), *range(16, 64, 4), *range(64, 2049, 64), 8192]
    layers = {"embedding": 2, "layernorm": 2, "qkv_proj": 20, "o_proj": 12, "gate_up_proj": 60, "down_proj": 30}
    dense = [f"{name},{at},{us * (1 + at / 300):.3f}" for name, us in layers.items() for at in tokens]
    heads = [f"{name},{at},{us + at / 4:.3f}" for name, us in (("lm_head", 180), ("sampler", 20)) for at in tokens[:40]]
    chunks = [0, *(16 * 2**at for at in range(8))]
    contexts = [16 * 4**at for at in range(7)]
    attention = []
    for new in chunks:
        for past in (0, *contexts) if new else (0,):
            for batch in (0, *(2**at for at in range(9))):
                for context in contexts if batch else (0,):
                    if new or batch:
                        us = 4 + new * (past + new / 2) / 4e4 + batch * context / 3e3
                        attention.append(f"{new},{past},{batch},{context},{us:.3f}")
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]))
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *attention]))
    return folder


def one_run(point: dict[str, Any]) -> dict[str, float]:
    """One replay in this process."""
    from kvyard.replay.run import replay
    from kvyard.replay.settings import make_config

    config = make_config(point["settings"])
    for kind in config.workers:
        kind.engine.timing.model(1)  # tables are read before the clock starts: they are, in a second replay too
    began = time.process_time()
    done = replay(TRACE, config=config)
    spent = time.process_time() - began
    passes = sum(core.passes for worker in done.fleet.workers for core in worker.cores)
    busy = sum(core.busy_ns for worker in done.fleet.workers for core in worker.cores)
    return {"cpu": spent, "passes": passes, "pass_ms": busy / max(1, passes) / 1e6}


def measured(point: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def settings_of(kind: str, folder: Path, requests: int, speedup: float) -> dict[str, Any]:
    """A replay of ``kind``; scheduling is synchronous in all of them."""
    timing = f"tables:{folder}" if kind == "tables" else kind
    return {
        **MODEL,
        "workers": 4,
        "router": "round-robin",
        "timing": timing,
        "timing_speedup": speedup,
        "async_scheduling": False,
        "limit": requests,
    }


def compare(repeats: int, requests: int, environment: dict[str, str]) -> None:
    """Print CPU seconds of each kind, the best of ``repeats``, and how many times the polynomial's that is."""
    with tempfile.TemporaryDirectory() as made:
        folder = write_tables(Path(made) / "tp1")
        environment = {**environment, "KVYARD_CACHE": made}
        speedups = dict.fromkeys(KINDS, 1.0)
        usual = measured({"settings": settings_of("polynomial", folder, requests, 1.0)}, environment)["pass_ms"]
        for kind in KINDS[1:]:
            found = measured({"settings": settings_of(kind, folder, requests, 1.0)}, environment)["pass_ms"]
            speedups[kind] = found / usual
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(repeats):
            for kind in KINDS:
                point = {"settings": settings_of(kind, folder, requests, speedups[kind])}
                runs[kind].append(measured(point, environment))
    best = min(run["cpu"] for run in runs["polynomial"])
    print(f"{'timing':<12}{'CPU s, best':>12}{'median':>9}{'passes':>10}{'ms a pass':>11}{'times':>8}")
    for kind, found in runs.items():
        cpu = [run["cpu"] for run in found]
        first = found[0]
        print(
            f"{kind:<12}{min(cpu):>12.3f}{statistics.median(cpu):>9.3f}{first['passes']:>10,.0f}"
            f"{first['pass_ms']:>11.2f}{min(cpu) / best:>8.2f}"
        )


def start() -> None:
    """Make the timing of sixteen pairs of card and model, twice: the second time from the cache."""
    from kvyard.engine.timing.aic import aic_version
    from kvyard.engine.timing.deployment import Deployment
    from kvyard.engine.timing.roofline_timing import RooflineTiming
    from kvyard.engine.timing.tables import TablesTiming

    pairs = [Deployment(model=model, gpu=card) for card in CARDS for model in MODELS]
    kinds: list[tuple[str, list[Any]]] = [("roofline", [RooflineTiming(deployment=one) for one in pairs])]
    with tempfile.TemporaryDirectory() as made:
        os.environ["KVYARD_CACHE"] = made
        folder = write_tables(Path(made) / "tp1")
        for moe in (folder / "moe.csv",):
            rows = [f"{at},{called},{10 * called}" for at in (1, 64, 2048) for called in (8, 128)]
            moe.write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
        kinds.append(("tables of a folder", [TablesTiming(deployment=one, folder=str(folder)) for one in pairs]))
        if aic_version() is not None:
            kinds.append(("tables of aiconfigurator-core", [TablesTiming(deployment=one) for one in pairs]))
        for name, timings in kinds:
            spent = []
            for _ in range(2):
                began, clock = time.process_time(), time.perf_counter()
                for timing in timings:
                    timing.model(1)
                spent.append((time.process_time() - began, time.perf_counter() - clock))
            (cold, cold_wall), (warm, warm_wall) = spent
            print(f"16 x {name}: first {cold:.2f} s of CPU ({cold_wall:.2f} s), then {warm:.3f} s ({warm_wall:.3f} s)")


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--source", action="store_true", help="the uncompiled checkout")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.point:
        print(json.dumps(one_run(json.loads(asked.point))))
    elif asked.start:
        start()
    else:
        compare(asked.repeats, asked.requests, dict(os.environ) if asked.source else plain_environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
