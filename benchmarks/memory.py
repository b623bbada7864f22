"""How the gateway's memory grows over an hour of churn: resident size every ten seconds, and the slope of the line through it.

    .venv/bin/python benchmarks/memory.py --minutes 60               # after 24 minutes of warm-up

A gateway (policy ``kv``) and a mock of four workers with KV events, each a process of its own. 200 streams are under way all
the time: conversations of one to four turns that no request before has had, each over a connection of its own and with a
session id of its own; 2 % hang up in the middle. Workers' pools are smaller than that, so they evict all the time. Metrics
and health are asked for every ten seconds, as Prometheus does.

What is meant to be remembered has a bound, and is filled first: the first minutes bring many short answers. ``prefix_bytes`` is
4 MiB instead of 64, so that it is full by then. All of it together takes about a third of a core. Ends with exit code 1 where
the slope is steeper than asked (``--most``, MB a minute).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from _served import served

ROOT = Path(__file__).parent.parent
EVERY = 10.0
"""Seconds between two looks."""
PREFIX_BYTES = 4 << 20
WORKERS = 4
BLOCKS = 12_288
DECODE_MS = 100
SEARCHES, SEARCHED, LONGEST = (
    f"kvyard_gateway_garbage_{name}" for name in ("searches_total", "seconds_total", "longest_seconds")
)
HURRIED = 40
"""Streams with short answers, while memories fill."""


class Counts:
    """What became of requests."""

    def __init__(self) -> None:
        self.whole = 0
        self.hung_up = 0
        self.failed: list[str] = []
        self.under_way = 0


class Churn:
    """Conversations without end, so many at a time as are wanted."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self._host, self._port, self._seed = host, port, seed
        self._serial = 0
        rng = random.Random(seed)
        self._systems = ["".join(rng.choices("abcdefgh \n", k=800)) for _ in range(5)]
        self.counts = Counts()
        self.wanted = 0
        self.hurried = True
        self._running: set[asyncio.Task[None]] = set()

    async def keep_up(self) -> None:
        """Begin a conversation for each that is missing, not all at once."""
        while True:
            if len(self._running) < self.wanted:
                self._serial += 1
                task = asyncio.create_task(self._converse(self._serial))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                await asyncio.sleep(0.02)
            else:
                await asyncio.sleep(0.05)

    async def _converse(self, number: int) -> None:
        rng = random.Random(self._seed * 1_000_003 + number)
        text = rng.choice(self._systems)
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        except OSError as error:
            self.counts.failed.append(str(error))
            await asyncio.sleep(1)
            return
        try:
            for turn in range(rng.randint(1, 4)):
                text += f"\nturn {turn} of {number}: " + "".join(rng.choices("etaoin shrdlu", k=rng.randint(300, 900)))
                if not await self._ask(reader, writer, number, text, rng):
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self.counts.failed.append(f"{type(error).__name__}: {error}")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, text: str, rng: random.Random
    ) -> bool:
        """One request; whether the conversation goes on."""
        tokens = 4 if self.hurried else rng.randint(200, 400)
        asked = {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"X-Session-Id: {self._seed}-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.counts.under_way += 1
        try:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                self.counts.failed.append(answer[:80].decode("latin-1"))
                return False
            if not self.hurried and rng.random() < 0.02:
                await asyncio.sleep(rng.uniform(0, tokens * DECODE_MS / 1000))
                self.counts.hung_up += 1
                return False
            rest = await reader.readuntil(b"\r\n0\r\n\r\n")
            if rest.count(b"data: [DONE]") != 1:
                self.counts.failed.append(f"ends with {rest[-80:]!r}")
                return False
            self.counts.whole += 1
            return True
        finally:
            self.counts.under_way -= 1


def _get(url: str) -> str:
    with urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def resident(pid: int) -> float:
    """MB, by which a million bytes are meant."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found is not None else 0.0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the line of best fit, and its standard error: y a minute, where x is in seconds."""
    n = len(points)
    middle, mean = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - middle) ** 2 for x, _ in points)
    steep = sum((x - middle) * (y - mean) for x, y in points) / spread
    rest = sum((y - mean - steep * (x - middle)) ** 2 for x, y in points)
    return 60 * steep, 60 * (rest / max(1, n - 2) / spread) ** 0.5


