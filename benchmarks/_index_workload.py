"""What both sides of benchmarks/index.py share: the peer script's workload, and how time and memory are taken.

Both sides go through the same steps in lockstep: each does a step when it is told to and then waits, so that a busy machine
is as busy for one side as for the other. A step is a (figure, value), or a pause with neither.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeAlias

DEPTHS = (128, 512, 2048)
KINDS = ("hit", "half", "miss")
REMOVALS = (("remove_by_64_per_block_ns", range(16), 64), ("remove_one_by_one_per_block_ns", range(16, 24), 1))
"""A figure, whose blocks are removed, and how many per event. Whole sets of replicas, so rows shrink and then go."""
ROUNDS = 5
"""How often each lookup is timed."""

Step: TypeAlias = tuple[str | None, Any]
PAUSE: Step = (None, None)


def load(peers: str, work: dict[str, Any]) -> tuple[Any, Any]:
    """The workload and the peer's module."""
    sys.path.insert(0, peers)
    import dynamo_index  # type: ignore[import-not-found]

    shape = SimpleNamespace(
        workers=work["workers"], blocks=work["blocks"], seq_len=2048, groups=8, prefix=32, replicas=4, chunk=64
    )
    return dynamo_index.Workload(shape), dynamo_index


def stores(
    workload: Any, rss: Callable[[], int], make: Callable[[int, Any], Any], apply: Callable[[Any], Any]
) -> Iterator[Step]:
    """Apply all events: CPU nanoseconds per block, without making them, and by how many bytes the process grew."""
    events = workload.events()
    gc.collect()
    before = rss()
    spent, blocks, number = 0.0, 0, 0
    while batch := list(islice(events, 256)):
        ready = [make(number + index, event) for index, event in enumerate(batch)]
        blocks += sum(len(event[2]) for event in batch)
        number += len(batch)
        start = time.process_time()
        for item in ready:
            apply(item)
        spent += time.process_time() - start
        if number % 1024 == 0:
            yield PAUSE
    grown = rss() - before
    yield "store_per_block_ns", spent / blocks * 1e9
    yield "memory_per_block_bytes", grown / blocks


def lookups(
    workload: Any, count: int, name: Callable[[Any], Any], ask: Callable[[Any], dict[Any, int]]
) -> Iterator[Step]:
    """CPU microseconds per lookup, best of three, several times; and what was found: mean best match, mean workers."""
    for depth in DEPTHS:
        for kind in KINDS:
            queries = [name(query) for query in workload.queries(depth, kind, count)]
            answers = [ask(query) for query in queries]
            yield (
                f"found {depth} {kind}",
                [
                    round(sum(max(answer.values(), default=0) for answer in answers) / count, 3),
                    round(sum(map(len, answers)) / count, 3),
                ],
            )
            for _ in range(ROUNDS):
                best = min(_once(queries, ask) for _ in range(3))
                yield f"lookup_{depth}_{kind}_us", best / count * 1e6


def _once(queries: list[Any], ask: Callable[[Any], Any]) -> float:
    start = time.process_time()
    for query in queries:
        ask(query)
    return time.process_time() - start


def removals(workload: Any, make: Callable[[int, list[int]], Any], apply: Callable[[Any], Any]) -> Iterator[Step]:
    """Evict half of what some workers hold, from the tail: CPU nanoseconds per block."""
    for name, workers, chunk in REMOVALS:
        for worker in workers:
            items = [make(worker, gone) for gone in _evictions(workload, worker, chunk)]
            gc.collect()  # what making them left behind isn't measured
            yield PAUSE
            start = time.process_time()
            for item in items:
                apply(item)
            yield name, (time.process_time() - start) / (len(items) * chunk) * 1e9


def _evictions(workload: Any, worker: int, chunk: int) -> Iterator[list[int]]:
    for sequence in workload.placement[worker]:
        gone = workload.chained(workload.local(sequence))[1024:][::-1]
        for index in range(0, len(gone), chunk):
            yield gone[index : index + chunk]


def walk(steps: Iterator[Step]) -> None:
    """Take a step for every line that comes in, and say what it gave."""
    for _ in sys.stdin:
        step = next(steps, None)
        print(json.dumps(step), flush=True)
        if step is None:
            return
