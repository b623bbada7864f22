"""What a routing decision costs, the index's lookup included, in CPU time.

    .venv/bin/python benchmarks/router.py

Conversations whose prompts grow turn by turn, over a common system prompt, on workers that hold what they were sent and
announce it a few decisions later. Each line has mean, median and 99th percentile of ``Router.route`` alone, and the mean of
everything that belongs to a request (route, prefill_done, finished).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import deque

from kvyard.events.types import EventBatch, Stored
from kvyard.hashing import algorithm
from kvyard.index import Identity, Indexer, Source
from kvyard.router import Router, RouterConfig, RouteRequest

SIZE = 16
BY_INDEX = ("kv", "least-time")
ROUTES = 4000


def conversations(blocks: int, count: int, seed: int) -> list[list[int]]:
    """Chains of keys of ``blocks`` on average: a system prompt of 8 blocks, then turns."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 62))
    system = [next(fresh) for _ in range(8)]
    live: list[list[int]] = []
    out: list[list[int]] = []
    for _ in range(count):
        if not live or rng.random() < 0.3:
            live.append([*system, *(next(fresh) for _ in range(rng.randrange(blocks // 2, blocks)))])
        chain = live[rng.randrange(len(live))]
        out.append(list(chain))
        chain += [next(fresh) for _ in range(rng.randrange(1, blocks // 4))]
        if len(chain) > 2 * blocks or len(live) > 64:
            live.remove(chain)
    return out


def run(policy: str, workers: int, blocks: int, active: int, routes: int = ROUTES) -> float:
    """Print a line of figures. Returns the median seconds of ``route``."""
    indexer = Indexer(Identity(SIZE, algorithm("xxh3", "bench", {}), direct=True))
    names = [f"w{i}" for i in range(workers)]
    for name in names:
        indexer.register(Source(stream=name, worker=name))
    router = Router(RouterConfig(policy=policy, block_size=SIZE), names, indexer if policy in BY_INDEX else None)
    seqs = dict.fromkeys(names, 1)
    for index, name in enumerate(names):
        hello = Stored(hashes=[(1 << 63) + index], parent=None, tokens=None, block_size=SIZE)
        indexer.apply_batch(EventBatch(stream=name, seq=0, ts=0.0, events=[hello]))
    pending: deque[tuple[str, list[int]]] = deque()
    under_way: deque[int] = deque()
    took: list[int] = []
    other = 0
    clock = time.process_time_ns
    chains = conversations(blocks, routes, 1)
    for number, keys in enumerate(chains):
        request = RouteRequest(number, keys, len(keys) * SIZE + 5)
        start = clock()
        decision = router.route(request, number * 10_000_000)
        took.append(clock() - start)
        pending.append((decision.worker.name, keys))
        under_way.append(number)
        start = clock()
        if number >= 8:
            router.prefill_done(number - 8, number * 10_000_000)
        if len(under_way) > active:
            router.finished(under_way.popleft(), number * 10_000_000)
        other += clock() - start
        if len(pending) > 5 and policy in BY_INDEX:
            name, stored = pending.popleft()
            event = Stored(hashes=stored, parent=None, tokens=None, block_size=SIZE)
            indexer.apply_batch(EventBatch(stream=name, seq=seqs[name], ts=0.0, events=[event]))
            seqs[name] += 1
    took = took[len(took) // 4 :]
    micro = [value / 1000 for value in took]
    mean, median = statistics.fmean(micro), statistics.median(micro)
    p99 = sorted(micro)[int(len(micro) * 0.99)]
    average = statistics.fmean(len(keys) for keys in chains)
    rest = mean + other / len(chains) / 1000
    print(
        f"{policy:13} {workers:4} workers {average:6.0f} blocks {active:4} active   "
        f"route mean {mean:7.1f} us  median {median:7.1f}  p99 {p99:7.1f}   with the rest {rest:7.1f}",
        flush=True,
    )
    return median / 1e6


def main() -> None:
    """Print the table."""
    quick = "--quick" in sys.argv
    for policy in ("round-robin", "least-loaded", "approx", "kv", "least-time"):
        run(policy, 8, 160, 40)
    for workers, blocks, active in ((100, 160, 400), (8, 3200, 40), (100, 3200, 400)):
        for policy in BY_INDEX:
            run(policy, workers, blocks, active, 400 if quick else 1500)


if __name__ == "__main__":
    main()
