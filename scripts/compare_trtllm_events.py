#!/usr/bin/env python3
"""Compare kvyard's batcher with the event manager of TensorRT-LLM's KV cache manager V2, on the same stores and removals.

    PYTHONPATH=src .venv/bin/python scripts/compare_trtllm_events.py --checkout PATH --seeds 1-500 [--record FILE]

PATH is a checkout of TensorRT-LLM in which the event manager of V2 is Python; only that module and those it needs
are imported, and nothing of it is kept. A walk has two or three windows (V2's layer groups) and prompts that share prefixes.
Per iteration and window the events must have the same order and content: removals before the store that followed them, the same
parents, hashes and tokens. V2 ends a batch of removals when any window stores; kvyard only when the same window does, so it has
fewer events, never more: adjacent events of one window that say the same together are joined before they are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvyard.events import Removed, Stored
from kvyard.events.batcher import Batcher
from kvyard.events.types import GroupMeta, Tier
from kvyard.hashing import Run, TokenChain, algorithm

BLOCK = 4
SHA256 = algorithm("sha256_cbor", "trtllm-events")
Op = tuple[str, int, int, int, int]
"""``+`` or ``-``, group, chain, first block, block after the last."""
Said = list[Any]
"""``S``, window, parent or null, hashes, tokens; or ``R``, window, hashes. Hashes are numbered as they come up."""


class Walk:
    """Random stores and removals over prompts that share prefixes."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.windows = rng.choice([[64, 0], [0, 16], [128, 32, 0]])
        """Window of each group; 0 for full attention."""
        trunk = [rng.randrange(1000) for _ in range(6 * BLOCK)]
        self.prompts = [trunk[: BLOCK * rng.randint(0, 6)] for _ in range(5)]
        for prompt in self.prompts:
            prompt += [rng.randrange(1000) for _ in range(BLOCK * rng.randint(2, 6))]
        self.iterations = [list(self._iteration(rng)) for _ in range(20)]

    def _iteration(self, rng: random.Random) -> Iterator[Op]:
        held: set[tuple[int, tuple[int, ...]]] = self.__dict__.setdefault("_held", set())
        for _ in range(rng.randint(0, 12)):
            group, chain = rng.randrange(len(self.windows)), rng.randrange(len(self.prompts))
            prompt = self.prompts[chain]
            names = [tuple(prompt[: (at + 1) * BLOCK]) for at in range(len(prompt) // BLOCK)]
            kept = [(group, name) in held for name in names]
            stores = rng.random() < 0.6
            # A run of blocks that are all missing, or all there.
            starts = [at for at, there in enumerate(kept) if there != stores]
            if not starts:
                continue
            start = stop = rng.choice(starts) if not stores else starts[0]
            while stop < len(names) and kept[stop] != stores and (stop == start or rng.random() < 0.7):
                stop += 1
            for name in names[start:stop]:
                (held.add if stores else held.discard)((group, name))
            yield "+" if stores else "-", group, chain, start, stop


def by_kvyard(windows: list[int], prompts: list[list[int]], iterations: list[list[Op]]) -> list[list[Said]]:
    """Return the events of kvyard's batcher, per iteration."""
    chains = [TokenChain(prompt, BLOCK, SHA256) for prompt in prompts]
    metas = [
        GroupMeta(block_size=BLOCK, kind="sliding_window" if window else "full_attention", window=window or None)
        for window in windows
    ]
    batcher = Batcher(metas)
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    said: list[list[Said]] = []
    for at, ops in enumerate(iterations):
        for sign, group, chain, start, stop in ops:
            run = Run(chains[chain], start, stop)
            (batcher.entered if sign == "+" else batcher.left)(run, group, Tier.G1, True)
        batch = batcher.end_iteration(at)
        told: list[Said] = []
        for event in batch.events if batch is not None else ():
            if isinstance(event, Stored):
                parent = None if event.parent is None else number(event.parent)
                told.append(
                    ["S", event.window or 0, parent, [number(key) for key in event.hashes], list(event.tokens or ())]
                )
            elif isinstance(event, Removed):
                told.append(["R", windows[event.group or 0], [number(key) for key in event.hashes]])
        said.append(told)
    return said


def by_trtllm(
    module: Any, windows: list[int], prompts: list[list[int]], iterations: list[list[Op]]
) -> list[list[Said]]:
    """Return the events of V2's event manager, per iteration."""
    chains = [TokenChain(prompt, BLOCK, SHA256) for prompt in prompts]
    manager = module.KVCacheEventManager(1 << 20, window_size_by_layer_group=dict(enumerate(windows)))
    page = SimpleNamespace(cache_level=0, priority=35)
    root = SimpleNamespace(ordinal=-1)

    def block(chain: int, at: int) -> Any:
        return SimpleNamespace(
            key=bytes(chains[chain].keys[at]),
            ordinal=at,
            tokens=prompts[chain][at * BLOCK : (at + 1) * BLOCK],
            prev=block(chain, at - 1) if at else root,
            storage=[page] * len(windows),
        )

    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    said: list[list[Said]] = []
    for ops in iterations:
        for sign, group, chain, start, stop in ops:
            for at in range(start, stop):
                one = block(chain, at)
                if sign == "-":
                    manager.add_removed_life_cycle_event(one.key, group)
                elif one.key in manager._stored_blocks:
                    manager.add_stored_life_cycle_event_from_block(one, group)
                else:
                    # Of a block that no window has, V2 announces what has a page: the window that stores it.
                    one.storage = [page if window == group else None for window in range(len(windows))]
                    manager.add_stored_block_event_from_block(one)
        manager.flush_iteration_events()
        told: list[Said] = []
        for event in manager.get_latest_events(0):
            data = event.data
            if isinstance(data, module.KVCacheStoredData):
                parent = None if data.parent_hash is None else number(data.parent_hash)
                hashes = [number(stored.block_hash) for stored in data.blocks]
                tokens = [token.token_id for stored in data.blocks for token in stored.tokens]
                told.append(["S", event.window_size, parent, hashes, tokens])
            elif isinstance(data, module.KVCacheRemovedData):
                told.append(["R", event.window_size, [number(key) for key in data.block_hashes]])
        said.append(told)
    return said


def joined(events: list[Said]) -> dict[int, list[Said]]:
    """Return the events of one iteration by window, adjacent ones joined where one could stand for both."""
    lanes: dict[int, list[Said]] = {}
    for kind, window, *content in events:
        lane = lanes.setdefault(window, [])
        last = lane[-1] if lane else None
        if last is not None and last[0] == kind == "R":
            lane[-1] = ["R", [*last[1], *content[0]]]
        elif last is not None and last[0] == kind == "S" and content[0] is not None and last[2][-1] == content[0]:
            lane[-1] = ["S", last[1], [*last[2], *content[1]], [*last[3], *content[2]]]
        else:
            lane.append([kind, *content])
    return lanes


def renumbered(said: list[list[Said]]) -> list[dict[int, list[Said]]]:
    """Join each iteration's events, and number hashes in an order that doesn't depend on how windows are interleaved."""
    numbers: dict[int, int] = {}

    def number(key: int | None) -> int | None:
        return None if key is None else numbers.setdefault(key, len(numbers))

    told = []
    for events in said:
        lanes = joined(events)
        for window in sorted(lanes):
            for event in lanes[window]:
                if event[0] == "R":
                    event[1] = [number(key) for key in event[1]]
                else:
                    event[1], event[2] = number(event[1]), [number(key) for key in event[2]]
        told.append(dict(sorted(lanes.items())))
    return told


def load(checkout: Path) -> Any:
    """Import V2's event manager alone: packages stand in for TensorRT-LLM's own, which need its libraries."""
    path = checkout / "tensorrt_llm"
    for name, folder in (
        ("tensorrt_llm", path),
        ("tensorrt_llm.runtime", path / "runtime"),
        ("tensorrt_llm.runtime.kv_cache_manager_v2", path / "runtime" / "kv_cache_manager_v2"),
    ):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    logger, utils = ModuleType("tensorrt_llm.logger"), ModuleType("tensorrt_llm.runtime.kv_cache_manager_v2._utils")
    logger.logger = SimpleNamespace(warning=print)  # type: ignore[attr-defined]
    utils.temporary_sys_path = lambda _: nullcontext()  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (logger, utils)}
    return import_module("tensorrt_llm.runtime.kv_cache_manager_v2._event_manager")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--seeds", default="1-500", metavar="FIRST-LAST")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the walks and V2's events, for tests")
    args = parser.parse_args()
    module = load(args.checkout)
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    same = ours_all = theirs_all = iterations = 0
    records = []
    for seed in seeds:
        walk = Walk(seed)
        theirs = by_trtllm(module, walk.windows, walk.prompts, walk.iterations)
        ours = by_kvyard(walk.windows, walk.prompts, walk.iterations)
        iterations += len(ours)
        ours_all, theirs_all = ours_all + sum(map(len, ours)), theirs_all + sum(map(len, theirs))
        records.append(
            {"windows": walk.windows, "prompts": walk.prompts, "iterations": walk.iterations, "events": theirs}
        )
        fewer = all(len(mine) <= len(others) for mine, others in zip(ours, theirs, strict=True))
        if renumbered(ours) == renumbered(theirs) and fewer:
            same += 1
        else:
            print(f"walk {seed} differs" if fewer else f"walk {seed}: kvyard has more events")
    print(
        f"{same} of {len(seeds)} walks identical by window, {iterations} iterations: "
        f"{theirs_all} events of V2, {ours_all} of kvyard"
    )
    if args.record is not None:
        args.record.write_text("\n".join(json.dumps(record, separators=(",", ":")) for record in records) + "\n")
    return int(same < len(seeds))


if __name__ == "__main__":
    sys.exit(main())
