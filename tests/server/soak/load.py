"""A load that checks every answer: 200 conversations at once, each request with a name of its own, each answer exactly its own.

Answers are the same for the same prompt, whoever gives them, so the first is remembered and the others must equal it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import aiohttp

PROMPTS = 150
"""Different prompts. With their answers more than the workers hold, so that blocks are evicted all the time; and few enough for
each worker to have seen them all soon, since what the index remembers of the past is bounded, but not small."""


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ATTACKS = (
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000,
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: b\r\n" * 100_000,
    HEAD + b"content-length: 4000000\r\n\r\n" + b" " * 3_999_999,
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000,
    HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x-a: b\r\n" * 100_000,
    b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nx-a: b",
    b"\x16\x03\x01\x02\x00\x01" * 10_000,
)
"""What hostile clients send: pipelined requests whose answers they don't read, endless heads, bodies and trailers that never
end, half a request, no HTTP."""


class Load:
    """Streams against one address. ``errors`` is what was wrong, in words."""

    def __init__(self, url: str, streams: int, hostile: float = 0.0, brief: int = 0) -> None:
        """``hostile`` is the share of clients that send what they mustn't. The first ``brief`` requests have short answers:
        they fill what a server keeps of its latest requests.
        """
        self._url = url
        self._brief = brief
        self._hostile = hostile
        self._streams = streams
        self._serial = 0
        self._answers: dict[tuple[int, int], str] = {}
        self.sent: set[str] = set()
        self.answered: set[str] = set()
        self.hung_up = 0
        self.attacks = 0
        self.chunks = 0
        self.tokens = 0
        self.errors: list[str] = []

    async def run(self, seconds: float) -> None:
        """Ask, each stream one request after the other; what is under way at the end is waited for."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=120), read_bufsize=1 << 20
        ) as session:

            async def one(number: int) -> None:
                await asyncio.sleep(number % 50 / 20)  # not all in the same pass
                rng = random.Random(number)
                while loop.time() < end and len(self.errors) < 20:
                    if rng.random() < self._hostile:
                        await self._attack(rng.choice(ATTACKS))
                    else:
                        await self._ask(session, rng)

            await asyncio.gather(*(one(number) for number in range(self._streams)))

    async def _attack(self, data: bytes) -> None:
        """Send bytes as long as they are taken, read nothing, and leave after ten seconds at most."""
        self.attacks += 1
        host, _, port = self._url.removeprefix("http://").partition(":")
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection(host, int(port))
            try:
                async with asyncio.timeout(10):
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(10)
            finally:
                writer.transport.abort()

    async def _ask(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        self._serial += 1
        lengths = (4, 8) if self._serial <= self._brief else (60, 100)
        name, which, most = f"soak-{self._serial}", rng.randrange(PROMPTS), rng.choice(lengths)
        body = {
            "prompt": f"conversation {which % 40} " * 20 + f"turn {which} " * (5 + which % 20),
            "max_tokens": most,
            "ignore_eos": True,
            "stream": rng.random() < 0.95,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        gone = body["stream"] and rng.random() < 0.02
        try:
            async with session.post(f"{self._url}/v1/completions", json=body, headers={"x-request-id": name}) as reply:
                self.sent.add(name)
                if reply.status != 200:
                    self.errors.append(f"{name}: {reply.status} {(await reply.text())[:200]}")
                elif gone:
                    await reply.content.readany()
                    self.hung_up += 1  # and the rest is given up
                    self.sent.discard(name)
                    return
                elif body["stream"]:
                    self._check_stream(name, which, most, await reply.text())
                else:
                    self._check(name, which, most, [await reply.json()])
        except (aiohttp.ClientError, TimeoutError) as error:
            self.errors.append(f"{name}: {type(error).__name__} {error}")

    def _check_stream(self, name: str, which: int, most: int, text: str) -> None:
        parts = text.split("\n\n")
        if parts[-2:] != ["data: [DONE]", ""] or text.count("[DONE]") != 1:
            self.errors.append(f"{name}: ends with {text[-200:]!r}")
            return
        self.chunks += len(parts) - 2
        self._check(name, which, most, [json.loads(part.removeprefix("data: ")) for part in parts[:-2]])

    def _check(self, name: str, which: int, most: int, parts: list[dict[str, Any]]) -> None:
        """Its own name in every part, all its tokens, once."""
        if {part["id"] for part in parts} != {f"cmpl-{name}"}:
            self.errors.append(f"{name}: got somebody else's answer")
        if name in self.answered:
            self.errors.append(f"{name}: answered twice")
        self.answered.add(name)
        text = "".join(choice["text"] for part in parts for choice in part["choices"])
        counted = parts[-1]["usage"]["completion_tokens"]
        reasons = [choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
        if counted != most or reasons != ["length"]:
            self.errors.append(f"{name}: {counted} tokens and {reasons} instead of {most} and length")
        known = self._answers.setdefault((which, most), text)
        if text != known:
            self.errors.append(f"{name}: {text[:80]!r} where it was {known[:80]!r} before")
        self.tokens += counted


class Memory:
    """A process's resident memory over time."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self.seen: list[tuple[float, float]] = []
        """(seconds, MiB)"""

    def look(self, at: float) -> None:
        found = re.search(r"VmRSS:\s+(\d+) kB", self._path.read_text())
        assert found is not None
        self.seen.append((at, int(found[1]) / 1024))

    @property
    def last(self) -> float:
        return self.seen[-1][1]

    def growth(self, since: float) -> float:
        """MiB a minute that the line of best fit through all looks from ``since`` on climbs."""
        looks = [look for look in self.seen if look[0] >= since]
        middle = sum(at for at, _ in looks) / len(looks)
        mean = sum(size for _, size in looks) / len(looks)
        spread = sum((at - middle) ** 2 for at, _ in looks)
        return 60 * sum((at - middle) * (size - mean) for at, size in looks) / spread
