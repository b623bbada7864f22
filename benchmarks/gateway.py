"""What a gateway costs and what it is worth, beside routers that others made: same engines, same load, alternating.

    .venv/bin/python benchmarks/gateway.py hop                       # CPU per request and per streamed chunk, ours alone
    .venv/bin/python benchmarks/gateway.py hop kvyard smg vllm-router --rounds 2
    .venv/bin/python benchmarks/gateway.py hop kvyard kvyard@2       # by one process and by two
    .venv/bin/python benchmarks/gateway.py hop kvyard=OLD kvyard=NEW # two installs, as for two_installs.py

Routers run from their own environments (``scripts/peers.sh routers``); their versions are in that script. Everything is on
loopback. CPU time is that of the router's processes by /proc, which other work on the machine disturbs least.

    .venv/bin/python benchmarks/gateway.py conversations kvyard smg
    .venv/bin/python benchmarks/gateway.py mooncake kvyard smg
    .venv/bin/python benchmarks/gateway.py kill kvyard smg

``hop``   Before engines that answer at once (``_null_engines.py``). ``short`` is 400 characters, ``33 KB`` and ``131 KB`` are
          bodies of that size, all chats of a system prompt, which eight share, and a long message. ``on`` continues a prompt
          that was seen before with a last message of its own; ``new`` shares only the system prompt with others, a quarter.
          ``chunk`` is a chunk of 200 streams at 25 ms.
``conversations``
          Before four mock engines (blocks of 64 tokens, 16,384 of them, a byte is a token): 160 sessions of five turns, five
          system prompts of 4,000 bytes, messages of 200 to 1,200, answers of 32 to 200 tokens, three seconds of thought.
``mooncake``
          The same engines; the first 600 requests of Mooncake's conversation trace as text that shares what its ids share.
          Of both loads: what engines say themselves, so in their own time: how much of prompts was cached, the time to first
          token, and how many requests the busiest had, by the mean.
``kill``  Four mock engines, each a process, 30 requests a second, a third of them streamed. One engine is killed with -9 after
          5 s and started again after 10: requests that failed, and when it was used again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import _dynamo_frontend
from _plain import plain_environment

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / "build" / "peers"
TICKS = os.sysconf("SC_CLK_TCK")
LENGTHS = {"short": 400, "33 KB": 33_000, "131 KB": 131_000}
AT_ONCE = {"short": 64, "33 KB": 16, "131 KB": 8}
COUNTS = {"short": 3000, "33 KB": 800, "131 KB": 300}
WORDS = (ROOT / "README.md").read_text(encoding="utf-8").encode("ascii", "ignore").decode().split()


# -- processes ----------------------------------------------------------------------------------------------------------


_PORTS = iter(random.Random(os.getpid()).sample(range(21_000, 31_000, 30), 300))


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free, and that weren't given out before."""
    for first in _PORTS:
        opened = []
        try:
            for port in range(first, first + count):
                opened_socket = socket.socket()
                opened.append(opened_socket)
                opened_socket.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for opened_socket in opened:
                opened_socket.close()
    raise SystemExit("there are no free ports")


def family(pid: int) -> list[int]:
    """A process and all that came from it."""
    processes, index = [pid], 0
    while index < len(processes):
        for task in Path(f"/proc/{processes[index]}/task").glob("*/children"):
            processes += [int(child) for child in task.read_text().split()]
        index += 1
    return processes


def cpu_seconds(pid: int) -> float:
    """Of a process and all that came from it, with its threads. By the scheduler where it says, else by clock ticks."""
    total = 0.0
    for process in family(pid):
        try:
            schedules = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/schedstat")]
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = (int(fields[11]) + int(fields[12])) / TICKS
        exact = sum(int(words[0]) for words in schedules) / 1e9
        # Threads that have ended are in the ticks alone.
        total += exact if exact and abs(exact - ticks) < 0.05 + 0.02 * ticks else ticks
    return total


