"""The live side of a large fleet: what an index of a thousand workers takes, and what decisions take while it is fed.

    python benchmarks/live_scale.py [--workers 1000] [--blocks 100000] [--replicas 4] [--prompt 4096] [--steps 4000]

Workers hold conversations of ``--prompt`` blocks, the first 32 of which are one of eight system prompts. Each conversation is
on ``--replicas`` workers, until each worker holds ``--blocks`` blocks. They say so by events of 64 blocks, which go the whole
way: sequencer, catalog, dedup filter, rows. Memory is by how much the process grew, per block and worker.

Then, in turns, as in a gateway, which is one thread: a worker evicts the end of a conversation, another stores one, and a
prompt of ``--prompt`` blocks is looked up, or routed with all books kept (``route``, first token, end). Times are CPU time of
each call.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from _plain import plain_environment

SIZE = 16
SYSTEM = 32
CHUNK = 64
PEAK = 2
"""Requests under way per worker."""


class Texts:
    """Conversations by number, as keys. A key names its whole prefix: two share none beyond a system prompt."""

    def __init__(self, blocks: int, seed: int) -> None:
        import numpy as np

        self._fresh = np.random.default_rng(seed)
        self._blocks = blocks
        self._systems = [self._keys(SYSTEM) for _ in range(8)]

    def _keys(self, count: int) -> list[int]:
        return self._fresh.integers(1, 1 << 63, count, dtype="uint64").tolist()  # type: ignore[no-any-return]

    def next(self, number: int) -> list[int]:
        return [*self._systems[number % 8], *self._keys(self._blocks - SYSTEM)]


def run(point: dict[str, Any]) -> dict[str, Any]:
    """All of it, in this process."""
    from kvyard.events.types import EventBatch, Removed, Stored
    from kvyard.hashing import algorithm
    from kvyard.index import Identity, Indexer, Source
    from kvyard.router import Router, RouterConfig, RouteRequest

    workers, blocks, length = point["workers"], point["blocks"], point["prompt"]
    rng = random.Random(7)
    texts = Texts(length, 7)
    indexer = Indexer(Identity(SIZE, algorithm("xxh3", "bench", {}), direct=True))
    names = [f"w{at}" for at in range(workers)]
    for name in names:
        indexer.register(Source(stream=name, worker=name))
    seqs = [0] * workers
    clock = time.process_time_ns

    def say(worker: int, *events: Stored | Removed) -> int:
        batch = EventBatch(stream=names[worker], seq=seqs[worker], ts=0.0, events=list(events))
        seqs[worker] += 1
        start = clock()
        indexer.apply_batch(batch)
        return clock() - start

    def stored(worker: int, keys: list[int]) -> int:
        took = 0
        for index in range(0, len(keys), CHUNK):
            parent = keys[index - 1] if index else None
            took += say(worker, Stored(hashes=keys[index : index + CHUNK], parent=parent, tokens=None, block_size=SIZE))
        return took

    gc.collect()
    gc.disable()  # as a gateway freezes what it has; nothing here has cycles
    before, spent = _resident(), 0
    each = max(1, blocks // length)
    rounds = -(-workers * each // point["replicas"])
    turns = [at % workers for at in range(rounds * point["replicas"])]
    rng.shuffle(turns)
    kept: list[tuple[list[int], list[int]]] = []
    sample = max(1, rounds // 2000)
    held = 0
    for number in range(rounds):
        keys = texts.next(number)
        homes = list(dict.fromkeys(turns[number * point["replicas"] :][: point["replicas"]]))
        for home in homes:
            spent += stored(home, keys)
            held += length
        if number % sample == 0:
            kept.append((keys, homes))
    own = sum(sys.getsizeof(keys) for keys, _ in kept)  # the integers themselves are the index's
    grown = _resident() - before - own
    out: dict[str, Any] = {
        "held": held,
        "unique": indexer.backend.usage().blocks,
        "bytes": grown / held,
        "store_ns": spent / held,
    }

    # -- lookups and updates in turns ---------------------------------------------------------------------------------
    roster = indexer.roster([holder for holder in indexer.scorer.standings])
    fed = fed_blocks = 0
    looks: list[int] = []
    for step in range(point["steps"]):
        fed, fed_blocks = _churn(rng, kept, texts, step, say, stored, fed, fed_blocks, Stored, Removed)
        keys, _ = rng.choice(kept)
        start = clock()
        indexer.reaches(roster, keys, length * SIZE + 5)
        looks.append(clock() - start)
    out["lookup_us"] = _spread(looks)
    out["updates_per_s"] = fed_blocks / fed * 1e9

    # -- decisions in turns with updates ------------------------------------------------------------------------------
    for policy in ("kv", "least-time"):
        router = Router(RouterConfig(policy=policy, block_size=SIZE), names, indexer)
        under_way: deque[int] = deque()
        routes: list[int] = []
        rest = 0
        now = 0
        for step in range(point["steps"] + PEAK * workers):
            now += 1_000_000
            if step >= PEAK * workers:
                fed, fed_blocks = _churn(rng, kept, texts, step, say, stored, fed, fed_blocks, Stored, Removed)
            keys, _ = rng.choice(kept)
            request = RouteRequest(step, keys, length * SIZE + 5)
            start = clock()
            router.route(request, now)
            took = clock() - start
            if step >= PEAK * workers:
                routes.append(took)
            under_way.append(step)
            start = clock()
            if step >= 64:
                router.prefill_done(step - 64, now)
            if len(under_way) > PEAK * workers:
                router.finished(under_way.popleft(), now)
            rest += clock() - start
        out[policy] = {"route_us": _spread(routes), "rest_us": rest / (point["steps"] + PEAK * workers) / 1e3}
    return out


def _churn(
    rng: random.Random, kept: Any, texts: Texts, step: int, say: Any, stored: Any, fed: int, blocks: int, *kinds: Any
) -> tuple[int, int]:
    """A worker evicts the second half of a conversation and stores it again later: the index stays as large as it is."""
    _, removed = kinds
    keys, homes = kept[step % len(kept)]
    home = homes[step // len(kept) % len(homes)]
    half = keys[len(keys) // 2 :]
    fed += say(home, removed(hashes=half[::-1]))
    other, places = kept[rng.randrange(len(kept))]
    fed += stored(places[0], other)
    return fed + stored(home, keys), blocks + len(half) + len(other) + len(keys)


def _spread(took: list[int]) -> dict[str, float]:
    took = sorted(took)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    return {name: round(took[int(len(took) * share)] / 1e3, 1) for name, share in at.items()}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=100_000, help="that each worker holds")
    parser.add_argument("--replicas", type=int, default=4, help="workers that hold each conversation")
    parser.add_argument("--prompt", type=int, default=4096, help="blocks of a prompt")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--source", action="store_true", help="measure the uncompiled checkout, not a plain install")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(run(json.loads(args.point))))
        return
    names = ("workers", "blocks", "replicas", "prompt", "steps")
    point = json.dumps({name: getattr(args, name) for name in names})
    done = subprocess.run(
        [sys.executable, __file__, "--point", point],
        stdout=subprocess.PIPE,
        check=False,
        env=plain_environment(args.source),
    )
    if done.returncode:
        sys.exit(f"{point} failed with {done.returncode}")
    found = json.loads(done.stdout)
    print(
        f"{args.workers} workers, {found['held']:,} blocks held, {found['unique']:,} different ones\n"
        f"memory        {found['bytes']:.1f} bytes per block and worker\n"
        f"first stores  {found['store_ns']:.0f} ns a block\n"
        f"updates       {found['updates_per_s']:,.0f} blocks/s of CPU time, in turns with lookups and decisions\n"
        f"lookup        {found['lookup_us']} us, of {args.prompt} blocks"
    )
    for policy in ("kv", "least-time"):
        print(f"{policy:13} {found[policy]['route_us']} us a decision, {found[policy]['rest_us']:.1f} us for the rest")


if __name__ == "__main__":
    main()
