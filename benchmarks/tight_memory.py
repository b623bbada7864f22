"""What routers keep cached before two real vLLM whose memory is tight: same engines, same conversations, by turns.

    make peers ARGS='vllm smg'
    .venv/bin/python benchmarks/tight_memory.py kvyard kvyard:kv smg --rounds 3

Engines run on the CPU with a tiny model of random weights, ``--blocks`` blocks of 32 tokens each. ``--sessions`` conversations
of four turns, of which ``--at-once`` requests are under way at a time: one of five system prompts of 150 words, messages of
10 to 60 words, answers of 16 tokens, up to half a second of thought. Before each run the engines' caches are emptied, so that
all see the same prompts. Reuse is what engines report in ``cached_tokens``, of all prompt tokens. With ``--blocks 4000``
nothing is ever evicted.

``most/mean`` is the tokens that the busier engine computed, by the mean of both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from _peers import peer_python
from gateway import ROOT, routed, shown

sys.path.insert(0, str(ROOT))
from tests.real.engine import MODELS, EngineSettings, RealEngine

WORDS = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


class Load:
    """Conversations, and what engines said of their prompts."""

    def __init__(self, port: int, sessions: int, at_once: int, seed: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.sessions = sessions
        self.seed = seed
        self.turn = asyncio.Semaphore(at_once)
        self.prompt = self.cached = self.exact = self.promised = 0
        self.waited: list[float] = []

    async def run(self) -> None:
        limit, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=limit, timeout=patience) as client:
            await asyncio.gather(*(self.converse(client, number) for number in range(self.sessions)))

    async def converse(self, client: Any, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        system = " ".join(random.Random(f"{self.seed} {number % 5}").choices(WORDS, k=150))
        messages = [{"role": "system", "content": system}]
        for _ in range(4):
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(10, 60)))})
            async with self.turn:
                said = await self.ask(client, messages)
            messages.append({"role": "assistant", "content": said or "x"})
            await asyncio.sleep(rng.random() * 0.5)

    async def ask(self, client: Any, messages: list[dict[str, str]]) -> str:
        body = {"model": "mock", "messages": messages, "max_tokens": 16, "temperature": 0}
        began = time.perf_counter()
        async with client.post(self.url, json=body, headers={"authorization": "Bearer sk-x"}) as reply:
            answer = await reply.json()
            assert reply.status == 200, (reply.status, answer)
        self.waited.append(time.perf_counter() - began)
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.prompt += usage["prompt_tokens"]
        self.cached += cached
        if (decision := reply.headers.get("x-kvyard-decision")) is not None:
            self.promised += 1
            self.exact += int(decision.partition("hit=")[2].partition("/")[0]) * 32 == cached
        return str(answer["choices"][0]["message"]["content"])


def computed(engine: RealEngine) -> float:
    """Prompt tokens that an engine has looked up so far and not found."""
    figures = engine.metrics()
    queries, hits = (sum(figures[name] for name in figures if name.startswith(what)) for what in (QUERIES, HITS))
    return queries - hits


def run(router: str, engines: list[RealEngine], given: argparse.Namespace, seed: int) -> dict[str, float]:
    for engine in engines:
        reply = engine.client.post("/reset_prefix_cache")
        assert reply.status_code == 200, reply.text
    urls = [engine.url for engine in engines]
    events = [(engine.endpoint, engine.replay_endpoint) for engine in engines]
    model = str(MODELS / given.model)
    with routed(router, urls, given.logs, events=events, block_size=32, tokenizer=model) as (port, _):
        before = [computed(engine) for engine in engines]
        load, began = Load(port, given.sessions, given.at_once, seed), time.perf_counter()
        asyncio.run(load.run())
        took = time.perf_counter() - began
        work = [computed(engine) - old for engine, old in zip(engines, before, strict=True)]
    found = {
        "reuse": load.cached / load.prompt,
        "computed, most/mean": max(work) / (sum(work) / len(work)),
        "request, mean ms": sum(load.waited) / len(load.waited) * 1e3,
        "s": took,
    }
    if load.promised:
        found["promises exact"] = load.exact / load.promised
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routers", nargs="*", default=["kvyard", "smg"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", choices=["llama", "gemma3"], default="llama")
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gateway-benchmark")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    python = peer_python("vllm")
    if python is None:
        raise SystemExit(2)
    subprocess.run([python, ROOT / "scripts" / "tiny_models.py", MODELS], check=True)
    settings = EngineSettings(
        model=given.model,
        blocks=given.blocks,
        flags=("--served-model-name", "mock"),
        environment=(("VLLM_SERVER_DEV_MODE", "1"),),  # to empty caches
    )
    rows: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        engines = [RealEngine(Path(python), given.logs / f"vllm{index}.log", settings) for index in range(2)]
        for engine in engines:
            stack.enter_context(engine)
        for turn in range(given.rounds):
            for router in given.routers[turn % len(given.routers) :] + given.routers[: turn % len(given.routers)]:
                found = run(router, engines, given, turn)
                for name, value in found.items():
                    rows.setdefault((router, name), []).append(value)
                said = {name: round(value, 3) for name, value in found.items()}
                print(f"  {router}, round {turn + 1}, load {os.getloadavg()[0]:.1f}: {said}", file=sys.stderr)
    shown(rows, given.routers)


if __name__ == "__main__":
    main()
