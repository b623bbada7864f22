"""Engines that answer at once with the same bytes, so that what is in front of them is what is measured.

    python benchmarks/_null_engines.py FIRST_PORT COUNT [PACE_MS]

Streams have ``max_tokens`` chunks, all at once or one each PACE_MS.
"""

from __future__ import annotations

import asyncio
import re
import sys

USAGE = (
    '"usage":{"prompt_tokens":10,"total_tokens":11,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}'
)
LENGTH = re.compile(rb"(?i)content-length:\s*(\d+)")
TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
STREAMED = re.compile(rb'"stream"\s*:\s*true')
EDGE = 300
"""Bytes at either end of a body among which its settings are looked for."""


def answer(body: str, kind: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def chunk(data: str) -> bytes:
    return f"{len(data):x}\r\n{data}\r\n".encode()


CHAT = answer(
    '{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,"message":{"role":'
    '"assistant","content":"ok"},"logprobs":null,"finish_reason":"length"}],' + USAGE + "}"
)
MODELS = answer(
    '{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"x","root":"mock","max_model_len":1048576}]}'
)
FINE = answer("{}")
ABSENT = answer('{"error":"there is no such route"}', status="404 Not Found")
METRICS = answer(
    'vllm:num_requests_running{model_name="mock"} 0\nvllm:num_requests_waiting{model_name="mock"} 0\n', "text/plain"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = chunk(
    'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{"index":0,"delta":'
    '{"content":"word "},"logprobs":null,"finish_reason":null}]}\n\n'
)
END = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"

paced: set[NullEngine] = set()


class NullEngine(asyncio.Protocol):
    """One connection."""

    pace = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.received = bytearray()
        self.left = 0

    def connection_lost(self, error: Exception | None) -> None:
        paced.discard(self)

    def data_received(self, data: bytes) -> None:
        received = self.received
        received += data
        while (end := received.find(b"\r\n\r\n")) >= 0:
            match = LENGTH.search(received, 0, end)
            stop = end + 4 + (int(match[1]) if match else 0)
            if len(received) < stop:
                return
            head, body = bytes(received[:end]), bytes(received[end + 4 : stop])
            del received[:stop]
            self.transport.write(self.reply(head.partition(b"\r\n")[0], body))

    def reply(self, line: bytes, body: bytes) -> bytes:
        if b"/completions" in line:
            settings = body if len(body) < 2 * EDGE else body[:EDGE] + body[-EDGE:]
            if not STREAMED.search(settings):
                return CHAT
            match = TOKENS.search(settings)
            count = int(match[1]) if match else 16
            if not self.pace:
                return HEAD + WORD * count + END
            self.left = count - 1
            paced.add(self)
            return HEAD + WORD
        if b"/v1/models" in line:
            return MODELS
        if b"/metrics" in line:
            return METRICS
        return FINE if b"/health" in line or b"/ping" in line or b"/version" in line else ABSENT


async def tick(seconds: float) -> None:
    """Send one chunk of every stream, again and again."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due += seconds
        for stream in list(paced):
            stream.left -= 1
            stream.transport.write(WORD if stream.left > 0 else WORD + END)
            if stream.left <= 0:
                paced.discard(stream)
        await asyncio.sleep(max(0.0, due - loop.time()))


async def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    NullEngine.pace = float(sys.argv[3]) / 1000 if len(sys.argv) > 3 else 0.0
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(NullEngine, "127.0.0.1", first + index, backlog=2048) for index in range(count)]
    ticking = loop.create_task(tick(NullEngine.pace)) if NullEngine.pace else None
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers), *([ticking] if ticking else []))


if __name__ == "__main__":
    asyncio.run(main())
