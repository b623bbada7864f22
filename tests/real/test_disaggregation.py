"""Two real engines as prefill and decode behind the gateway: the answers are those of one engine, token by token.

The engines share a folder by vLLM's ``ExampleConnector``: the one stores what it computed, the other loads it. It says nothing
in ``kv_transfer_params``; prompts are found by what is in them.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.real.engine import NAME, Engines, RealEngine
from tests.server.gateway.support import Gated

SIZE = 32
CHAT = "/v1/chat/completions"


def connector(folder: Path) -> tuple[str, ...]:
    """vLLM's flags for engines that share ``folder``."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return ("--kv-transfer-config", json.dumps(config))


@contextlib.contextmanager
def roles(first: RealEngine, second: RealEngine, **settings: Any) -> Iterator[Gated]:
    """A gateway before an engine that computes prompts and one that decodes."""
    listed = [
        {
            "url": engine.url,
            "name": name,
            "role": name,
            "events": engine.endpoint,
            "replay": engine.replay_endpoint,
            "block_size": SIZE,
        }
        for engine, name in ((first, "prefill"), (second, "decode"))
    ]
    with Gated(engines=listed, tokenizer="engine", **settings) as gated:
        yield gated.ready(2)


def prompt(seed: int, tokens: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 1000) for _ in range(tokens)]


def metric(engine: RealEngine, name: str) -> float:
    return sum(value for label, value in engine.metrics().items() if label.startswith(f"vllm:{name}"))


def test_answers_are_those_of_one_engine(engines: Engines, tmp_path: Path, figures: Any) -> None:
    alone = engines.get(block_size=SIZE)
    flags = connector(tmp_path / "kv")
    first, second = (engines.get(number, block_size=SIZE, flags=flags) for number in range(2))
    # The connector looks for another number of blocks than it stores where one token follows the last full block.
    lengths = [length for length in (40, 63, 64, 100, 200, 333, 500, 700, 1000, 1500) if length % SIZE != 1]
    asked = {"model": NAME, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    compared = 0
    with roles(first, second) as gated:
        before = {engine: metric(engine, "external_prefix_cache_hits_total") for engine in (first, second)}
        for number, length in enumerate(lengths):
            ids = prompt(number, length)
            wanted = alone.complete(ids, **asked)["choices"][0]["token_ids"]
            reply = gated.post("/v1/completions", prompt=ids, **asked)
            assert "worker=prefill@0" in reply.headers["x-kvyard-prefill"]
            assert "worker=decode@0" in reply.headers["x-kvyard-decision"]
            assert reply.json()["choices"][0]["token_ids"] == wanted, length
            compared += len(wanted)
        # It came from the other engine, and not from computing it once more: all full blocks before the last token.
        loaded = metric(second, "external_prefix_cache_hits_total") - before[second]
        assert loaded == sum((length - 2) // SIZE * SIZE for length in lengths)
        assert metric(first, "external_prefix_cache_hits_total") == before[first]
        # A stream, a conversation.
        messages = [{"role": "user", "content": "Tell me of two engines that share one prompt. " * 8}]
        said = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        wanted = alone.post(CHAT, **said)["choices"][0]["message"]["content"]
        assert gated.post(CHAT, model=NAME, **said).json()["choices"][0]["message"]["content"] == wanted
        parts = []
        with gated.client.stream("POST", CHAT, json={"model": NAME, "stream": True, **said}) as reply:
            assert reply.headers["x-kvyard-prefill"]
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    parts += [one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"]]
        assert "".join(parts) == wanted
        # Without the prefill engine, the other one computes the prompt, and the answer is the same.
        first.kill()
        ids = prompt(99, 300)
        wanted = alone.complete(ids, **asked)["choices"][0]["token_ids"]
        reply = gated.post("/v1/completions", prompt=ids, **asked)
        assert "x-kvyard-prefill" not in reply.headers
        assert reply.json()["choices"][0]["token_ids"] == wanted
        gated.idle()
    figures("disaggregation", {"prompts": len(lengths), "tokens compared": compared, "tokens loaded": loaded})
