"""What an endpoint picker costs a request: from its last piece of body to the answer that names an engine, over gRPC.

    .venv/bin/python benchmarks/epp.py                  # 100 workers, a minute or two
    .venv/bin/python benchmarks/epp.py --workers 20 --requests 500

A mock with all workers and their event streams, the picker (`kvyard epp`) and this client are processes of their own. Prompts
are token ids, so nothing is tokenised, and the first half of each is the same. The wall clock shows what else runs on the
machine, so three things stand beside it: the same round trip with nothing in it (gRPC's health check), the picker's own CPU
time, and how long it says that it took itself (`kvyard_gateway_placing_seconds`: reading, hashing, choosing).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from _plain import plain_environment
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvyard.server.epp.messages import STREAMED

TICKS = os.sysconf("SC_CLK_TCK")
PIECE = 1 << 14
"""Bytes of a piece of a body; Envoy's are about as large."""
COMMAND = [sys.executable, "-c", "from kvyard.cli.app import main; main()"]
ENDED = HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key=":status", raw_value=b"200")]), end_of_stream=True)
BEGUN = HttpHeaders(
    headers=HeaderMap(
        headers=[
            HeaderValue(key=key, raw_value=value)
            for key, value in (
                (":method", b"POST"),
                (":path", b"/v1/completions"),
                (":authority", b"example.com"),
                ("content-type", b"application/json"),
                ("user-agent", b"benchmark"),
                ("accept", b"*/*"),
            )
        ]
    )
)
MODES = ProtocolConfiguration(request_body_mode=STREAMED, response_body_mode=STREAMED)


def started(folder: str, name: str, *words: str) -> tuple[subprocess.Popen[bytes], list[str]]:
    """A server as a process, and its addresses."""
    ready = Path(folder) / name
    process = subprocess.Popen([*COMMAND, *words, "--ready-file", str(ready)], stderr=subprocess.DEVNULL)
    while not ready.exists():
        if process.poll() is not None:
            sys.exit(f"{name} ended with {process.returncode}")
        time.sleep(0.05)
    return process, json.loads(ready.read_text())["urls"]


def cpu(process: subprocess.Popen[bytes]) -> float:
    """Seconds of CPU time that a process took."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def placing(url: str) -> dict[str, float]:
    """Buckets of how long the picker took, cumulative."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("kvyard_gateway_placing_seconds_bucket")]
    return {line.partition('le="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in found}


def shown(name: str, values: list[float]) -> str:
    values = sorted(values)
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    return f"  {name:44} p50 {statistics.median(values):7.3f}  p90 {values[int(0.9 * len(values))]:7.3f}  p99 {p99:7.3f} ms"


async def asked(stub: Any, body: bytes) -> float:
    """One request; milliseconds from its last piece to where it is to go."""
    call = stub.Process()
    await call.write(ProcessingRequest(request_headers=BEGUN, protocol_config=MODES))
    pieces = [body[index : index + PIECE] for index in range(0, len(body), PIECE)]
    for piece in pieces[:-1]:
        await call.write(ProcessingRequest(request_body=HttpBody(body=piece)))
    began = time.perf_counter_ns()
    await call.write(ProcessingRequest(request_body=HttpBody(body=pieces[-1], end_of_stream=True)))
    answer = await call.read()
    took = (time.perf_counter_ns() - began) / 1e6
    assert answer.WhichOneof("response") == "request_headers", answer
    for _ in pieces:
        await call.read()
    await call.write(ProcessingRequest(response_headers=ENDED))
    await call.read()
    await call.done_writing()
    await call.read()
    return took


async def measured(target: str, url: str, picker: subprocess.Popen[bytes], options: argparse.Namespace) -> None:
    rng = random.Random(1)
    async with grpc.aio.insecure_channel(target) as channel:
        stub, health = ExternalProcessorStub(channel), HealthStub(channel)
        idle = cpu(picker)
        await asyncio.sleep(2)
        idle = (cpu(picker) - idle) / 2
        print(f"  the picker without requests: {idle:.3f} of a core (looks at engines, streams)")
        for tokens in options.tokens:
            system = [rng.randrange(100, 32_000) for _ in range(tokens // 2)]
            bodies = [
                json.dumps(
                    {"prompt": system + [rng.randrange(100, 32_000) for _ in range(tokens - tokens // 2)]}
                ).encode()
                for _ in range(options.requests)
            ]
            for body in bodies[:20]:
                await asked(stub, body)  # channels, caches
            floor = []
            for _ in range(options.requests):
                began = time.perf_counter_ns()
                await health.Check(HealthCheckRequest(service="readiness"))
                floor.append((time.perf_counter_ns() - began) / 1e6)
            before, buckets, clock = cpu(picker), placing(url), time.perf_counter()
            walls = [await asked(stub, body) for body in bodies]
            took, after = cpu(picker) - before - idle * (time.perf_counter() - clock), placing(url)
            count = after["+Inf"] - buckets["+Inf"]
            quick = {edge: (after[edge] - buckets[edge]) / count for edge in ("0.0005", "0.001", "0.0025")}
            print(f"{tokens} tokens, {len(bodies[0]) // 1024} KiB, one at a time; load {os.getloadavg()[0]:.1f}")
            print(shown("gRPC alone (health check)", floor))
            print(shown("from the last piece to the answer", walls))
            shares = ", ".join(f"{share:.1%} within {float(edge) * 1e3:g} ms" for edge, share in quick.items())
            print(f"  the picker itself, reading to choice: {shares}")
            print(f"  CPU time of the picker, whole exchange: {took / len(bodies) * 1e3:.3f} ms a request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 1024, 4096])
    parser.add_argument("--router", default="least-time")
    parser.add_argument(
        "--source", action="store_true", help="measure the uncompiled source instead of a plain install"
    )
    options = parser.parse_args()
    os.environ.update(plain_environment(options.source))
    with tempfile.TemporaryDirectory() as folder:
        mock, urls = started(folder, "mock", "mock", f"--workers={options.workers}", "--port=0", "--kv-events")
        flags = (f"--fleet={urls[0]}", "--port=0", "--http-port=0", "--tokenizer=bytes", f"--router={options.router}")
        picker, (target, url) = started(folder, "epp", "epp", *flags)
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/health") as reply:
                        engines = json.load(reply)["engines"]
                except urllib.error.HTTPError:
                    engines = {}
                if engines.get("ready") == options.workers:
                    break
                time.sleep(0.2)
            print(f"{options.workers} workers, policy {options.router}")
            asyncio.run(measured(target.removeprefix("grpc://"), url, picker, options))
        finally:
            for process in (picker, mock):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