def resident(pid: int) -> float:
    """MiB of a process and all that came from it."""
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def running(command: list[str], log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in ``log``, ended with all that came from it."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **more}, cwd=log.parent, start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


# -- routers ------------------------------------------------------------------------------------------------------------


def command(
    router: str, port: int, engines: list[str], *, events: list[tuple[str, str]], block_size: int, tokenizer: str
) -> list[str]:
    """How a router is started at ``port`` before ``engines``. ``NAME:VALUE`` is a policy of its own,
    ``kvyard@2`` is two processes.
    """
    name, _, policy = router.partition(":")
    name, _, processes = name.partition("@")
    bin_ = PEERS / name / "bin"
    # By its Python: a script's first line has the folder that the environment was made in.
    script = (str(bin_ / "python"), str(bin_ / name))
    if name == "kvyard":
        described = [
            f"{url},block_size={block_size}"
            + (f",events={events[index][0]},replay={events[index][1]}" if events else "")
            for index, url in enumerate(engines)
        ]
        given = [part for engine in described for part in ("--engine", engine)]
        # The package as it was installed plainly, or with --source as it lies in the checkout.
        return [
            *(sys.executable, "-m", "kvyard", "gateway", "--port", str(port), "--tokenizer", tokenizer),
            *("--router", policy or "least-time", "--processes", processes or "1", *given),
        ]
    metrics = ("--prometheus-port", str(port + 1), "--worker-startup-check-interval", "1")
    here = ("--host", "127.0.0.1", "--port", str(port))
    chosen = ("--policy", policy or "cache_aware", "--worker-urls", *engines)
    if name == "smg":
        return [*script, "launch", *here, *chosen, "--backend", "vllm", *metrics, "--log-level", "warn"]
    if name == "sglang-router":
        return [script[0], "-m", "sglang_router.launch_router", *here, *chosen, *metrics, "--log-level", "warn"]
    if name == "vllm-router":
        return [*script, *here, *chosen, *metrics, "--log-level", "warning"]
    if name == "dynamo":
        return _dynamo_frontend.frontend(port, policy, block_size)
    if name == "litellm":
        return [*script, *here, "--config", "litellm.yaml", "--num_workers", "1", "--telemetry", "False"]
    raise SystemExit(f"there is no router {name}: choose kvyard, smg, sglang-router, vllm-router, dynamo or litellm")


def litellm_config(engines: list[str]) -> str:
    models = [
        {"model_name": "mock", "litellm_params": {"model": "hosted_vllm/mock", "api_base": f"{url}/v1", "api_key": "x"}}
        for url in engines
    ]
    routing = {"routing_strategy": "simple-shuffle", "num_retries": 2}
    return json.dumps({"model_list": models, "router_settings": routing, "litellm_settings": {"drop_params": True}})


LITELLM = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


@contextmanager
def routed(
    router: str,
    engines: list[str],
    folder: Path,
    *,
    events: list[tuple[str, str]] | None = None,
    block_size: int = 16,
    tokenizer: str = "bytes",
    pace_ms: float = 0.0,
) -> Iterator[tuple[int, int]]:
    """A router before ``engines``: its port and its process, once it answers.

    ``tokenizer`` is kvyard's. ``pace_ms`` is how workers of Dynamo answer that have no engine behind them.
    """
    port = free_ports(3)
    more: dict[str, str] = {}
    log = folder / f"{re.sub('[:=/]', '-', router)}.log"
    router, _, install = router.partition("=")
    if install:
        more = {"PYTHONPATH": install}
    if router.startswith("litellm"):
        (folder / "litellm.yaml").write_text(litellm_config(engines))
        more = LITELLM
    if router.startswith("dynamo"):
        _dynamo_frontend.prepare(folder)
        more = _dynamo_frontend.environment(folder)
    given = command(router, port, engines, events=events or [], block_size=block_size, tokenizer=tokenizer)
    with ExitStack() as stack:
        if router.startswith("dynamo"):
            started = _dynamo_frontend.workers(engines, events or [], folder, block_size, 16_384, pace_ms)
            for index, worker in enumerate(started):
                stack.enter_context(running(worker, folder / f"dynamo-worker{index}.log", **more))
        process = stack.enter_context(running(given, log, **more))
        # Of several processes all have to know their engines: so many connections reach each of them.
        warm = [chat("Are you there?", ["Well?"], 1)] * (32 if "@" in router else 1)
        for _ in range(300):
            if process.poll() is not None:
                raise SystemExit(f"{router} didn't start:\n{log.read_text()[-2000:]}")
            try:
                asyncio.run(asyncio.wait_for(send_all(port, warm, len(warm)), 5))
                break
            except (OSError, AssertionError, TimeoutError):
                time.sleep(0.2)
        else:
            raise SystemExit(f"{router} doesn't answer:\n{log.read_text()[-2000:]}")
        yield port, process.pid


# -- load ---------------------------------------------------------------------------------------------------------------


def text(length: int, rng: random.Random) -> str:
    parts: list[str] = []
    size = 0
    while size < length:
        parts.append(rng.choice(WORDS))
        size += len(parts[-1]) + 1
    return " ".join(parts)[:length]


def chat(system: str, said: list[str], tokens: int, streamed: bool = False) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[index % 2], "content": one} for index, one in enumerate(said)]
    body = {"model": "mock", "messages": messages, "max_tokens": tokens, **({"stream": True} if streamed else {})}
    return json.dumps(body).encode()


