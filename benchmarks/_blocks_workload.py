"""The workload that both block managers run, and how it is timed. Standard library only: vLLM's Python imports it too.

Requests with a prompt of which the first part is one of a few shared prefixes are admitted, decoded and released, oldest
first. Only the managers' own work is timed, in CPU seconds: not the making of prompts, nor hashing.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass
class Workload:
    groups: str = "full"
    requests: int = 4000
    prompt: int = 2048
    prefix: int = 1024
    families: int = 64
    block_size: int = 16
    blocks: int = 8192
    concurrency: int = 32
    decode: int = 0
    events: bool = False
    hash_algo: str = "sha256"
    check: bool = False
    """Compare instead of time: a checksum over every block table."""


GROUPS: dict[str, list[dict[str, Any]]] = {
    "full": [{"type": "full"}],
    "full+swa": [{"type": "full"}, {"type": "sliding_window", "window": 512}],
    "full+3swa": [{"type": "full"}, *({"type": "sliding_window", "window": 512 + 256 * i} for i in range(3))],
}


class Side(Protocol):
    """One block manager. Requests are whatever ``make`` returns."""

    def make(self, name: str, tokens: list[int]) -> Any:
        """A request, its prompt hashed."""

    def admit(self, request: Any) -> tuple[int, int] | None:
        """Look up and allocate the whole prompt: blocks hit and taken; ``None`` if there is no room."""

    def decode(self, request: Any, steps: int) -> int:
        """Append and allocate so many tokens, one by one: blocks taken."""

    def release(self, request: Any) -> int:
        """Give everything back: table entries freed."""

    def drain(self) -> int:
        """Take the events since the last time: how many."""

    def tables(self, request: Any) -> list[list[int]]:
        """The request's block ids per group."""


def run(side: Side, work: Workload) -> dict[str, Any]:
    """Run the workload and return times (CPU seconds), counts and, if asked for, the checksum."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(32000) for _ in range(work.prefix)] for _ in range(work.families)]
    clock = time.process_time
    spent = dict.fromkeys(("hash", "admit", "decode", "release", "drain"), 0.0)
    count = dict.fromkeys(("hit", "new", "freed", "steps", "events"), 0)
    digest = hashlib.sha256()
    live: list[Any] = []

    def release() -> None:
        request = live.pop(0)
        begin = clock()
        count["freed"] += side.release(request)
        spent["release"] += clock() - begin

    for number in range(work.requests):
        tokens = rng.choice(prefixes) + [rng.randrange(32000) for _ in range(work.prompt - work.prefix)]
        begin = clock()
        request = side.make(f"r{number}", tokens)
        spent["hash"] += clock() - begin
        while True:
            begin = clock()
            admitted = side.admit(request)
            spent["admit"] += clock() - begin
            if admitted is not None:
                break
            release()
        count["hit"] += admitted[0]
        count["new"] += admitted[1]
        live.append(request)
        if work.decode:
            begin = clock()
            count["new"] += side.decode(request, work.decode)
            spent["decode"] += clock() - begin
            count["steps"] += work.decode
        if work.check:
            digest.update(json.dumps(side.tables(request)).encode())
        if len(live) >= work.concurrency:
            release()
        if work.events and number % 8 == 7:
            begin = clock()
            count["events"] += side.drain()
            spent["drain"] += clock() - begin
    while live:
        release()
    managed = sum(seconds for part, seconds in spent.items() if part != "hash")
    return {
        "seconds": spent,
        "counts": count,
        "managed": managed,
        "block_ops_per_s": (count["hit"] + count["new"] + count["freed"]) / managed,
        "us_per_step": 1e6 * spent["decode"] / max(1, count["steps"]),
        "checksum": digest.hexdigest() if work.check else None,
    }
