"""What kv-aware routing is worth, live: a trace through a gateway before four mock workers, by two policies or more.

    .venv/bin/python benchmarks/live_routing.py [TRACE] [--requests 1000] [--speed 3] [--policies round-robin kv least-time]
    .venv/bin/python benchmarks/live_routing.py TRACE --vllm 2 [--blocks 1000] [--vocabulary 1024]

Mock fleet, gateway and driver are processes of their own, as they would be in life, with HTTP and ZeroMQ between them. Prompts
are token ids made up from the trace's ids, so they share what the recorded ones shared. With ``--offline`` the same settings
are also simulated, to be put beside. Latencies are in the engines' time. ``lag`` is how far real time fell behind it, at the
worst worker.

With ``--vllm N`` the engines are N real ones on the CPU, as ``make test-real`` starts them (``make peers`` first); every policy
has other prompts of the same shape.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import IO
from urllib.error import HTTPError

from _peers import peer_python

from kvyard.clock import WallClock
from kvyard.replay import replay
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.run import replay_live
from kvyard.replay.report import Report
from kvyard.replay.traces import open_trace

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"


class Server:
    """A ``kvyard`` command in a process of its own, and the addresses it prints."""

    def __init__(self, *command: str, addresses: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvyard", *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            self.urls = re.findall(r"at (http://\S+?)[,\s]", said)
            if len(self.urls) >= addresses:
                break
        else:
            raise SystemExit(f"kvyard {command[0]} ended: {said}")
        self.url = self.urls[0]
        # What it says from now on must be read, or it stands still one day.
        Thread(target=_read, args=(self.process.stderr,), daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)


def _read(stream: IO[str]) -> None:
    for line in stream:
        if line.strip() != "stopped":
            print(line, end="", file=sys.stderr)


@contextmanager
def vllm_engines(args: argparse.Namespace) -> Iterator[list[str]]:
    """Real engines, as arguments of a gateway; none where none are asked for."""
    sys.path.insert(0, str(ROOT))
    from tests.real.engine import EngineSettings, RealEngine

    python = Path(peer_python("vllm") or "") if args.vllm else Path()
    settings = EngineSettings(blocks=args.blocks, block_size=args.block_size)
    engines = [RealEngine(python, ROOT / "build" / f"vllm{number}.log", settings) for number in range(args.vllm)]
    listed: list[str] = []
    with ExitStack() as started:
        for engine in engines:
            started.callback(engine.kill)
            engine.start()
            engine.complete([1] * (2 * args.block_size), max_tokens=2)  # what is slow the first time
            address = f"{engine.url},events={engine.endpoint},replay={engine.replay_endpoint}"
            listed += ["--engine", f"{address},block_size={args.block_size}"]
        yield listed


def live_vllm(args: argparse.Namespace, policy: str, engines: list[str]) -> Report:
    """One policy's report before real engines. Each has prompts of its own, so that it finds nothing of the others'."""
    with Server("gateway", "--port", "0", *engines, "--router", policy, "--tokenizer", "bytes") as gateway:
        _wait(gateway.url, args.vllm)
        config = LiveConfig(
            limit=args.requests, vocabulary=args.vocabulary, seed=args.policies.index(policy), speedup=args.speed
        )
        return replay_live(
            open_trace(args.trace, trace_block_size=args.trace_block_size), gateway.url, config, label=f"{policy}, live"
        ).report


def _wait(url: str, engines: int) -> None:
    """Until the gateway has seen all its engines."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health") as reply:
                if json.load(reply)["engines"].get("ready", 0) == engines:
                    return
        except HTTPError:  # not one yet
            pass
        time.sleep(0.2)


def live(args: argparse.Namespace, policy: str) -> tuple[Report, float]:
    """One policy's report, and the engines' worst lag in real seconds."""
    fleet = ["--workers", str(args.workers), "--block-size", str(args.block_size), "--speed", str(args.speed)]
    engine = ["--num-gpu-blocks", str(args.blocks), "--max-model-len", str(args.blocks * args.block_size)]
    with (
        Server("mock", "--port", "0", "--kv-events", *fleet, *engine, addresses=args.workers) as mock,
        Server("gateway", "--port", "0", "--fleet", mock.url, "--router", policy, "--tokenizer", "bytes") as gateway,
    ):
        config = LiveConfig(speed=args.speed, limit=args.requests)
        run = replay_live(
            open_trace(args.trace, trace_block_size=args.trace_block_size), gateway.url, config, label=f"{policy}, live"
        )
        return run.report, max(map(_lag, mock.urls))


def _lag(url: str) -> float:
    """The 99th percentile of a worker's lag, as its histogram has it."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    found = re.findall(r'^kvyard_mock_lag_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', text, re.MULTILINE)
    total = float(found[-1][1]) if found else 0.0
    return next((float(edge) for edge, count in found if float(count) >= 0.99 * total), float("nan"))


def offline(args: argparse.Namespace, policy: str) -> Report:
    """The same in virtual time."""
    trace = open_trace(args.trace, trace_block_size=args.trace_block_size)
    return replay(
        trace,
        workers=args.workers,
        router=policy,
        block_size=args.block_size,
        num_gpu_blocks=args.blocks,
        limit=args.requests,
        label=f"{policy}, simulated",
    ).report


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", nargs="?", type=Path, default=DATA)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--speed", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--policies", nargs="+", default=["round-robin", "kv", "least-time"])
    parser.add_argument("--trace-block-size", type=int, default=None)
    parser.add_argument("--vllm", type=int, default=0, help="so many real vLLM engines instead of mocks")
    parser.add_argument("--vocabulary", type=int, default=1024, help="of the real engines' model")
    parser.add_argument("--offline", action="store_true")
    args = parser.parse_args()
    print(
        f"{'run':<24}{'finished':>9}{'reused':>9}{'TTFT mean':>11}{'p50':>9}{'p99':>9}"
        f"{'ITL mean':>10}{'late p99':>10}{'lag p99':>9}{'real s':>8}"
    )
    with vllm_engines(args) as engines:
        for policy in args.policies:
            clock = WallClock()
            report, lag = (live_vllm(args, policy, engines), 0.0) if engines else live(args, policy)
            late = report.live.lateness.p99 if report.live else 0.0
            print(_row(report) + f"{late:>8.0f}ms{1000 * lag:>7.0f}ms{clock.now() / 1e9:>8.0f}", flush=True)
            if args.offline:
                print(_row(offline(args, policy)), flush=True)


def _row(report: Report) -> str:
    ttft = report.latency["ttft"]
    return (
        f"{report.label:<24}{report.requests.get('finished', 0):>9,}{report.reuse['all'].value:>9.2%}{ttft.mean:>9.0f}ms"
        f"{ttft.p50:>7.0f}ms{ttft.p99:>7.0f}ms{report.latency['itl'].mean:>8.1f}ms"
    )


if __name__ == "__main__":
    main()