class Bodies:
    """Chats of one length; see the top."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.rng = random.Random(seed)
        self.systems = [text(length // 4, self.rng) for _ in range(8)]
        self.long = [text(length * 3 // 4, self.rng) for _ in range(16)]

    def seen(self) -> list[bytes]:
        return [chat(self.systems[index % 8], [one], 1) for index, one in enumerate(self.long)]

    def on(self, count: int) -> list[bytes]:
        """Each continues one that was seen."""
        short = min(200, self.length // 4)
        return [
            chat(self.systems[index % 8], [self.long[index % 16], "Yes.", text(short, self.rng)], 1)
            for index in range(count)
        ]

    def new(self, count: int) -> list[bytes]:
        return [chat(self.systems[index % 8], [text(self.length * 3 // 4, self.rng)], 1) for index in range(count)]


class Caller(asyncio.Protocol):
    """Sends one body after the other over one connection."""

    def __init__(self, bodies: Iterator[bytes], done: asyncio.Future[None], tally: Tally) -> None:
        self.bodies, self.done, self.tally = bodies, done, tally
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        body = next(self.bodies, None)
        if body is None:
            if not self.done.done():
                self.done.set_result(None)
            return
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer sk-x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.received = b""
        self.transport.write(head.encode() + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        received = self.received = self.received + data if self.received else data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        if b"chunked" in received[:end].lower():
            self.tally.chunks += data.count(b"data: {")
            self.received = received[:end] + b"\r\n\r\n" + received[-32:]
            if not received.endswith(b"0\r\n\r\n"):
                return
        else:
            head = received[:end].lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(received) < end + 4 + length:
                return
        if not received.startswith(b"HTTP/1.1 200"):
            self.tally.failed += 1
            if not self.done.done():
                self.done.set_exception(AssertionError(received[:500]))
            return
        self.tally.answered += 1
        self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the router closed the connection"))


class Tally:
    answered = chunks = failed = 0


async def send_all(port: int, bodies: list[bytes], at_once: int) -> Tally:
    """Send all, so many at a time. Raises ``AssertionError`` for an answer that isn't 200."""
    loop, tally, left = asyncio.get_running_loop(), Tally(), iter(bodies)
    ends = [loop.create_future() for _ in range(at_once)]
    opened = [
        (await loop.create_connection(lambda end=end: Caller(left, end, tally), "127.0.0.1", port))[0] for end in ends
    ]
    try:
        await asyncio.gather(*ends)
    finally:
        for connection in opened:
            connection.close()
    return tally


# -- the hop ------------------------------------------------------------------------------------------------------------


def measured(port: int, pid: int, bodies: list[bytes], at_once: int) -> tuple[Tally, float, float]:
    """What became of them, CPU seconds of the router, and seconds."""
    before, began = cpu_seconds(pid), time.perf_counter()
    tally = asyncio.run(send_all(port, bodies, at_once))
    return tally, cpu_seconds(pid) - before, time.perf_counter() - began