async def measure(arguments: argparse.Namespace, url: str, pids: dict[str, int]) -> list[dict[str, float]]:
    """Looks at all processes, from the start of the load."""
    host, port = url.removeprefix("http://").split(":")
    churn = Churn(host, int(port), arguments.seed)
    keeping = asyncio.create_task(churn.keep_up())
    warm, end = arguments.warm * 60, (arguments.warm + arguments.minutes) * 60
    looks: list[dict[str, float]] = []
    began = time.monotonic()
    with Path(arguments.out).open("w", encoding="utf-8") as out:
        while (at := time.monotonic() - began) < end:
            churn.hurried = at < warm * 0.4
            churn.wanted = min(arguments.streams, HURRIED) if churn.hurried else arguments.streams
            said = await asyncio.to_thread(_get, f"{url}/metrics")
            await asyncio.to_thread(_get, f"{url}/health")
            look = {"at": round(at, 1), "whole": churn.counts.whole, "hung_up": churn.counts.hung_up}
            look |= {"failed": len(churn.counts.failed), "under_way": churn.counts.under_way}
            look |= {name: round(resident(pid), 3) for name, pid in pids.items()}
            look |= {name: _metric(said, name) for name in (SEARCHES, SEARCHED, LONGEST)}
            look |= {f"{name} cpu": cpu_seconds(pid) for name, pid in pids.items()}
            looks.append(look)
            out.write(json.dumps(look) + "\n")
            out.flush()
            if keeping.done():
                keeping.result()
            await asyncio.sleep(max(0.0, EVERY - (time.monotonic() - began - at)))
    keeping.cancel()
    for why in churn.counts.failed[:10]:
        print(f"failed: {why}")
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--warm", type=float, default=24.0, help="minutes before; two fifths of them with short answers"
    )
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=float, default=0.05, help="MB a minute")
    parser.add_argument("--out", default=str(ROOT / "build" / "memory.jsonl"), help="every look, as a line of JSON")
    arguments = parser.parse_args()
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    events = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "buffer_steps": 500,
    }
    mock = [
        "mock",
        "--workers",
        str(WORKERS),
        "--kv-events-config",
        json.dumps(events),
        "--num-gpu-blocks",
        str(BLOCKS),
    ]
    mock += ["--timing", f"fixed:5,{DECODE_MS}", "--max-model-len", "8192"]
    gateway = ["gateway", "--tokenizer", "bytes", "--router", "kv", "--set", f"prefix_bytes={PREFIX_BYTES}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(mock, Path(folder), "mock") as (engines, fleet),
        served([*gateway, "--fleet", fleet], Path(folder), "gateway") as (front, url),
    ):
        pids = {"gateway": front.pid, "mock": engines.pid}
        looks = asyncio.run(measure(arguments, url, pids))
    counted = [look for look in looks if look["at"] >= arguments.warm * 60]
    first, last = counted[0], counted[-1]
    minutes = (last["at"] - first["at"]) / 60
    print(
        f"{minutes:.1f} minutes after {arguments.warm:.0f} of warm-up, {arguments.streams} streams: "
        f"{last['whole'] - first['whole']:.0f} requests answered, {last['hung_up'] - first['hung_up']:.0f} hung up, "
        f"{last['failed']:.0f} failed"
    )
    steep = {}
    for name in pids:
        steep[name], error = slope([(look["at"], look[name]) for look in counted])
        halves = [slope([(look["at"], look[name]) for look in part])[0] for part in _halves(counted)]
        busy = (last[f"{name} cpu"] - first[f"{name} cpu"]) / (60 * minutes)
        print(
            f"{name:8} {first[name]:6.1f} to {last[name]:6.1f} MB: {steep[name]:+.4f} MB a minute (± {error:.4f}); "
            f"first half {halves[0]:+.4f}, second {halves[1]:+.4f}; {busy:.0%} of a core"
        )
    print(
        f"searches for garbage: {last[SEARCHES]:.0f}, {1000 * last[SEARCHED] / max(1, last[SEARCHES]):.2f} ms on average, "
        f"{1000 * last[LONGEST]:.1f} the longest, by the clock"
    )
    if steep["gateway"] > arguments.most or last["failed"]:
        sys.exit(1)


def _halves(looks: list[dict[str, float]]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return looks[: len(looks) // 2], looks[len(looks) // 2 :]


if __name__ == "__main__":
    main()
