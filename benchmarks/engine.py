"""What scheduling costs: CPU microseconds per request, per pass, per run and per block, and how that grows with the batch.

Requests come in a backlog, so that the batch is as large as it may be: 2,048 prompt tokens, half of them shared with others,
and 128 to answer with. *Runs* are the runs of blocks that entered the cache, *blocks* the blocks in them; both are counted
with a listener first, and then the time is taken without. Every figure is the median of fresh processes.
``steps`` computes one pass at a time, which is what a plan saves; ``bulk`` takes the blocks of many passes at once.

    python benchmarks/engine.py [--repeats 3] [--requests 1000] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.events.types import EventBatch, Tier
from kvyard.hashing import Run, TraceChain

TRACE = Path(__file__).resolve().parent.parent / "examples" / "data" / "mooncake_conversation.jsonl.xz"
CAPACITY = 1 << 20
"""Tokens of cache, whatever the block size."""

BATCHES: dict[str, dict[str, Any]] = {f"batch {size}": {"max_num_seqs": size} for size in (1, 4, 16, 64, 256)}
BLOCKS: dict[str, dict[str, Any]] = {f"block {size}": {"block_size": size} for size in (16, 64, 512)}
BACKENDS: dict[str, dict[str, Any]] = {
    "trtllm": {"backend": "trtllm"},
    "sglang": {"backend": "sglang"},
    "64, steps": {"max_num_seqs": 64, "plans": False},
    "256, bulk": {"bulk": True},
}
TRACES: dict[str, dict[str, Any]] = {
    f"trace, {backend}": {"backend": backend, "trace": True} for backend in ("vllm", "trtllm", "sglang")
}
TRACES["trace, bulk"] = {"trace": True, "bulk": True}


class Counter:
    """A batcher that only counts what enters."""

    def __init__(self) -> None:
        self.runs = self.blocks = 0

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        self.runs += 1
        self.blocks += run.stop - run.start

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        pass

    def cleared(self, tier: Tier | None = None) -> None:
        pass

    def end_iteration(self, now: int) -> EventBatch | None:
        return None


def backlog(count: int, block_size: int) -> list[Job]:
    jobs = []
    for index in range(count):
        ids = [index % 8, 8 + index % 8, 1000 + 2 * index, 1001 + 2 * index]
        jobs.append(Job(str(index), TraceChain(ids, 512, 2048, block_size, own=index), 128))
    return jobs


def trace(path: Path, count: int, block_size: int) -> list[Job]:
    jobs = []
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        for at, line in zip(range(count), lines, strict=False):
            row = json.loads(line)
            chain = TraceChain(row["hash_ids"], 512, row["input_length"], block_size, own=at)
            jobs.append(Job(str(at), chain, row["output_length"], arrival=row["timestamp"] * 1_000_000))
    return jobs


def drive(core: EngineCore, jobs: list[Job]) -> None:
    next_job = 0
    while True:
        decision = core.next_decision()
        arrival = jobs[next_job].arrival if next_job < len(jobs) else None
        if decision is None and arrival is None:
            return
        now = min(when for when in (decision, arrival) if when is not None)
        core.advance(now)
        while next_job < len(jobs) and jobs[next_job].arrival == now:
            core.submit(jobs[next_job], now)
            next_job += 1
        core.begin(now)


def once(case: dict[str, Any], count: int, path: Path, counter: Counter | None = None) -> dict[str, float]:
    options = dict(case)
    plans, bulk, from_trace = options.pop("plans", True), options.pop("bulk", False), options.pop("trace", False)
    block_size = options.setdefault("block_size", 64)
    config = EngineConfig(num_gpu_blocks=CAPACITY // block_size, **options)
    core = make_core(config, plans=plans, bulk=bulk, batcher=counter)
    jobs = trace(path, count, block_size) if from_trace else backlog(count, block_size)
    began = time.process_time()
    drive(core, jobs)
    spent = time.process_time() - began
    tokens = sum(job.output for job in jobs)
    return {"cpu_s": spent, "passes": core.passes, "tokens": tokens, "preemptions": core.scheduler.jobs.preemptions}


def fresh(case: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps(case), "--requests", str(args.requests)]
    done = subprocess.run([*command, "--trace", str(args.trace)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--one", help="run one case once and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(once(json.loads(args.one), args.requests, args.trace)))
        return
    if not args.trace.exists():
        sys.exit(f"no trace at {args.trace}: name one with --trace")
    cases = {**BATCHES, **BLOCKS, **BACKENDS, **TRACES}
    print(f"{args.requests} requests, CPU microseconds per")
    print(
        f"{'':16} {'request':>9} {'pass':>8} {'run':>8} {'block':>8} {'token':>8} {'passes':>8} {'runs':>8} {'blocks':>9}"
    )
    for name, case in cases.items():
        counter = Counter()
        once(case, args.requests, args.trace, counter)
        runs = [fresh(case, args) for _ in range(args.repeats)]
        us = statistics.median(run["cpu_s"] for run in runs) * 1e6
        passes, tokens = runs[0]["passes"], runs[0]["tokens"]
        print(
            f"{name:16} {us / args.requests:9.1f} {us / passes:8.1f} {us / counter.runs:8.2f} {us / counter.blocks:8.3f} "
            f"{us / tokens:8.3f} {passes:8,} {counter.runs:8,} {counter.blocks:9,}"
        )


if __name__ == "__main__":
    main()
