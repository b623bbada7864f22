"""Measures block copies between pinned host memory and a GPU, one JSON line per set of jobs that run at once.

Not a test: it needs a CUDA card and PyTorch, and made ``h200_measured.jsonl`` beside it. Run it as
``python3 measure_copies.py > FILE`` on an idle machine. Each job has its own stream; its blocks are copied one by one, and
the blocks of all jobs are enqueued in turn. ``ms`` is the median over repetitions of each job's time from the common
start to its end, by device events. A ``gated`` line holds the card back until the host has enqueued everything, so that
the host's own speed drops out; the others start at once, as an engine's copies would.
"""

from __future__ import annotations

import json
import statistics
from itertools import zip_longest
from typing import Any

import torch

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 2 * MIB
REPEATS = 15

Jobs = list[tuple[str, int]]

SINGLE: list[Jobs] = [[(way, n)] for way in ("d2h", "h2d") for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)]
PAIRS: list[Jobs] = [
    [("d2h", 256), ("h2d", 256)],
    [("d2h", 256), ("h2d", 64)],
    [("d2h", 64), ("h2d", 256)],
    [("d2h", 16), ("h2d", 16)],
    [("h2d", 256), ("h2d", 256)],
    [("h2d", 512), ("h2d", 64)],
    [("h2d", 64), ("h2d", 512)],
    [("d2h", 256), ("d2h", 256)],
    [("d2h", 512), ("d2h", 64)],
    [("d2h", 64), ("d2h", 512)],
    [("h2d", 16), ("h2d", 16)],
]
TRIPLES: list[Jobs] = [
    [("d2h", 256), ("h2d", 256), ("h2d", 256)],
    [("h2d", 256), ("d2h", 256), ("d2h", 256)],
    [("d2h", 256), ("h2d", 128), ("h2d", 128), ("h2d", 128)],
    [("h2d", 256), ("h2d", 128), ("h2d", 64)],
    [("h2d", 128), ("h2d", 128), ("h2d", 128), ("h2d", 128)],
]
SIZES = (64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB)


class Bench:
    def __init__(self) -> None:
        self.host = torch.empty(2048 * MIB, dtype=torch.uint8, pin_memory=True)
        self.card = torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(4)]

    def once(self, jobs: Jobs, size: int, gated: bool) -> list[float]:
        plans = []
        at = 0
        for stream, (way, n) in zip(self.streams, jobs, strict=False):
            ends = range(at, at + n * size, size)
            at += n * size
            here, there = (self.card, self.host) if way == "d2h" else (self.host, self.card)
            plans.append([(stream, there[i : i + size], here[i : i + size]) for i in ends])
        order = [step for steps in zip_longest(*plans) for step in steps if step is not None]
        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in jobs]
        torch.cuda.synchronize()
        if gated:
            torch.cuda._sleep(20_000 * (len(order) + 20))  # about 10 us of the card's time for each copy
        start.record()
        for stream, _ in zip(self.streams, jobs, strict=False):
            stream.wait_event(start)
        for stream, there, here in order:
            with torch.cuda.stream(stream):
                there.copy_(here, non_blocking=True)
        for stream, end in zip(self.streams, ends, strict=False):
            end.record(stream)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for end in ends]

    def line(self, jobs: Jobs, size: int = BLOCK, gated: bool = False) -> dict[str, Any]:
        for _ in range(3):
            self.once(jobs, size, gated)
        runs = [self.once(jobs, size, gated) for _ in range(REPEATS)]
        ms = [statistics.median(times) for times in zip(*runs, strict=False)]
        return {"kind": "copy", "block": size, "gated": gated, "jobs": jobs, "ms": [round(t, 5) for t in ms]}


def main() -> None:
    bench = Bench()
    for gated in (False, True):
        for jobs in SINGLE + PAIRS + TRIPLES:
            print(json.dumps(bench.line(jobs, gated=gated)), flush=True)
        for size in SIZES:
            n = 64 * MIB // size
            alone: list[Jobs] = [[("d2h", n)], [("h2d", n)], [("d2h", n), ("h2d", n)], [("h2d", n), ("h2d", n)]]
            for jobs in alone:
                print(json.dumps(bench.line(jobs, size, gated)), flush=True)


if __name__ == "__main__":
    main()
