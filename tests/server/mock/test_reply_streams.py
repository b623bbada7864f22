"""Streams on the wire: what one write holds, slow readers, and many streams for long."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.mock.support import PATIENCE, Process, Served

from kvyard.engine.timing import FixedTiming

pytestmark = pytest.mark.zmq


def request(**body: Any) -> bytes:
    content = json.dumps({"ignore_eos": True, "stream": True, **body}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    return head % (len(content), content)


def writes(raw: bytes) -> list[bytes]:
    """The chunks of a chunked body, which are the server's writes."""
    body = raw.partition(b"\r\n\r\n")[2]
    found: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return found
        found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]


def address(url: str) -> tuple[str, int]:
    return "127.0.0.1", int(url.rpartition(":")[2])


def test_tokens_of_one_pass_leave_as_one_write() -> None:
    with Served(engine={"timing": FixedTiming(prefill_ms=5, decode_ms=20)}) as served:
        with socket.create_connection(address(served.url), timeout=PATIENCE) as client:
            client.sendall(request(prompt=list(range(20)), max_tokens=12, n=3))
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                raw += client.recv(65536)
    indexes = [[int(one) for one in re.findall(rb'"index":(\d)', write)] for write in writes(raw)]
    assert sum(map(len, indexes)) <= 36 and len(indexes) <= 14  # 12 passes, and the choices don't start in the same one
    assert all(one == sorted(set(one)) for one in indexes), "a choice is in a write once"
    assert sum(one == [0, 1, 2] for one in indexes) >= 1


def test_a_reader_that_doesn_t_read_costs_nothing() -> None:
    """Its tokens are counted, not queued; others go on; and when it reads, it has them all."""
    with Served() as served:
        with socket.create_connection(address(served.url), timeout=PATIENCE) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
            slow.sendall(request(prompt="slow", max_tokens=1000))
            eventually(lambda: served.get("/admin/workers")[0]["running"] == 0 and served.metrics()[FINISHED] == 1)
            assert served.complete("quick", max_tokens=5)["usage"]["completion_tokens"] == 5
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                raw += slow.recv(1 << 20)
        lines = b"".join(writes(raw)).decode().splitlines()
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
        assert len("".join(texts)) == 1000
        served.check()


FINISHED = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="mock"}'

STREAMS = 200
SECONDS = float(os.environ.get("KVYARD_SOAK_SECONDS", "600"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_soak() -> None:
    """200 streams of up to 4,000 chunks a second: memory stays flat, and no request is lost or doubled."""
    with Process("--kv-events", "--timing", "fixed:5,50", "--num-gpu-blocks", "8192") as server:
        (url,) = server.urls()

        def resident() -> int:
            text = Path(f"/proc/{server.process.pid}/status").read_text()
            return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) >> 10

        asyncio.run(_load(url, min(60.0, SECONDS / 4)))
        warm = resident()
        asked = asyncio.run(_load(url, SECONDS))
        grown = resident() - warm
        print(f"{asked} requests, {warm} MiB after warming up, {grown} MiB more at the end")
        assert grown < 30


async def _load(url: str, seconds: float) -> int:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def one(number: int) -> int:
        turns = 0
        while loop.time() < end or not turns:
            turns += 1
            reader, writer = await asyncio.open_connection(*address(url))
            writer.write(request(prompt=f"stream {number % 50} turn {turns} " * 10, max_tokens=60 + number % 40))
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                read = await reader.read(65536)
                assert read, raw[-500:]
                raw += read
            writer.close()
            await writer.wait_closed()
            text = "".join(re.findall(r'"text":"([^"]*)"', b"".join(writes(raw)).decode()))
            assert len(text) == 60 + number % 40 and b"[DONE]" in raw
        return turns

    return sum(await asyncio.gather(*(one(number) for number in range(STREAMS))))
