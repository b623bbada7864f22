"""Our side of benchmarks/index.py."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from typing import Any

from _index_workload import DEPTHS, KINDS, load, timed_lookups, timed_stores

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


def against_the_peer(peers: str, work: dict[str, Any]) -> dict[str, Any]:
    workload, peer = load(peers, work)
    indexer = Indexer(Identity(16, direct=True))
    for worker in range(work["workers"]):
        indexer.register(Source(stream=str(worker), worker=str(worker)))
    seqs = [0] * work["workers"]

    def make(_: int, event: Any) -> Update:
        worker, parent, blocks = event
        seqs[worker] += 1
        # New lists of new integers, as a decoder makes them.
        hashes = [int(str(key)) for key, _ in blocks]
        return update(worker, seqs[worker] - 1, Stored(hashes=hashes, parent=parent, tokens=None, block_size=16))

    gc.collect()
    before = peer.rss_bytes()
    spent, blocks = timed_stores(workload.events(), make, indexer.apply)
    grown = peer.rss_bytes() - before
    out: dict[str, Any] = {"found": {}}
    out["store_per_block_ns"] = spent / blocks * 1e9
    out["memory_per_block_bytes"] = grown / blocks
    for depth in DEPTHS:
        for kind in KINDS:
            queries = [workload.chained(local) for local in workload.queries(depth, kind, work["queries"])]
            out[f"lookup_{depth}_{kind}_us"], out["found"][f"{depth} {kind}"] = timed_lookups(queries, indexer.matches)
    chain = random.Random(1).choices(range(100_000), k=2048 * 16)
    start = time.process_time()
    for _ in range(10):
        indexer.identity.keys(chain)
    out["chaining_2048_blocks_us"] = (time.process_time() - start) / 10 * 1e6
    removals = []
    for worker in range(min(8, work["workers"])):
        for sequence in workload.placement[worker]:
            gone = workload.chained(workload.local(sequence))[1024:][::-1]
            for at in range(0, len(gone), 64):
                removals.append(update(worker, seqs[worker], Removed(hashes=gone[at : at + 64])))
                seqs[worker] += 1
    start = time.process_time()
    for item in removals:
        indexer.apply(item)
    out["remove_per_block_ns"] = (time.process_time() - start) / (len(removals) * 64) * 1e9
    last = work["workers"] - 1
    start = time.process_time()
    indexer.apply(update(last, seqs[last], Cleared()))
    out["clear_one_worker_us"] = (time.process_time() - start) * 1e6
    return out


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


def best(call: Any, rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    work = json.loads(sys.argv[2])
    print(json.dumps({"scoring": from_tokens()} if work["tokens"] else against_the_peer(sys.argv[1], work)))
