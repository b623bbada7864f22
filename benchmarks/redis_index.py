"""The index on a Redis server: blocks stored and prompts looked up per second, round trips, and bytes on the server.

Starts a redis-server of its own (it must be installed) and stops it again. Client and server share this machine's processors;
times of the client are CPU time and wall time, those of the server its own CPU time.

    .venv/bin/python benchmarks/redis_index.py [--blocks 200000] [--workers 8]
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time

from kvyard.index.redis import RedisIndex


def start(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("needs redis-server: scripts/setup-test-deps.sh, or apt-get install redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.01)
    return process, f"redis://127.0.0.1:{port}/0"


class Meter:
    """What something took: here, there, and in round trips."""

    def __init__(self, index: RedisIndex) -> None:
        self.index = index

    def info(self, section: str, field: str) -> float:
        text = self.index.server.commands([("INFO", section)])[0].decode()
        found = re.search(rf"^{field}:([\d.]+)", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def __enter__(self) -> Meter:
        self.there = self.info("cpu", "used_cpu_user") + self.info("cpu", "used_cpu_sys")
        self.trips, self.wall, self.cpu = self.index.server.round_trips, time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.trips = self.index.server.round_trips - self.trips
        self.there = self.info("cpu", "used_cpu_user") + self.info("cpu", "used_cpu_sys") - self.there

    def line(self, what: str, count: int, unit: str) -> str:
        each = self.trips / count
        rate = f"{count / self.wall:>11,.0f} {unit}/s wall, {count / self.cpu:>11,.0f} per client CPU second"
        return f"{what:<46}{rate}, server {self.there / count * 1e6:8.2f} µs each, {each:6.3f} round trips each"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=200_000, help="worker-blocks to store")
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    rng = random.Random(1)
    depth = 512
    texts = [[rng.getrandbits(64) for _ in range(depth)] for _ in range(max(1, options.blocks // depth // 2))]
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(folder)
        try:
            index = RedisIndex(url, timeout=30, lease=30)
            meter = Meter(index)
            before = meter.info("memory", "used_memory")
            jobs = [(worker, text) for text in texts for worker in rng.sample(range(options.workers), 2)]
            with meter:
                for worker, text in jobs:
                    for low in range(0, depth, 32):
                        index.store(worker, text[low : low + 32], text[low - 1] if low else None)
                index.flush()
            count = len(jobs) * depth
            print(meter.line("stores, 32 blocks each, flushed by size", count, "blocks"))
            bytes_each = (meter.info("memory", "used_memory") - before) / count
            print(f"{'memory':<46}{bytes_each:.0f} bytes of the server per worker-block, two workers per block")
            with meter:
                for worker, text in jobs[:500]:
                    index.store(worker, [rng.getrandbits(64)], text[-1])
                    index.flush()
            print(meter.line("stores of one block, flushed each", min(500, len(jobs)), "stores"))
            for length in (128, 512):
                with meter:
                    for text in texts[:200]:
                        assert index.lookup(text[:length])[-1][0] == length
                print(meter.line(f"lookups, {length} blocks deep", len(texts[:200]), "lookups"))
            deep = [rng.getrandbits(64) for _ in range(4096)]
            for worker in range(options.workers):
                index.store(worker, deep)
            index.flush()
            with meter:
                for _ in range(50):
                    assert index.lookup(deep) == [(4096, (1 << options.workers) - 1)]
            print(meter.line("lookups, 4096 blocks deep", 50, "lookups"))
            with meter:
                for _ in range(500):
                    index.lookup([rng.getrandbits(64) for _ in range(4096)])
            print(meter.line("lookups, 4096 blocks, no worker has the first", 500, "lookups"))
            with meter:
                for worker, text in jobs[: len(jobs) // 2]:
                    index.remove(worker, text[::-1])
                index.flush()
            print(meter.line("removals, 512 blocks each", len(jobs) // 2 * depth, "blocks"))
            with meter:
                held = index.clear(0)
                index.flush()
            print(meter.line(f"clear of a worker with {held} blocks, in effect", 1, "clears"))
            with meter:
                index.usage()
            print(meter.line("… and swept", max(held, 1), "blocks"))
            with meter:
                index.close()
                while not index.flush():
                    pass
            print(meter.line("announced again", sum(len(run) for w in range(8) for run in index.held(w)), "blocks"))
            index.check_integrity()
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