def hop(routers: list[str], rounds: int, folder: Path) -> None:
    ports = free_ports(8)
    null = [sys.executable, str(HERE / "_null_engines.py")]
    with (
        running([*null, str(ports), "4"], folder / "null.log"),
        running([*null, str(ports + 4), "4", "25"], folder / "paced.log"),
    ):
        rows: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds):
            for router in routers[turn % len(routers) :] + routers[: turn % len(routers)]:
                engines = [f"http://127.0.0.1:{ports + index}" for index in range(4)]
                with routed(router, engines, folder) as (port, pid):
                    for name, length in LENGTHS.items():
                        bodies, count = Bodies(length, turn), COUNTS[name]
                        asyncio.run(send_all(port, bodies.seen() * 2, 8))
                        for kind in ("on", "new"):
                            sent = bodies.on(count) if kind == "on" else bodies.new(count)
                            _, cpu, took = measured(port, pid, sent, AT_ONCE[name])
                            rows.setdefault((router, f"{name} {kind}, ms"), []).append(cpu / count * 1e3)
                            if name == "short" and kind == "on":
                                rows.setdefault((router, "short, requests/s"), []).append(count / took)
                    rows.setdefault((router, "memory, MiB"), []).append(resident(pid))
                engines = [f"http://127.0.0.1:{ports + 4 + index}" for index in range(4)]
                with routed(router, engines, folder, pace_ms=25.0) as (port, pid):
                    rng = random.Random(turn)
                    streams = [chat(text(100, rng), [text(300, rng)], 160, streamed=True) for _ in range(200)]
                    tally, cpu, _ = measured(port, pid, streams, 200)
                    assert tally.chunks >= 200 * 16, tally.chunks  # some routers leave max_tokens out
                    rows.setdefault((router, "chunk, us"), []).append(cpu / tally.chunks * 1e6)
                print(f"  {router}, round {turn + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    shown(rows, routers)


# -- what it is worth ---------------------------------------------------------------------------------------------------

BLOCK = 64
TTFT = "vllm:time_to_first_token_seconds"
WANTED = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", f"{TTFT}_sum", f"{TTFT}_count")


def mock(port: int, workers: int, speed: float, blocks: int = 16_384) -> list[str]:
    """``workers`` mock engines from ``port`` on, with events 10 and their replay 20 ports further."""
    return [
        *(sys.executable, "-m", "kvyard", "mock", "--workers", str(workers), "--port", str(port)),
        *(
            "--kv-events-endpoint",
            f"tcp://127.0.0.1:{port + 10}",
            "--kv-events-replay-endpoint",
            f"tcp://127.0.0.1:{port + 20}",
        ),
        *("--speed", str(speed), "--num-gpu-blocks", str(blocks), "--block-size", str(BLOCK)),
        *("--max-model-len", "131072", "--served-model-name", "mock"),
    ]


def fleet_of(port: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The addresses of four mock engines, and of their events."""
    urls = [f"http://127.0.0.1:{port + index}" for index in range(4)]
    return urls, [
        (f"tcp://127.0.0.1:{port + 10 + index}", f"tcp://127.0.0.1:{port + 20 + index}") for index in range(4)
    ]


def engine_figures(url: str) -> tuple[dict[str, float], dict[float, float]]:
    """What an engine has counted, and its times to first token by bucket."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    figures, buckets = dict.fromkeys(WANTED, 0.0), dict[float, float]()
    for line in lines:
        name, _, value = line.rpartition(" ")
        bare = name.partition("{")[0]
        if bare in figures:
            figures[bare] += float(value)
        elif bare == f"{TTFT}_bucket":
            edge = float(name.partition('le="')[2].partition('"')[0])
            buckets[edge] = buckets.get(edge, 0.0) + float(value)
    return figures, buckets


def quantile(buckets: dict[float, float], share: float) -> float:
    """By straight lines between the edges of buckets."""
    wanted, low, below = share * max(buckets.values()), 0.0, 0.0
    for edge in sorted(buckets):
        if buckets[edge] >= wanted:
            return low if math.isinf(edge) else low + (edge - low) * (wanted - below) / max(1e-9, buckets[edge] - below)
        low, below = edge, buckets[edge]
    return low


def paragraph(name: object, length: int) -> str:
    """The same text for the same name."""
    return f"[{name}] {text(length, random.Random(str(name)))}"[:length]


class Client:
    """Sends requests and counts what comes of them."""

    def __init__(self, session: Any, port: int) -> None:
        self.session, self.url = session, f"http://127.0.0.1:{port}"
        self.failed: list[str] = []
        self.promises: list[tuple[int, int]] = []
        """Tokens that were promised of a cache, and that were found there, where the router says what it promises."""

    async def ask(self, path: str, **body: Any) -> str:
        """Returns the text of the answer; empty where it failed."""
        text: list[str] = []
        promised, cached, whole = None, 0, False
        body |= {"model": "mock", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        headers = {"authorization": "Bearer sk-x"}
        try:
            async with self.session.post(self.url + path, json=body, headers=headers) as reply:
                if reply.status != 200:
                    raise ConnectionError(f"{reply.status} {(await reply.text())[:100]}")
                if (decision := reply.headers.get("x-kvyard-decision")) is not None:
                    promised = int(decision.partition("hit=")[2].partition("/")[0]) * BLOCK
                async for line in reply.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        whole = True
                        continue
                    event = json.loads(line[6:])
                    for choice in event.get("choices") or ():
                        text.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
                    if (usage := event.get("usage")) and (details := usage.get("prompt_tokens_details")):
                        cached = details.get("cached_tokens") or 0
            if not whole:
                raise ConnectionError("the stream broke off")
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}"[:200])
            return ""
        if promised is not None:
            self.promises.append((promised, cached))
        return "".join(text)


async def converse(client: Client, speed: float, sessions: int = 160, turns: int = 5) -> int:
    systems = [paragraph(f"system {index}", 4000) for index in range(5)]

    async def one(number: int) -> None:
        rng = random.Random(number)
        messages = [{"role": "system", "content": systems[number % 5]}]
        await asyncio.sleep(rng.random() * 10 / speed)
        for turn in range(turns):
            messages.append({"role": "user", "content": paragraph(f"{number}.{turn}", rng.randint(200, 1200))})
            answer = await client.ask("/v1/chat/completions", messages=messages, max_tokens=rng.randint(32, 200))
            messages.append({"role": "assistant", "content": answer or "Well."})
            await asyncio.sleep(rng.expovariate(1 / 3) / speed)

    await asyncio.gather(*(one(number) for number in range(sessions)))
    return sessions * turns


async def mooncake(client: Client, speed: float, limit: int = 600) -> int:
    with lzma.open(ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz", "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(limit), strict=False)]
    prompts = ["".join(paragraph(one, 512) for one in row["hash_ids"])[: row["input_length"]] for row in rows]
    began = time.perf_counter() + 0.5

    async def one(row: dict[str, Any], prompt: str) -> None:
        await asyncio.sleep(began + row["timestamp"] / 1000 / speed - time.perf_counter())
        await client.ask("/v1/completions", prompt=prompt, max_tokens=max(1, row["output_length"]))

    await asyncio.gather(*(one(row, prompt) for row, prompt in zip(rows, prompts, strict=True)))
    return limit


def worth(load: Any, routers: list[str], rounds: int, folder: Path, speed: float) -> None:
    import aiohttp

    async def drive(port: int) -> tuple[Client, int]:
        limit, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=limit, timeout=patience, read_bufsize=1 << 22) as session:
            client = Client(session, port)
            return client, await load(client, speed)

    rows: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds):
        for router in routers[turn % len(routers) :] + routers[: turn % len(routers)]:
            port = free_ports(24)
            urls, events = fleet_of(port)
            with running(mock(port, 4, speed), folder / "mock.log"):
                wait_for(urls)
                with routed(router, urls, folder, events=events, block_size=BLOCK) as (at, pid):
                    before, cpu = [engine_figures(url) for url in urls], cpu_seconds(pid)
                    client, count = asyncio.run(drive(at))
                    after = [engine_figures(url) for url in urls]
                    cpu = cpu_seconds(pid) - cpu
            figures = [
                {name: new[0][name] - old[0][name] for name in WANTED} for old, new in zip(before, after, strict=True)
            ]
            total = {name: sum(figure[name] for figure in figures) for name in WANTED}
            buckets: dict[float, float] = {}
            for old, new in zip(before, after, strict=True):
                for edge, value in new[1].items():
                    buckets[edge] = buckets.get(edge, 0.0) + value - old[1].get(edge, 0.0)
            requests = [figure[WANTED[3]] for figure in figures]
            shares = {
                "cached share": total[WANTED[1]] / total[WANTED[0]],
                "TTFT mean, ms": total[WANTED[2]] / total[WANTED[3]] * 1e3,
                "TTFT p90, ms": quantile(buckets, 0.9) * 1e3,
                "most/mean requests": max(requests) / (sum(requests) / 4),
                "failed": len(client.failed),
                "CPU, ms a request": cpu / count * 1e3,
            }
            if client.promises:
                shares["promises exact"] = sum(a == b for a, b in client.promises) / len(client.promises)
            for name, value in shares.items():
                rows.setdefault((router, name), []).append(value)
            heading = f"  {router}, round {turn + 1}, load {os.getloadavg()[0]:.1f}, {client.failed[:1]}"
            print(heading, {name: round(value, 3) for name, value in shares.items()}, file=sys.stderr)
    shown(rows, routers)


