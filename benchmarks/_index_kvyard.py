"""Our side of benchmarks/index.py."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from _index_workload import Step, load, lookups, removals, stores, walk

from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Cleared, Removed, Stored
from kvyard.index import Holder, Identity, Indexer, Source


def update(stream: int, seq: int, event: Any) -> Update:
    return Update(
        stream=str(stream),
        topic="",
        epoch=0,
        seq=seq,
        origin=Origin.LIVE,
        state=State.FRESH,
        events=[event],
        dialect="map",
    )


def steps(peers: str, work: dict[str, Any]) -> Iterator[Step]:
    workload, peer = load(peers, work)
    indexer = Indexer(Identity(16, direct=True))
    for worker in range(work["workers"]):
        indexer.register(Source(stream=str(worker), worker=str(worker)))
    seqs = [-1] * work["workers"]

    def stored(_: int, item: Any) -> Update:
        worker, parent, blocks = item
        seqs[worker] += 1
        # New lists of new integers, as a decoder makes them.
        hashes = [int(str(key)) for key, _ in blocks]
        return update(worker, seqs[worker], Stored(hashes=hashes, parent=parent, tokens=None, block_size=16))

    def removed(worker: int, gone: list[int]) -> Update:
        seqs[worker] += 1
        return update(worker, seqs[worker], Removed(hashes=gone))

    yield from stores(workload, peer.rss_bytes, stored, indexer.apply)
    yield from lookups(workload, work["queries"], workload.chained, indexer.matches)
    yield from removals(workload, removed, indexer.apply)
    last = work["workers"] - 1
    cleared = update(last, seqs[last] + 1, Cleared())
    start = time.process_time()
    indexer.apply(cleared)
    yield "clear_one_worker_us", (time.process_time() - start) * 1e6


def from_tokens() -> list[dict[str, Any]]:
    """Scoring raw tokens, each worker having another share of the prompt, against hashing them alone."""
    rows = []
    for tokens, workers in ((32_768, 8), (240_000, 96)):
        for block in (64, 16):
            text = random.Random(tokens).choices(range(100_000), k=tokens)
            indexer = Indexer(Identity(block))
            for worker in range(workers):
                indexer.register(Source(stream=str(worker), worker=str(worker)))
                count = (worker + 1) * tokens // workers // 16
                for first in range(0, count, 512):
                    part = range(first, min(first + 512, count))
                    stored = Stored(
                        hashes=[worker << 40 | at for at in part],
                        parent=worker << 40 | (first - 1) if first else None,
                        tokens=text[part.start * 16 : part.stop * 16],
                        block_size=16,
                    )
                    indexer.apply(update(worker, first // 512, stored))
            hashed = best(lambda indexer=indexer, text=text: indexer.identity.keys(text))
            scored = best(lambda indexer=indexer, text=text: indexer.score(text))
            matched = indexer.score(text).workers[Holder(str(workers - 1))].tokens
            assert matched >= tokens - 2 * block, matched
            rows.append(
                {
                    "tokens": tokens,
                    "workers": workers,
                    "block": block,
                    "hash_ms": hashed * 1e3,
                    "score_ms": scored * 1e3,
                    "ratio": scored / hashed,
                }
            )
    return rows


def chaining() -> float:
    """Microseconds to name the blocks of a prompt as deep as the deepest lookup."""
    text = random.Random(1).choices(range(100_000), k=2048 * 16)
    identity = Identity(16)
    return best(lambda: identity.keys(text)) * 1e6


def best(call: Any, rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if given["tokens"]:
        print(json.dumps({"chaining_us": chaining(), "scoring": from_tokens()}))
    else:
        walk(steps(sys.argv[1], given))
