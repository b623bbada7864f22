"""Our side of ``benchmarks/blocks.py``."""

from __future__ import annotations

import json
import sys
from typing import Any

from _blocks_workload import GROUPS, Workload, run

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.events import Batcher
from kvyard.hashing import TokenChain, algorithm

ONE_TOKEN = [7]


class OurSide:
    def __init__(self, work: Workload) -> None:
        specs = [
            GroupSpec(kind=group["type"], block_size=work.block_size, window=group.get("window"))
            for group in GROUPS[work.groups]
        ]
        self.batcher = Batcher([spec.meta for spec in specs]) if work.events else None
        self.manager = BlockManager(work.blocks, specs, max_in_flight_tokens=8192, sink=self.batcher)
        self.algorithm = algorithm(work.hash_algo)
        self.block_size = work.block_size

    def make(self, name: str, tokens: list[int]) -> Request:
        return Request(name, TokenChain(tokens, self.block_size, self.algorithm))

    def admit(self, request: Request) -> tuple[int, int] | None:
        manager = self.manager
        hit = manager.lookup(request)
        got = manager.allocate(request, request.num_tokens - hit.tokens, hit, must_fit=True)
        if got is None:
            return None
        request.num_computed_tokens = request.num_tokens
        request.running = True
        return sum(group.blocks - group.low for group in hit.groups), sum(map(len, got))

    def decode(self, request: Request, steps: int) -> int:
        append, allocate = request.append, self.manager.allocate
        new = 0
        for _ in range(steps):
            append(ONE_TOKEN)
            grown = allocate(request, 1)
            assert grown is not None
            request.num_computed_tokens += 1
            for table in grown:
                new += len(table)
        return new

    def release(self, request: Request) -> int:
        held = sum(table.length for table in request.tables)
        self.manager.free(request)
        return held

    def drain(self) -> int:
        assert self.batcher is not None
        batch = self.batcher.end_iteration(0)
        return len(batch.events) if batch is not None else 0

    def tables(self, request: Request) -> list[list[int]]:
        return self.manager.block_ids(request)


def main(argument: str) -> dict[str, Any]:
    work = Workload(**json.loads(argument))
    return run(OurSide(work), work)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
