"""vLLM's side of ``benchmarks/blocks.py``; run by a Python that has vLLM, with the oracle's path and the workload."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from _blocks_workload import GROUPS, Workload, run


class VllmSide:
    def __init__(self, oracle_path: str, work: Workload) -> None:
        spec = importlib.util.spec_from_file_location("vllm_oracle", oracle_path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        module._import_vllm()
        from vllm.v1.request import RequestStatus

        self.running = RequestStatus.RUNNING
        self.oracle = module.Oracle(
            module.Config(
                num_blocks=work.blocks,
                block_size=work.block_size,
                groups=GROUPS[work.groups],
                events=work.events,
                hash_algo=work.hash_algo,
                max_in_flight_tokens=8192,
            )
        )
        self.manager = self.oracle.manager

    def make(self, name: str, tokens: list[int]) -> Any:
        request = self.oracle.make_request({"req": name, "tokens": tokens})
        del self.oracle.requests[name]
        return request

    def admit(self, request: Any) -> tuple[int, int] | None:
        manager = self.manager
        blocks, hit, _ = manager.get_computed_blocks(request)
        got = manager.allocate_slots(
            request,
            request.num_tokens - hit,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
        )
        if got is None:
            return None
        request.num_computed_tokens = request.num_tokens
        request.status = self.running
        real = sum(1 for table in blocks.blocks for block in table if not block.is_null)
        return real, sum(len(table) for table in got.blocks)

    def decode(self, request: Any, steps: int) -> int:
        allocate = self.manager.allocate_slots
        new = 0
        for _ in range(steps):
            request.append_output_token_ids(7)
            grown = allocate(request, 1)
            assert grown is not None
            request.num_computed_tokens += 1
            for table in grown.blocks:
                new += len(table)
        return new

    def release(self, request: Any) -> int:
        held = sum(len(table) for table in self.manager.coordinator.get_blocks(request.request_id))
        self.manager.free(request)
        return held

    def drain(self) -> int:
        return len(self.manager.take_events())

    def tables(self, request: Any) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids(request.request_id)]


if __name__ == "__main__":
    workload = Workload(**json.loads(sys.argv[2]))
    print(json.dumps(run(VllmSide(sys.argv[1], workload), workload)))
