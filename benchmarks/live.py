"""What the gateway costs: deciding, reading, and standing in between. Against a direct connection to the same mock.

    .venv/bin/python benchmarks/live.py            # all three parts, a minute or two
    .venv/bin/python benchmarks/live.py decide     # one of: decide, read, proxy

``decide``  Lookup, cost and choice from ready hashes, 100 workers, prompts of 4,096 blocks on average.
``read``    What comes before: parsing the body, tokenising, hashing.
``proxy``   Requests a second, and streams held at an engine's pace, directly and through the gateway, by turns.

CPU time is each process's own; figures by the wall clock suffer from whatever else runs on the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from kvyard.events.types import EventBatch, Stored
from kvyard.index import Identity, Indexer, Source
from kvyard.openai import COMPLETIONS
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.server.gateway.prompting import read_body
from kvyard.server.indexer.names import LocalNames
from kvyard.server.tokens import ByteTokenizer

SIZE = 16
TICKS = os.sysconf("SC_CLK_TCK")


def shown(name: str, values: list[float], unit: str) -> None:
    values = sorted(values)
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    print(f"  {name:52} p50 {statistics.median(values):9.3f}  p99 {p99:9.3f}  max {values[-1]:9.3f} {unit}")


# -- deciding -----------------------------------------------------------------------------------------------------------


def decide(workers: int = 100, blocks: int = 4096, active: int = 400, routes: int = 3000) -> None:
    """Conversations that grow turn by turn; workers announce what they were sent a few decisions later."""
    print(f"decide: {workers} workers, prompts of {blocks} blocks on average, {active} requests under way")
    rng = random.Random(1)
    indexer = Indexer(Identity(SIZE, LocalNames(), direct=True))
    names = [f"w{index}" for index in range(workers)]
    for name in names:
        indexer.register(Source(stream=name, worker=name))
        indexer.apply_batch(EventBatch(stream=name, seq=0, events=[_stored([rng.getrandbits(64)], None)]))
    router = Router(RouterConfig(policy="kv"), names, indexer)
    seqs = dict.fromkeys(names, 1)
    system = [rng.getrandbits(64) for _ in range(64)]
    chains: list[list[int]] = []
    pending: deque[tuple[str, list[int]]] = deque()
    under_way: deque[int] = deque()
    cpu: list[float] = []
    wall: list[float] = []
    sizes: list[int] = []
    for index in range(routes):
        if len(chains) < 64 or rng.random() < 0.1:
            fresh = [rng.getrandbits(64) for _ in range(rng.randrange(blocks // 2, blocks))]
            chains.append(system + fresh)
        chain = chains[rng.randrange(len(chains))]
        request = RouteRequest(index, list(chain), len(chain) * SIZE + 5)
        began, clock = time.process_time_ns(), time.perf_counter_ns()
        decision = router.route(request, index * 1_000_000)
        wall.append((time.perf_counter_ns() - clock) / 1e6)
        cpu.append((time.process_time_ns() - began) / 1e6)
        sizes.append(len(chain))
        pending.append((decision.worker.name, request.keys))  # type: ignore[arg-type]
        under_way.append(index)
        chain += [rng.getrandbits(64) for _ in range(rng.randrange(1, blocks // 8))]
        if len(chain) > 2 * blocks:
            chains.remove(chain)
        if len(pending) > 20:
            name, keys = pending.popleft()
            indexer.apply_batch(EventBatch(stream=name, seq=seqs[name], events=[_stored(keys, None)]))
            seqs[name] += 1
        if len(under_way) > active:
            done = under_way.popleft()
            router.prefill_done(done, index * 1_000_000)
            router.finished(done, index * 1_000_000)
    late = slice(routes // 3, None)
    print(f"  prompts had {statistics.mean(sizes[late]):.0f} blocks on average")
    shown("lookup, cost and choice, CPU", cpu[late], "ms")
    shown("the same by the wall clock", wall[late], "ms")


def _stored(keys: list[int], parent: int | None) -> Stored:
    return Stored(hashes=keys, parent=parent, tokens=None, block_size=SIZE)


# -- reading ------------------------------------------------------------------------------------------------------------


def reading() -> None:
    print("read: what a prompt costs before it can be looked up, CPU")
    identity = Identity(SIZE, LocalNames())
    rng = random.Random(2)
    tokenizer = ByteTokenizer()
    for tokens in (1024, 16_384, 65_536):
        ids = [rng.randrange(128_000) for _ in range(tokens)]
        text = "".join(rng.choice("abcdefgh ") for _ in range(tokens))
        as_ids = json.dumps({"model": "m", "prompt": ids, "stream": True}).encode()
        as_text = json.dumps({"model": "m", "prompt": text, "stream": True}).encode()
        turns = max(5, 2_000_000 // tokens // 10)
        print(f" {tokens} tokens, {tokens // SIZE} blocks")
        for name, action in (
            (f"parse a body of token ids ({len(as_ids) / 1e3:.0f} kB)", lambda: read_body(COMPLETIONS, as_ids)),  # noqa: B023
            (f"parse a body of text ({len(as_text) / 1e3:.0f} kB)", lambda: read_body(COMPLETIONS, as_text)),  # noqa: B023
            ("tokenise it (bytes)", lambda: tokenizer.encode(text)),  # noqa: B023
            ("hash", lambda: identity.keys(ids)),  # noqa: B023
        ):
            took = []
            for _ in range(turns):
                began = time.process_time_ns()
                action()
                took.append((time.process_time_ns() - began) / 1e6)
            shown(name, took, "ms")


# -- standing in between --------------------------------------------------------------------------------------------------


class Process:
    """A kvyard server in a process of its own, with its CPU time."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvyard", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"at (http://[^,\s]+)", line)
            if found:
                self.url = found[1]
                break
        else:
            raise SystemExit(f"kvyard {' '.join(arguments)} didn't start")

    @property
    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