def wait_for(urls: list[str]) -> None:
    """Until all answer."""
    for url in urls:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise SystemExit(f"{url} doesn't answer")


# -- an engine that dies ------------------------------------------------------------------------------------------------


def kill(routers: list[str], rounds: int, folder: Path, speed: float) -> None:
    rows: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds):
        for router in routers[turn % len(routers) :] + routers[: turn % len(routers)]:
            port = free_ports(24)
            urls, events = fleet_of(port)
            with ExitStack() as stack:
                engines = []
                for at in range(4):
                    given = mock(port + at, 1, speed, 8192)
                    engines.append(stack.enter_context(running(given, folder / f"mock{at}.log")))
                wait_for(urls)
                at, _ = stack.enter_context(routed(router, urls, folder, events=events, block_size=BLOCK))
                outcome = asyncio.run(killed(at, engines[1], urls[1], mock(port + 1, 1, speed, 8192), folder, stack))
            for name, value in outcome.items():
                rows.setdefault((router, name), []).append(value)
            print(f"  {router}, round {turn + 1}, load {os.getloadavg()[0]:.1f}: {outcome}", file=sys.stderr)
    shown(rows, routers)


async def killed(
    port: int, engine: subprocess.Popen[bytes], url: str, again: list[str], folder: Path, stack: ExitStack
) -> dict[str, float]:
    """Kill an engine under load and start it again. How it went."""
    import aiohttp

    rng, began, used = random.Random(3), time.perf_counter(), math.inf
    systems = [text(1500, rng) for _ in range(6)]
    results: list[str] = []

    async def one(session: Any, number: int) -> None:
        rng, streamed = random.Random(number), number % 3 == 0
        content = [{"role": "system", "content": rng.choice(systems)}, {"role": "user", "content": text(200, rng)}]
        body = {"model": "mock", "messages": content, "max_tokens": rng.randint(10, 60), "stream": streamed}
        first = False
        try:
            async with session.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-x"}
            ) as reply:
                got = b""
                async for part in reply.content.iter_any():
                    first, got = True, got + part
                if reply.status != 200:
                    results.append(f"status {reply.status}")
                elif streamed:
                    results.append("fine" if b"[DONE]" in got else "cut")
                else:
                    results.append("fine" if json.loads(got)["choices"] else "empty")
        except Exception as error:
            results.append("cut" if first else f"failed {type(error).__name__}")

    def served() -> float:
        try:
            return engine_figures(url)[0][WANTED[3]]
        except OSError:
            return 0.0

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
    ) as session:
        tasks, number, fell, back, baseline = [], 0, False, math.inf, 0.0
        while (now := time.perf_counter() - began) < 40:
            if now > 5 and not fell:
                fell = True
                os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()
            if now > 10 and math.isinf(back):
                stack.enter_context(running(again, folder / "mock-again.log"))
                await asyncio.to_thread(wait_for, [url])
                back, baseline = time.perf_counter() - began, await asyncio.to_thread(served)
            if math.isinf(used) and not math.isinf(back) and number % 10 == 0:
                if await asyncio.to_thread(served) > baseline:
                    used = time.perf_counter() - began - back
                elif now > 38:
                    break
            if not math.isinf(used) and now > back + used + 2:
                break
            tasks.append(asyncio.create_task(one(session, number)))
            number += 1
            await asyncio.sleep(max(0.0, number / 30 - (time.perf_counter() - began)))
        await asyncio.gather(*tasks)
    bad = [one for one in results if one != "fine"]
    return {
        "requests": len(results),
        "failed": sum(one != "cut" for one in bad),
        "streams cut": sum(one == "cut" for one in bad),
        "used again after, s": used,
    }


