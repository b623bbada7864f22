"""How long others wait while a gateway works on something large: /health, asked without a break, by the clock and by CPU time.

    .venv/bin/python benchmarks/pauses.py

A gateway and one mock engine, each a process of its own; the engine's events are ours. Three things are given to the gateway,
one after the other: a valid batch of 55 MB (about 300,000 stores of one block), a prompt of 2,000,000 token ids, and one of
2,000,000 bytes of text. Meanwhile /health is asked, one question after the other. *CPU* is what the gateway's event loop itself
used between question and answer: what the wait would be at most on a machine with a core to spare. Searches for garbage are the
gateway's own figures, by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec
import zmq
from _served import served

TOKENS = 2_000_000


def large(size: int) -> bytes:
    """A valid batch of about ``size`` bytes, of stores of one block."""
    event = {"type": "BlockStored", "parent_block_hash": None, "block_size": 16, "lora_id": None, "medium": "GPU"}
    events = [
        {**event, "block_hashes": [(1 << 60) + index], "token_ids": [index, *[70_000] * 15], "lora_name": None}
        for index in range(size // 190)
    ]
    return msgspec.msgpack.encode([1.0, events, 0])


class Asker:
    """Asks for /health without a break, over one connection."""

    def __init__(self, url: str, pid: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._line = socket.create_connection((host, int(port)))
        self._request = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        self._tasks = Path(f"/proc/{pid}/task")
        self._schedule = self._tasks / str(pid) / "schedstat"
        self.waits: list[tuple[float, float]] = []
        """Milliseconds by the clock, and of the loop's CPU time."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cpu(self) -> float:
        """Milliseconds that the gateway's event loop has used so far."""
        return int(self._schedule.read_text().split()[0]) / 1e6

    def cpu_of_all(self) -> float:
        """The same of all its threads."""
        return sum(int(path.read_text().split()[0]) for path in self._tasks.glob("*/schedstat")) / 1e6

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._line.close()

    def _run(self) -> None:
        while not self._ending.wait(0.002):
            before, began = self.cpu(), time.perf_counter()
            self._line.sendall(self._request)
            said = b""
            while b"\r\n\r\n" not in said or not said.rstrip().endswith(b"}"):
                said += self._line.recv(1 << 16)
            self.waits.append((1000 * (time.perf_counter() - began), self.cpu() - before))


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics", timeout=120) as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def complete(url: str, prompt: object) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1}, separators=(",", ":")).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"}), timeout=600) as answer:
        answer.read()


def measure(name: str, asker: Asker, url: str, deed: Callable[[], None]) -> None:
    """Do ``deed``, wait until the gateway is at rest again, and show what others waited meanwhile."""
    asker.waits.clear()
    start, began = asker.cpu(), time.monotonic()
    deed()
    while True:
        before = asker.cpu_of_all()
        asked = len(asker.waits)
        time.sleep(2.0)
        # At rest it does nothing but answer these questions.
        if asker.cpu_of_all() - before < 2.0 * (len(asker.waits) - asked):
            break
    clock, cpu = (sorted(column) for column in zip(*asker.waits, strict=True))
    longest = 1000 * metric(url, "kvyard_gateway_garbage_longest_seconds")
    print(
        f"{name:34} {asker.cpu() - start:8.0f} {time.monotonic() - began:7.1f} {len(clock):8} {clock[len(clock) // 2]:8.1f} "
        f"{clock[-1]:8.1f} {cpu[-1]:8.1f} {longest:9.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=55)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    payload = large(arguments.megabytes << 20)
    publisher = zmq.Context.instance().socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    mock = ["mock", "--num-gpu-blocks", "300000", "--max-model-len", "2500000", "--timing", "fixed:1,1"]
    gateway = ["gateway", "--tokenizer", "bytes", "--router", "kv"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(mock, Path(folder), "mock") as (_, engine),
        served(
            [*gateway, "--engine", f"{engine},events=tcp://127.0.0.1:{port},block_size=16"], Path(folder), "gateway"
        ) as (front, url),
    ):
        while b'"ready":1' not in urlopen(f"{url}/health").read():
            time.sleep(0.1)
        complete(url, "first")
        asker = Asker(url, front.pid)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; milliseconds, but for the seconds")
        print(
            f"{'':34} {'its CPU':>8} {'seconds':>7} {'answers':>8} {'median':>8} {'longest':>8} {'its CPU':>8} {'a search':>9}"
        )
        sequence = 0

        def publish() -> None:
            nonlocal sequence
            publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
            sequence += 1

        measure("nothing", asker, url, lambda: time.sleep(3.0))
        measure(f"a batch of {len(payload) / 1e6:.0f} MB", asker, url, publish)
        ids = [index % 50_000 for index in range(arguments.tokens)]
        measure(f"a prompt of {arguments.tokens:,} token ids", asker, url, lambda: complete(url, ids))
        text = "".join(chr(97 + index % 26) for index in range(arguments.tokens))
        measure(f"a prompt of {arguments.tokens:,} bytes of text", asker, url, lambda: complete(url, text))
        asker.close()


if __name__ == "__main__":
    main()