async def requests(url: str, count: int, at_once: int) -> float:
    """Requests a second: short prompts, one token."""
    import aiohttp

    numbers = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> None:
            for number in numbers:
                body = {"prompt": [number % 97] * 128, "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    await reply.read()

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return count / (time.perf_counter() - began)


async def streams(url: str, count: int, tokens: int) -> tuple[int, float, float]:
    """Streams held at once: chunks that came, seconds, and the 99th percentile of gaps between two of one stream, in ms."""
    import aiohttp

    chunks = 0
    gaps: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def follow(number: int) -> None:
            nonlocal chunks
            body = {"prompt": [number] * 64, "max_tokens": tokens, "ignore_eos": True, "stream": True}
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                last = time.perf_counter()
                whole = b""
                async for part in reply.content.iter_any():
                    now = time.perf_counter()
                    gaps.append((now - last) * 1000)
                    last = now
                    chunks += part.count(b"data: ")
                    whole = part
                assert whole.endswith(b"data: [DONE]\n\n")

        began = time.perf_counter()
        await asyncio.gather(*(follow(number) for number in range(count)))
        took = time.perf_counter() - began
    gaps.sort()
    return chunks, took, gaps[int(0.99 * len(gaps))]


def proxy() -> None:
    print("proxy: through the gateway and directly, by turns")
    common = ("--workers", "2", "--port", "0", "--kv-events", "--max-model-len", "4096", "--num-gpu-blocks", "20000")
    fast = Process("mock", *common, "--timing", "fixed:0.5,0.5")
    paced = Process("mock", *common, "--timing", "fixed:20,25")
    for mock, what in ((fast, "requests"), (paced, "streams")):
        gateway = Process("gateway", "--port", "0", "--fleet", mock.url, "--tokenizer", "bytes", "--router", "kv")
        try:
            if what == "requests":
                asyncio.run(requests(gateway.url, 300, 16))
                for turn in range(3):
                    before = mock.cpu
                    rate = asyncio.run(requests(mock.url, 1500, 16))
                    mine = (mock.cpu - before) / 1500 * 1e6
                    print(f"  direct   {rate:7.0f} requests/s, {mine:6.0f} us CPU each in the mock")
                    before = gateway.cpu
                    rate = asyncio.run(requests(gateway.url, 1500, 16))
                    mine = (gateway.cpu - before) / 1500 * 1e6
                    print(f"  gateway  {rate:7.0f} requests/s, {mine:6.0f} us CPU each in the gateway")
            else:
                for count in (50, 100, 200):
                    for name, url in (("direct", mock.url), ("gateway", gateway.url)):
                        before, theirs = gateway.cpu, mock.cpu
                        chunks, took, gap = asyncio.run(streams(url, count, 160))
                        mine, theirs = gateway.cpu - before, mock.cpu - theirs
                        print(
                            f"  {name:8} {count:4} streams: {chunks / took:6.0f} chunks/s, p99 gap {gap:5.0f} ms (of 25), "
                            f"CPU a chunk: mock {theirs / chunks * 1e6:4.0f} us"
                            + (
                                f", gateway {mine / chunks * 1e6:4.0f} us ({mine / took:.0%} of a core)"
                                if name == "gateway"
                                else ""
                            )
                        )
        finally:
            gateway.stop()
            mock.stop()


PARTS = {"decide": decide, "read": reading, "proxy": proxy}

if __name__ == "__main__":
    wanted = sys.argv[1:] or list(PARTS)
    if not set(wanted) <= set(PARTS):
        raise SystemExit(f"choose from {', '.join(PARTS)}")
    for name in wanted:
        PARTS[name]()
