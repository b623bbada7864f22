"""The peer's side of benchmarks/index.py: Dynamo's RadixTree, run by the peer's own Python."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from _index_workload import Step, load, lookups, removals, stores, walk

os.environ.setdefault("DYN_LOG", "error")


def steps(peers: str, work: dict[str, Any]) -> Iterator[Step]:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found]

    workload, peer = load(peers, work)
    tree = RadixTree()
    tree.find_matches([1])  # starts its thread

    def event(number: int, data: Any) -> bytes:
        return json.dumps({"event_id": number, "data": data}).encode()

    def stored(number: int, item: Any) -> tuple[int, bytes]:
        worker, parent, blocks = item
        named = [{"block_hash": key, "tokens_hash": local} for key, local in blocks]
        return worker, event(number, {"stored": {"parent_hash": parent, "blocks": named}})

    def removed(worker: int, gone: list[int]) -> tuple[int, bytes]:
        return worker, event(0, {"removed": {"block_hashes": gone}})

    def apply(item: tuple[int, bytes]) -> None:
        tree.apply_event(*item)

    yield from stores(workload, peer.rss_bytes, stored, apply)
    yield from lookups(workload, work["queries"], list, lambda query: tree.find_matches(query).scores)
    yield from removals(workload, removed, apply)
    cleared = event(0, "cleared")
    start = time.process_time()
    tree.apply_event(work["workers"] - 1, cleared)
    yield "clear_one_worker_us", (time.process_time() - start) * 1e6


if __name__ == "__main__":
    walk(steps(sys.argv[1], json.loads(sys.argv[2])))
