"""What both sides of benchmarks/index.py share: the peer script's workload, and how time and memory are taken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

DEPTHS = (128, 512, 2048)
KINDS = ("hit", "half", "miss")


def load(peers: str, work: dict[str, Any]) -> tuple[Any, Any]:
    """The workload and the peer's module."""
    sys.path.insert(0, peers)
    import dynamo_index  # type: ignore[import-not-found]

    shape = SimpleNamespace(
        workers=work["workers"], blocks=work["blocks"], seq_len=2048, groups=8, prefix=32, replicas=4, chunk=64
    )
    return dynamo_index.Workload(shape), dynamo_index


def timed_stores(
    events: Iterator[Any], make: Callable[[int, Any], Any], apply: Callable[[Any], Any]
) -> tuple[float, int]:
    """Apply all events; the CPU seconds that took, without making them, and how many blocks that were."""
    spent, blocks, number = 0.0, 0, 0
    while batch := list(islice(events, 256)):
        ready = [make(number + at, event) for at, event in enumerate(batch)]
        blocks += sum(len(event[2]) for event in batch)
        number += len(batch)
        start = time.process_time()
        for item in ready:
            apply(item)
        spent += time.process_time() - start
    return spent, blocks


def timed_lookups(
    queries: list[Any], ask: Callable[[Any], dict[Any, int]], rounds: int = 3
) -> tuple[float, list[float]]:
    """Microseconds of CPU per lookup, best of ``rounds``, and what was found: mean best match and workers."""
    answers = [ask(query) for query in queries]
    found = [
        round(sum(max(answer.values(), default=0) for answer in answers) / len(answers), 3),
        round(sum(len(answer) for answer in answers) / len(answers), 3),
    ]
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for query in queries:
            ask(query)
        best = min(best, time.process_time() - start)
    return best / len(queries) * 1e6, found
