#!/usr/bin/env python3
"""Drive vLLM's scheduler over its own KV cache manager and over kvyard's, in virtual time, and compare every decision.

Run it with the Python of an environment that has vLLM 0.32 (``make peers ARGS=vllm`` makes one), kvyard on its path:

    PYTHONPATH=src build/peers/vllm/bin/python scripts/compare_managers.py                    one log of every family
    PYTHONPATH=src build/peers/vllm/bin/python scripts/compare_managers.py --seeds 5-9 swa fuzz

No model: the families of ``record_scheduler.py``, with what no tiny model has: states, chunked local attention, drafts, LoRA,
asynchronous scheduling. Compared are, step by step: tokens, block ids, blocks to zero and to copy, hits, preemptions, ends, the
order of the free blocks, usage, statistics of the prefix cache, KV events. ``inside_vllm.py`` is the same with a real model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from record_scheduler import Recording
from scheduler_families import FAMILIES, workload
from scheduler_under_test import MODEL, SchedulerUnderTest, import_vllm


class Compared(SchedulerUnderTest):
    """One that writes down all it is told and all it says."""

    def __init__(self, settings: dict[str, Any], model: str, *, inside: bool) -> None:
        from vllm.config import KVEventsConfig

        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        super().__init__(settings, model, inside=inside, events=events, log_stats=True)
        self.said: list[str] = []
        self.of_vllm.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        """In the place of vLLM's publisher."""
        for event in batch.events:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            self.said.append(f"{type(event).__name__} {fields}")

    def schedule(self) -> Any:
        output = super().schedule()
        known = output.scheduled_cached_reqs
        new = [(data.req_id, data.num_computed_tokens, data.block_ids) for data in output.scheduled_new_reqs]
        old = list(zip(known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True))
        usage = self.of_vllm.kv_cache_manager.usage
        self.said.append(
            f"step {output.num_scheduled_tokens} new {new} old {old} zero {output.new_block_ids_to_zero} "
            f"copy {output.kv_cache_block_copies} usage {usage}"
        )
        return output

    def update(self, output: Any, sampled: dict[str, list[int]]) -> None:
        super().update(output, sampled)
        stats = self.of_vllm.make_stats()
        self.said.append(f"stats {stats.prefix_cache_stats}")


def run(name: str, seed: int, model: str, *, inside: bool) -> tuple[list[str], int]:
    """What one side said, and how many steps it took."""
    settings, timing, requests = workload(name, seed)
    scheduler = Compared(settings, model, inside=inside)
    recording = Recording(settings, timing, requests, scheduler)
    recording.run()
    outcome = [json.dumps(line, default=str) for line in (*recording.steps, *recording.ends.values())]
    return scheduler.said + outcome, len(recording.steps)


def compare(name: str, seed: int, model: str) -> bool:
    """Print how one log compares; returns whether it is the same."""
    theirs, steps = run(name, seed, model, inside=False)
    ours, _ = run(name, seed, model, inside=True)
    if theirs == ours:
        print(f"{name}@{seed}: {steps} steps, {len(theirs)} lines, identical", flush=True)
        return True
    at = next((at for at, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), -1)
    print(f"{name}@{seed}: differs at line {at}\n  vLLM    {theirs[at]:.600}\n  kvyard  {ours[at]:.600}", flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="which [default: all]")
    parser.add_argument("--seeds", default="1", metavar="FIRST-LAST")
    args = parser.parse_args()
    if unknown := sorted(set(args.families) - set(FAMILIES)):
        parser.error(f"no family is called {', '.join(unknown)}; record_scheduler.py --list says which there are")
    first, _, last = args.seeds.partition("-")
    jobs = [(name, s) for name in args.families or FAMILIES for s in range(int(first), int(last or first) + 1)]
    version = import_vllm()
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        same = sum([compare(name, seed, model) for name, seed in jobs])
    print(f"vLLM {version}: {same} of {len(jobs)} logs identical")
    return 0 if same == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
