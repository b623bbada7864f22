"""A real vLLM in this process that serves requests, publishes its KV events over ZeroMQ, and shows what its block pool holds.

Run by ``test_mirror.py`` with the Python of an environment that has vLLM: nothing of kvyard is in here. It prints a line of
JSON whenever nothing is under way: what is cached by vLLM's own books, by group, as its events name it. Then it waits for a
line on stdin before it goes on.

    python tests/real/vllm_pool.py MODEL EVENTS_PORT REPLAY_PORT REQUESTS SEED
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.inside_vllm import BLOCK_SIZE, BLOCKS, LONGEST, MODELS, set_environment, write_model

QUIET_EVERY = 500
AT_A_TIME = 32
VOCABULARY = 1000


def held(engine_core: Any) -> dict[str, list[int]]:
    """By group, the hashes of all copies in the pool; one that is there twice comes twice."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

    found: dict[str, list[int]] = {}
    known = engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    for key, blocks in known._cache.items():
        copies = len(blocks) if isinstance(blocks, dict) else 1
        found.setdefault(str(get_group_id(key)), []).extend([maybe_convert_block_hash(get_block_hash(key))] * copies)
    return found


class Workload:
    """Requests with shared prefixes, resends, long and short prompts; some are given up."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._prefixes = [self._text(self.rng.randint(40, 320)) for _ in range(10)]
        self._recent: list[list[int]] = []

    def _text(self, length: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY) for _ in range(length)]

    def next(self) -> tuple[list[int], int]:
        """A prompt, and how many tokens are wanted."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.15 and self._recent:
            prompt = rng.choice(self._recent)
        elif kind < 0.75:
            prefix = rng.choice(self._prefixes)
            prompt = prefix[: rng.choice((len(prefix), rng.randint(1, len(prefix))))] + self._text(rng.randint(1, 100))
        else:
            prompt = self._text(rng.choice((rng.randint(1, 60), rng.randint(60, 300), rng.randint(300, 600))))
        self._recent = [*self._recent[-40:], prompt]
        return prompt, rng.choice((1, rng.randint(1, 8), rng.randint(8, 40)))


def main(model: str, events_port: int, replay_port: int, requests: int, seed: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / model, MODELS[model])
        llm = LLM(
            model=str(Path(folder) / model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            max_num_seqs=24,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=BLOCKS[model],
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=f"tcp://*:{events_port}",
                replay_endpoint=f"tcp://*:{replay_port}",
            ),
        )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    work = Workload(seed)
    served = given_up = preempted = begun = 0
    under_way: set[str] = set()
    schedule = core.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        output = schedule(*args, **kwargs)
        preempted += len(output.preempted_req_ids or ())
        return output

    core.scheduler.schedule = counted
    say({"ready": True})
    while begun < requests:
        sys.stdin.readline()
        stop = min(begun + QUIET_EVERY, requests)
        while begun < stop or engine.has_unfinished_requests():
            while begun < stop and len(under_way) < AT_A_TIME and work.rng.random() < 0.8:
                prompt, output = work.next()
                name = f"r{begun}"
                begun += 1
                how = SamplingParams(temperature=0.0, max_tokens=output, min_tokens=output, ignore_eos=True)
                engine.add_request(name, {"prompt_token_ids": prompt}, how)
                under_way.add(name)
            for answer in engine.step():
                if answer.finished:
                    under_way.discard(answer.request_id)
                    served += 1
            if under_way and work.rng.random() < 0.01:
                name = work.rng.choice(sorted(under_way))
                engine.abort_request([name])
                under_way.discard(name)
                given_up += 1
        while core.scheduler.has_requests():
            core.step()
        say({"served": served, "given_up": given_up, "preempted": preempted, "held": held(core)})
    sys.stdin.readline()


def say(what: dict[str, Any]) -> None:
    print("POOL " + json.dumps(what), flush=True)


if __name__ == "__main__":
    set_environment()
    main(sys.argv[1], *map(int, sys.argv[2:]))
