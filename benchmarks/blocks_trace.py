"""Pools alone, driven by the conversation trace: 8 pools of 65,536 blocks of 16 tokens, round-robin.

Beside it, alternating, the Dynamo replay of the same trace with 8 workers (``peers/dynamo_replay.py``), which does more than a
pool does: it also schedules and steps every token. CPU seconds from file path to result, in fresh processes. ``make peers``
makes the peer's environment; without it only our side runs.

    python benchmarks/blocks_trace.py [--repeats 3] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _peers import DYNAMO_REPLAY, conversation_trace, peer_python

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.hashing import TraceChain

WORKERS = 8
POOL_TOKENS = 65_536 * 16
HELD = 16
"""Requests a pool holds at a time before the oldest is released."""


def drive(trace: Path, block_size: int) -> dict[str, Any]:
    """Admit, grow by the output and release every request; returns counts, CPU seconds and peak memory."""
    began = time.process_time()
    specs = [GroupSpec(block_size=block_size)]
    pools = [BlockManager(POOL_TOKENS // block_size, specs) for _ in range(WORKERS)]
    held: list[list[Request]] = [[] for _ in pools]
    count = {"requests": 0, "hit_tokens": 0, "tokens": 0, "new_blocks": 0}
    with trace.open() as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            manager, live = pools[number % WORKERS], held[number % WORKERS]
            chain = TraceChain(row["hash_ids"], 512, row["input_length"], block_size, own=number)
            request = Request(str(number), chain)
            while True:
                hit = manager.lookup(request)
                taken = manager.allocate(request, row["input_length"] - hit.tokens, hit, must_fit=True)
                if taken is not None:
                    break
                manager.free(live.pop(0))
            request.num_computed_tokens = row["input_length"]
            request.running = True
            request.grow(row["output_length"])
            grown = manager.allocate(request, row["output_length"])
            live.append(request)
            if len(live) > HELD:
                manager.free(live.pop(0))
            count["requests"] += 1
            count["hit_tokens"] += hit.tokens
            count["tokens"] += row["input_length"]
            count["new_blocks"] += len(taken[0]) + len(grown[0] if grown else ())
    return {
        **count,
        "cpu_s": time.process_time() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "nodes": sum(len(manager.pool.maps[0].starts) for manager in pools),
    }


def ours(trace: Path, block_size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--trace", str(trace), "--one", str(block_size)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def theirs(python: str, trace: Path, block_size: int) -> dict[str, Any]:
    point = {"trace": "conversation", "workers": WORKERS, "router": "round_robin", "block_size": block_size}
    command = [python, str(DYNAMO_REPLAY), "--conversation", str(trace), "--one", json.dumps(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", type=Path, default=conversation_trace())
    parser.add_argument("--one", type=int, metavar="BLOCK_SIZE", help="run our side once and print JSON")
    args = parser.parse_args()
    if not args.trace.exists():
        sys.exit(f"no trace at {args.trace}")
    if args.one:
        print(json.dumps(drive(args.trace, args.one)))
        return
    peer = peer_python("dynamo")
    print(
        f"{'block':>6} {'kvyard s':>9} {'MB':>5} {'hit share':>9} {'blocks taken':>13} {'Dynamo s':>9} {'MB':>6} {'ratio':>7}"
    )
    for block_size in (16, 64, 512):
        mine, others = [], []
        for _ in range(args.repeats):
            mine.append(ours(args.trace, block_size))
            if peer and block_size == 16:
                others.append(theirs(peer, args.trace, block_size))
        cpu = statistics.median(run["cpu_s"] for run in mine)
        line = f"{block_size:6} {cpu:9.2f} {max(run['peak_mb'] for run in mine):5.0f} "
        line += f"{mine[0]['hit_tokens'] / mine[0]['tokens']:9.4f} {mine[0]['new_blocks']:13,}"
        if others:
            peer_cpu = statistics.median(run["cpu_s"] for run in others)
            line += f" {peer_cpu:9.2f} {max(run['peak_rss_mb'] for run in others):6.0f} {peer_cpu / cpu:6.1f}x"
        print(line)


if __name__ == "__main__":
    main()
