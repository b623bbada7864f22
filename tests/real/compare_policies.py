"""vLLM's CPU manager with its own LRU beside one with kvyard's, through the same random life. Run it with vLLM's Python.

    compare_policies.py OPERATIONS SEED

Prints how many operations were equal, and how many chunks were evicted on the way; ends with 1 at the first difference.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

CHUNKS = 40


class Life:
    """Requests with prompts that share beginnings, in one manager. The choices come from outside."""

    def __init__(self, **policy: Any) -> None:
        self.manager = CPUOffloadingManager(CHUNKS, **policy)
        self.contexts: dict[int, Any] = {}

    def begin(self, number: int, keys: list[bytes]) -> None:
        context = ReqContext(req_id=str(number))
        for at, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 16 * at)
        self.contexts[number] = context
        self.manager.on_new_request(context)

    def look(self, number: int, keys: list[bytes]) -> list[str]:
        return [self.manager.lookup(key, self.contexts[number]).name for key in keys]

    def store(self, number: int, keys: list[bytes]) -> tuple[list[bytes], list[bytes]] | None:
        made = self.manager.prepare_store(keys, self.contexts[number])
        return None if made is None else (made.keys_to_store, made.evicted_keys)


def main(operations: int, seed: int) -> int:
    rng = random.Random(seed)
    lives = [
        Life(cache_policy="lru"),
        Life(cache_policy="kvyard-lru", cache_policy_module_path="kvyard.vllm.eviction"),
    ]
    texts = [[rng.randbytes(32) for _ in range(12)] for _ in range(30)]
    for text in texts[1:]:
        shared = rng.choice([0, 0, 3, 6])
        text[:shared] = rng.choice(texts)[:shared]
    keys_of = [[make_offload_key(part, 0) for part in text] for text in texts]
    going: dict[int, list[bytes]] = {}
    storing: list[tuple[int, list[bytes]]] = []
    loading: list[tuple[int, list[bytes]]] = []
    evicted = 0
    for number in range(operations):
        what = rng.choice(["begin", "store", "store", "stored", "stored", "load", "loaded", "finish"])
        if what == "begin":
            going[number] = rng.choice(keys_of)
            for life in lives:
                life.begin(number, going[number])
        elif what == "store" and going:
            request = rng.choice(list(going))
            low = rng.randrange(12)
            keys = going[request][low : low + rng.randint(1, 8)]
            ours = [life.store(request, keys) for life in lives]
            if ours[0] != ours[1]:
                print(f"operation {number}: {ours[0]} by vLLM's LRU, {ours[1]} by kvyard's")
                return 1
            if ours[0] is not None:
                evicted += len(ours[0][1])
                storing.append((request, ours[0][0]))
        elif what == "stored" and storing:
            request, keys = storing.pop(rng.randrange(len(storing)))
            success = rng.random() < 0.9
            for life in lives:
                life.manager.complete_store(keys, life.contexts[request], success=success)
        elif what == "load" and going:
            request = rng.choice(list(going))
            found = [life.look(request, going[request]) for life in lives]
            if found[0] != found[1]:
                print(f"operation {number}: {found[0]} by vLLM's LRU, {found[1]} by kvyard's")
                return 1
            keys = [key for key, state in zip(going[request], found[0], strict=False) if state == "HIT"][:5]
            if keys:
                loading.append((request, keys))
                for life in lives:
                    life.manager.prepare_load(keys, life.contexts[request])
        elif what == "loaded" and loading:
            request, keys = loading.pop(rng.randrange(len(loading)))
            for life in lives:
                life.manager.complete_load(keys, life.contexts[request])
        elif what == "finish" and going:
            request = rng.choice(list(going))
            del going[request]
            for life in lives:
                life.manager.on_request_finished(life.contexts[request])
    print(f"{operations} operations equal, {evicted} chunks evicted")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
