"""What each eviction policy finds again in one cache, without time: prompts are looked up, computed and let go, one by one.

The conversation trace in blocks of 512 tokens, as its ids are; and a seeded tenth of the Weka sessions in blocks of 64, by
recorded time, all sessions starting together. The share is of prompt tokens. Orders that go by time are told the recorded one.

    python benchmarks/eviction.py [--orders lru,lfu] [--trace conversation|weka] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from _peers import ROOT, conversation_trace

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.blocks.eviction import ORDERS
from kvyard.hashing import TraceChain
from kvyard.replay.facts import TraceFacts
from kvyard.replay.traces import TraceRequest, open_trace
from kvyard.replay.traces.bounds import Accesses, belady, infinite, lru

CAPACITIES = {
    "conversation": [2048, 4096, 8192, 16384, 32768],
    "weka": [16384, 32768, 65536, 131072, 262144],
}
"""In blocks: 1 M to 16.8 M tokens both."""


def pooled(rows: Sequence[TraceRequest], order: str, capacity: int) -> float:
    """The share of prompt tokens that one cache of ``capacity`` blocks finds."""
    size = rows[0].id_block_size
    now = 0
    # One block more for the token that follows each prompt, so that all of a prompt's blocks are whole.
    manager = BlockManager(
        capacity + 2, [GroupSpec(block_size=size)], eviction=order, now=lambda: now, max_model_len=1 << 30
    )
    facts = TraceFacts()
    if order == "belady":
        facts.foresee(rows, size)
    reused = total = 0
    for number, row in enumerate(rows):
        now = row.arrival
        chain = TraceChain(row.ids or (), size, len(row.ids or ()) * size, size, number + 1)
        chain.grow(1)
        request = Request(row.id, chain, facts=facts.of(row))
        total += row.input_length
        if manager.reads_queue:
            manager.note_queue([request])
        hit = manager.lookup(request)
        if manager.allocate(request, request.num_tokens - hit.tokens, hit) is None:
            continue  # longer than the cache
        reused += min(hit.tokens, row.input_length)
        request.num_computed_tokens = request.num_tokens
        manager.free(request)
    return reused / total


def bounds(rows: Sequence[TraceRequest], capacities: Sequence[int]) -> dict[str, list[float]]:
    """The same of the trace's own arithmetic, in blocks: LRU, and the most that any order could find."""
    accesses = Accesses()
    for row in rows:
        accesses.add(row.ids or (), row.input_length, row.id_block_size)
    best = [hits / accesses.blocks for hits in belady(accesses, capacities)]
    return {
        "LRU by stack distance": [hits.token_share for hits in lru(accesses, capacities)],
        "no order finds more (blocks)": best,
        "endless": [infinite(accesses).token_share] * len(capacities),
    }


def weka_tenth(seed: int) -> list[TraceRequest]:
    """A tenth of the sessions, by the times that were recorded."""
    path = ROOT.parent / "shared" / "traces" / "weka" / "claude_code_710.jsonl.xz"
    if not path.exists():
        raise SystemExit(f"{path}: no such file; --trace conversation does without")
    rows = list(open_trace(path))
    sessions = sorted({row.root or row.session or "" for row in rows})
    kept = set(random.Random(seed).sample(sessions, len(sessions) // 10))
    return sorted((row for row in rows if (row.root or row.session) in kept), key=lambda row: row.arrival)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", default=",".join(name for name in ORDERS.ours if name != "priority"))
    parser.add_argument("--trace", choices=CAPACITIES, default=None)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for trace in [given.trace] if given.trace else CAPACITIES:
        rows = list(open_trace(conversation_trace())) if trace == "conversation" else weka_tenth(given.seed)
        capacities = CAPACITIES[trace]
        print(f"{trace}: {len(rows):,} requests, {sum(row.input_length for row in rows):,} prompt tokens")
        print(f"{'blocks':30}", *(f"{capacity:>9,}" for capacity in capacities))
        for order in given.orders.split(","):
            begin = time.process_time()
            shares = [pooled(rows, order, capacity) for capacity in capacities]
            spent = time.process_time() - begin
            print(f"{order:30}", *(f"{share:9.1%}" for share in shares), f"  {spent:5.0f} s", flush=True)
        for name, shares in bounds(rows, capacities).items():
            print(f"{name:30}", *(f"{share:9.1%}" for share in shares))


if __name__ == "__main__":
    main()
