"""The peer's side of benchmarks/index.py: Dynamo's RadixTree, run by the peer's own Python."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

from _index_workload import DEPTHS, KINDS, load, timed_lookups, timed_stores

os.environ.setdefault("DYN_LOG", "error")


def main(peers: str, work: dict[str, Any]) -> dict[str, Any]:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found]

    workload, peer = load(peers, work)
    tree = RadixTree()
    tree.find_matches([1])  # starts its thread

    def make(number: int, event: Any) -> tuple[int, bytes]:
        worker, parent, blocks = event
        named = [{"block_hash": key, "tokens_hash": local} for key, local in blocks]
        data = {"stored": {"parent_hash": parent, "blocks": named}}
        return worker, json.dumps({"event_id": number, "data": data}).encode()

    gc.collect()
    before = peer.rss_bytes()
    spent, blocks = timed_stores(workload.events(), make, lambda item: tree.apply_event(*item))
    grown = peer.rss_bytes() - before
    out: dict[str, Any] = {"found": {}}
    out["store_per_block_ns"] = spent / blocks * 1e9
    out["memory_per_block_bytes"] = grown / blocks
    for depth in DEPTHS:
        for kind in KINDS:
            queries = list(workload.queries(depth, kind, work["queries"]))
            took, found = timed_lookups(queries, lambda query: tree.find_matches(query).scores)
            out[f"lookup_{depth}_{kind}_us"], out["found"][f"{depth} {kind}"] = took, found
    payloads = []
    for worker in range(min(8, work["workers"])):
        for sequence in workload.placement[worker]:
            gone = workload.chained(workload.local(sequence))[1024:][::-1]
            for at in range(0, len(gone), 64):
                data = {"removed": {"block_hashes": gone[at : at + 64]}}
                payloads.append((worker, json.dumps({"event_id": 0, "data": data}).encode()))
    start = time.process_time()
    for item in payloads:
        tree.apply_event(*item)
    out["remove_per_block_ns"] = (time.process_time() - start) / (len(payloads) * 64) * 1e9
    last = work["workers"] - 1
    start = time.process_time()
    tree.apply_event(last, json.dumps({"event_id": 0, "data": "cleared"}).encode())
    out["clear_one_worker_us"] = (time.process_time() - start) * 1e6
    return out


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
