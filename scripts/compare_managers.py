#!/usr/bin/env python3
"""Drive vLLM's scheduler over its own KV cache manager and over kvyard's, in virtual time, and compare every decision.

Run it with the Python of an environment that has vLLM 0.32 (``make peers ARGS=vllm`` makes one), kvyard on its path:

    PYTHONPATH=src build/peers/vllm/bin/python scripts/compare_managers.py                    one log of every family
    PYTHONPATH=src build/peers/vllm/bin/python scripts/compare_managers.py --seeds 5-9 swa fuzz

No model: the families of ``record_scheduler.py``, with what no tiny model has: states, chunked local attention, drafts, LoRA,
asynchronous scheduling; and then again with blocks that go back late, and with a connector whose loads come at once or in the
background, and sometimes fail (``made_up_connector.py``). Compared are, step by step: tokens, block ids, blocks to zero and to
copy, hits, preemptions, ends, the order of the free blocks, usage, statistics of the prefix cache, KV events, and what the
connector is told. ``inside_vllm.py`` is the same with a real model.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record_scheduler import Recording
from scheduler_families import FAMILIES, workload
from scheduler_under_test import MODEL, SchedulerUnderTest, import_vllm

LATE, LOADS = ", freed late", ", with loads"
"""Ways to run a family, as they are called: blocks go back late, and a connector has part of the prompts."""
MOST_STEPS = 3000


class Compared(SchedulerUnderTest):
    """One that writes down all it is told and all it says."""

    def __init__(
        self, settings: dict[str, Any], model: str, *, inside: bool, late: bool = False, loads: bool = False
    ) -> None:
        """``late``: blocks go back when no step writes to them any more. ``loads``: with a connector."""
        from vllm.config import KVEventsConfig, KVTransferConfig

        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        transfer = KVTransferConfig(
            kv_connector="MadeUpConnector",
            kv_role="kv_both",
            kv_connector_module_path="made_up_connector",
            kv_load_failure_policy="recompute",
        )
        super().__init__(
            settings, model, inside=inside, events=events, transfer=transfer if loads else None, log_stats=True
        )
        self.said: list[str] = []
        self.of_vllm.kv_event_publisher = self
        if late:
            self.of_vllm.defer_block_free = True

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


def run(name: str, seed: int, model: str, *, inside: bool, late: bool) -> tuple[list[str], int]:
    """What one side said, and how many steps it took."""
    settings, timing, requests = workload(name, seed)
    scheduler = Compared(settings, model, inside=inside, late=late)
    recording = Recording(settings, timing, requests, scheduler)
    recording.run()
    outcome = [json.dumps(line, default=str) for line in (*recording.steps, *recording.ends.values())]
    return scheduler.said + outcome, len(recording.steps)


def run_with_loads(name: str, seed: int, model: str, *, inside: bool) -> tuple[list[str], int]:
    """The same with a connector, whose loads end after a number of steps: so requests come by step numbers too."""
    from vllm.v1.outputs import ModelRunnerOutput

    settings, _, requests = workload(name, seed)
    scheduler = Compared(settings, model, inside=inside, loads=True)
    of_vllm = scheduler.of_vllm
    waiting = list(reversed(requests))
    under_way: list[tuple[Any, dict[str, list[int]]]] = []
    step = 0
    # Some come to no end, in vLLM as well: a pool full of loads that wait for each other.
    while (waiting or of_vllm.has_requests() or under_way) and step < MOST_STEPS:
        if waiting and step % 3 == 0:
            scheduler.add(waiting.pop())
        step += 1
        output = scheduler.schedule()
        sampled = {}
        for request in output.num_scheduled_tokens:
            sampled[request] = [] if scheduler.computes_prompt(request) else [step]
        under_way.append((output, sampled))
        if len(under_way) <= settings["async_scheduling"]:
            continue
        output, sampled = under_way.pop(0)
        loaded = of_vllm.connector.step()
        names = list(output.num_scheduled_tokens)
        of_vllm.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={request: index for index, request in enumerate(names)},
                sampled_token_ids=[sampled[request] for request in names],
                kv_connector_output=loaded,
            ),
        )
        scheduler.said += of_vllm.connector.told
        of_vllm.connector.told.clear()
        scheduler.said.append(f"stats {of_vllm.make_stats().prefix_cache_stats} {scheduler.state(with_line=True)}")
    return scheduler.said, step


class TooLong(BaseException):
    """A side has used up its time. No ``Exception``, so that nothing in between takes it for its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises ``TooLong`` where what is inside takes longer: a broken manager may let requests wait for ever."""

    def late(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compare(name: str, seed: int, model: str, way: str, seconds: float) -> bool | None:
    """Print how one log compares, in the way that is named. Each side has ``seconds``.

    Returns true if it is the same, ``None`` if vLLM's own side fails.
    """
    what = f"{name}@{seed}{way}"
    sides: list[tuple[list[str], int]] = []
    for inside in (False, True):
        try:
            with limited(seconds):
                if way == LOADS:
                    sides.append(run_with_loads(name, seed, model, inside=inside))
                else:
                    sides.append(run(name, seed, model, inside=inside, late=way == LATE))
        except ValueError as error:
            if inside or "free blocks from the pool" not in str(error):
                raise
            print(
                f"{what}: vLLM's own manager fails ({error}): it counts too few blocks for a state to load", flush=True
            )
            return None
        except TooLong:
            whose = "kvyard's" if inside else "vLLM's"
            print(f"{what}: {whose} manager came to no end in {seconds:g} s: it is stuck, or --seconds is too few")
            return False
    (theirs, steps), (ours, _) = sides
    if theirs == ours:
        print(f"{what}: {steps} steps, {len(theirs)} lines, identical", flush=True)
        return True
    line = next((line for line, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), -1)
    print(f"{what}: differs at line {line}\n  vLLM    {theirs[line]:.600}\n  kvyard  {ours[line]:.600}", flush=True)
    return False


def ways(name: str, seed: int) -> list[str]:
    """How a family is run."""
    settings, _, _ = workload(name, seed)
    plain_ways = ["", LATE] if settings["async_scheduling"] else [""]
    plain = not settings["num_speculative_tokens"] and "max_loras" not in settings
    return [*plain_ways, LOADS] if plain and settings["enable_prefix_caching"] else plain_ways


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="which [default: all]")
    parser.add_argument("--seeds", default="1", metavar="FIRST-LAST")
    parser.add_argument("--seconds", type=float, default=300.0, help="what one side of one log may take [%(default)g]")
    args = parser.parse_args()
    if unknown := sorted(set(args.families) - set(FAMILIES)):
        parser.error(f"no family is called {', '.join(unknown)}; record_scheduler.py --list says which there are")
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    jobs = [(name, seed, way) for name in args.families or FAMILIES for seed in seeds for way in ways(name, seed)]
    version = import_vllm()
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        results = [compare(name, seed, model, way, args.seconds) for name, seed, way in jobs]
    compared = [same for same in results if same is not None]
    failed = f", {len(results) - len(compared)} not compared" if len(compared) < len(results) else ""
    print(f"vLLM {version}: {sum(compared)} of {len(compared)} logs identical{failed}")
    return 0 if all(compared) else 1


if __name__ == "__main__":
    sys.exit(main())
