"""Replicas of the index that each follow all engines over ZeroMQ: how long they take to start, how far behind they are, what
they cost by updates a second, and what travels.

    .venv/bin/python benchmarks/index_replicas.py [--engines 32] [--blocks 8192] [--rates 50,200,800]

Engines are block managers with publishers, all in one process of its own; each pass computes a new prompt of 64 blocks of 16
tokens, so that as many are evicted. Replicas are ``kvyard index serve`` as processes: one that is told everything by the
engines' snapshots, and one that starts from the first (``--peer``). ``lag`` is from when a prompt is published until
``/query`` of a replica knows it, looked at 100 times a second. CPU is of the replica's process by /proc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gateway import ROOT, cpu_seconds, free_ports, resident, running

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.events import Batcher
from kvyard.events.transport import Publisher
from kvyard.events.wire import Encoder
from kvyard.hashing import TokenChain, algorithm

PROMPT = 64
"""Blocks of a prompt."""


# -- the engines' process -----------------------------------------------------------------------------------------------


class Engine:
    def __init__(self, number: int, blocks: int, size: int) -> None:
        self.number, self.size, self.passes = number, size, 0
        group = GroupSpec(block_size=size)
        self.batcher = Batcher([group.meta])
        self.manager = BlockManager(blocks + 1, [group], sink=self.batcher)
        self.algorithm = algorithm("xxh3")
        anywhere = "tcp://127.0.0.1:0"
        self.publisher = Publisher(anywhere, self.batcher.resync, replay=anywhere)
        self.publisher.start()
        self.encoder, self.bytes = Encoder(), 0

    def prompt(self, number: int) -> list[int]:
        first = (self.number * 1_000_000 + number) * 7919 % 2_000_000_000
        return list(range(first, first + PROMPT * self.size))

    def step(self) -> list[int]:
        """A pass: a prompt that no engine has seen, computed and let go."""
        tokens = self.prompt(self.passes)
        request = Request(str(self.passes), TokenChain(tokens, self.size, self.algorithm))
        self.manager.allocate(request, request.num_tokens, self.manager.lookup(request))
        self.manager.free(request)
        batch = self.batcher.end_iteration(self.passes)
        assert batch is not None
        self.passes += 1
        self.publisher.publish(batch, 0)
        if self.passes % 16 == 0:
            self.bytes = len(self.encoder.encode(batch))
        return tokens


def engines(count: int, blocks: int, size: int) -> None:
    """Obeys lines: ``fill``; ``rate BATCHES_PER_SECOND SECONDS``; ``mark``. Answers each with a line of JSON."""
    fleet = [Engine(number, blocks, size) for number in range(count)]
    say = lambda what: print(json.dumps(what), flush=True)  # noqa: E731
    say([[engine.publisher.endpoint, engine.publisher.replay_endpoint] for engine in fleet])
    for line in sys.stdin:
        what, *figures = line.split()
        if what == "fill":
            for engine in fleet:
                for _ in range(blocks // PROMPT + 1):
                    engine.step()
            say(fleet[0].bytes)
        elif what == "mark":
            say([fleet[0].step(), time.time()])
        else:
            rate, seconds = map(float, figures)
            began, sent = time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds:
                while sent < passed * rate:
                    fleet[sent % count].step()
                    sent += 1
                time.sleep(0.002)
            say([sent / (time.perf_counter() - began), fleet[0].bytes])


# -- replicas -----------------------------------------------------------------------------------------------------------


def post(port: int, path: str, body: Any) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
        return json.load(reply)


def fresh(port: int, count: int) -> bool:
    """Whether a replica follows all streams without a gap."""
    try:
        return bool(get(port, "/health")["streams"].get("fresh", 0) == count)
    except OSError:
        return False


def files(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def knows(port: int, tokens: list[int]) -> bool:
    found = post(port, "/query", {"model_name": "m", "token_ids": tokens})["instances"]
    return any(one["longest_matched"] == len(tokens) for one in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rates", default="50,200,800")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--as-engines", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_engines:
        engines(given.engines, given.blocks, given.block_size)
        return
    folder = ROOT / "build" / "index-replicas"
    folder.mkdir(parents=True, exist_ok=True)
    script = [sys.executable, str(Path(__file__).resolve()), "--as-engines"]
    fleet = subprocess.Popen(
        [
            *script,
            "--engines",
            str(given.engines),
            "--blocks",
            str(given.blocks),
            "--block-size",
            str(given.block_size),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert fleet.stdin is not None and fleet.stdout is not None

    def ask(line: str) -> Any:
        fleet.stdin.write(line + "\n")  # type: ignore[union-attr]
        fleet.stdin.flush()  # type: ignore[union-attr]
        return json.loads(fleet.stdout.readline())  # type: ignore[union-attr]

    with ExitStack() as stack:
        stack.callback(fleet.wait)
        stack.callback(fleet.kill)
        endpoints = json.loads(fleet.stdout.readline())
        batch_bytes = ask("fill")
        config = folder / "replica.json"
        listed = [
            {
                "model_name": "m",
                "instance_id": str(index),
                "endpoint": one,
                "replay_endpoint": again,
                "block_size": given.block_size,
            }
            for index, (one, again) in enumerate(endpoints)
        ]
        config.write_text(json.dumps({"block_size": given.block_size, "subscriptions": listed}))
        ports, pids = [], []
        held = given.engines * given.blocks
        for name in ("by snapshots", "by a peer"):
            port = free_ports(1)
            peer = ["--peer", f"http://127.0.0.1:{ports[0]}"] if ports else []
            command = [
                sys.executable,
                "-m",
                "kvyard",
                "index",
                "serve",
                "--config",
                str(config),
                "--port",
                str(port),
                *peer,
            ]
            began = time.perf_counter()
            process = stack.enter_context(running(command, folder / f"{name.replace(' ', '-')}.log"))
            while not fresh(port, given.engines):
                time.sleep(0.05)
                assert process.poll() is None, (folder / f"{name.replace(' ', '-')}.log").read_text()[-2000:]
            took = time.perf_counter() - began
            print(
                f"start {name}: {took:.1f} s, {cpu_seconds(process.pid):.1f} s of CPU time, {held:,} blocks, "
                f"{resident(process.pid):.0f} MiB, {files(process.pid)} files open",
                flush=True,
            )
            ports.append(port)
            pids.append(process.pid)
        request = urllib.request.Request(f"http://127.0.0.1:{ports[0]}/dump", headers={"accept": "application/msgpack"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            print(f"dump: {len(reply.read()) / held:.1f} bytes a block", flush=True)
        print(f"a batch of {PROMPT} stores and {PROMPT} removals: {batch_bytes:,} bytes", flush=True)
        for rate in map(float, given.rates.split(",")):
            before = [cpu_seconds(pid) for pid in pids]
            sent, size = ask(f"rate {rate} {given.seconds}")
            lags: list[float] = []
            for _ in range(5):
                tokens, when = ask("mark")
                for port in ports:
                    while not knows(port, tokens):
                        time.sleep(0.01)
                    lags.append(time.time() - when)
            spent = [(cpu_seconds(pid) - old) / given.seconds for pid, old in zip(pids, before, strict=True)]
            print(
                f"{sent:,.0f} batches/s of {given.engines} engines ({2 * PROMPT * sent:,.0f} block changes/s, "
                f"{size * sent / 1e6:.2f} MB/s to each replica): CPU {100 * statistics.mean(spent):.0f} % of a core each, "
                f"{statistics.mean(spent) / sent / 2 / PROMPT * 1e6:.1f} us a change, lag {1e3 * max(lags):.0f} ms at most, "
                f"{max(map(resident, pids)):.0f} MiB, streams fresh: {all(fresh(port, given.engines) for port in ports)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
