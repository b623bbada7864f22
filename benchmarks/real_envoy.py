"""Latency that the endpoint picker adds to requests through a real Envoy 1.40.

    make peers ARGS=envoy && .venv/bin/python benchmarks/real_envoy.py

Mock engines that answer at once, the picker (`kvyard epp`), Envoy and this client are processes of their own. Three Envoys take
turns, request by request, with the same engines: one without a picker (engines in turn), one with bodies in full-duplex streams
(`deploy/envoy/envoy.yaml`) and one with buffered bodies (`deploy/envoy/fail-open.yaml`). One request at a time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from epp import started  # noqa: E402
from tests.real.envoy.proxy import Config, Envoy, PickerProcess  # noqa: E402


def without_picker(config: Config) -> None:
    config.filters.pop(0)


def took(connection: http.client.HTTPConnection, body: bytes) -> float:
    """Milliseconds of one request."""
    began = time.perf_counter_ns()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    said = reply.read()
    assert reply.status == 200, said
    return (time.perf_counter_ns() - began) / 1e6


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 1024, 4096])
    options = parser.parse_args()
    program = Path(os.environ.get("KVYARD_ENVOY", ROOT / "build/peers/envoy/bin/envoy")).absolute()
    if not program.exists():
        sys.exit("needs a real Envoy: make peers ARGS=envoy")
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = (f"--workers={options.workers}", "--port=0", "--kv-events", "--timing=fixed:0.01,0.01")
        mock, urls = started(name, "mock", "mock", *flags)
        engines = [urlsplit(url).netloc for url in urls]
        kinds: dict[str, dict[str, Any]] = {
            "without": {"file": "fail-open.yaml", "engines": engines, "change": without_picker},
            "full duplex": {"file": "envoy.yaml"},
            "buffered": {"file": "fail-open.yaml", "engines": engines},
        }
        try:
            with PickerProcess(folder, urls[0], "--router", "least-time") as picker:
                envoys = {kind: Envoy(program, folder, picker.target, **more) for kind, more in kinds.items()}
                for envoy in envoys.values():
                    envoy.__enter__()
                lines = {kind: http.client.HTTPConnection(urlsplit(one.url).netloc) for kind, one in envoys.items()}
                for tokens in options.tokens:
                    system = [rng.randrange(100, 32_000) for _ in range(tokens // 2)]
                    found: dict[str, list[float]] = {kind: [] for kind in kinds}
                    for number in range(options.requests + 20):
                        for kind in kinds:
                            own = [rng.randrange(100, 32_000) for _ in range(tokens - tokens // 2)]
                            value = took(lines[kind], json.dumps({"prompt": system + own, "max_tokens": 1}).encode())
                            if number >= 20:
                                found[kind].append(value)
                    print(f"{tokens} tokens, {options.requests} requests each, load {os.getloadavg()[0]:.1f}")
                    base = found["without"]
                    for kind, values in found.items():
                        middle, high = statistics.median(values), percentile(values, 0.99)
                        added = middle - statistics.median(base), high - percentile(base, 0.99)
                        print(f"  {kind:12} p50 {middle:7.2f}  p99 {high:7.2f} ms", end="")
                        print("" if kind == "without" else f"   added: p50 {added[0]:+.2f}, p99 {added[1]:+.2f} ms")
                for envoy in envoys.values():
                    envoy.__exit__()
        finally:
            mock.terminate()
            mock.wait()


if __name__ == "__main__":
    main()