def shown(rows: dict[tuple[str, str], list[float]], routers: list[str]) -> None:
    """A table with a column for each router: medians, and all values where there are several."""
    for what in dict.fromkeys(what for _, what in rows):
        cells = []
        for router in routers:
            values = rows.get((router, what), [])
            cell = f"{statistics.median(values):.3g}" if values else "-"
            if len(values) > 1:
                cell += f" ({min(values):.3g}-{max(values):.3g})"
            cells.append(f"{router} {cell}")
        print(f"{what:24} " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hop", "conversations", "mooncake", "kill"])
    parser.add_argument("routers", nargs="*", default=["kvyard"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--speed", type=float, default=2.0, help="of the mock engines, but for hop")
    parser.add_argument(
        "--source", action="store_true", help="measure the uncompiled source instead of a plain install"
    )
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gateway-benchmark")
    given = parser.parse_args()
    os.environ.update(plain_environment(given.source))
    given.logs = given.logs.absolute()
    given.logs.mkdir(parents=True, exist_ok=True)
    if given.what == "hop":
        hop(given.routers, given.rounds, given.logs)
    elif given.what == "kill":
        kill(given.routers, given.rounds, given.logs, given.speed)
    else:
        load = converse if given.what == "conversations" else mooncake
        worth(load, given.routers, given.rounds, given.logs, given.speed)


if __name__ == "__main__":
    main()
