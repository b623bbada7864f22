"""An engine's KV events as they came, read without kvyard's own readers, so that kvyard can be held against them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

Block = tuple[int, ...]


class EventWatch:
    """A subscriber in a thread that keeps when each block of an engine was stored and removed. A context manager."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.batches = 0
        self.stored: dict[Any, float] = {}
        """By hash, when it was announced last."""
        self.removed: list[tuple[float, Any]] = []
        """When (``time.monotonic``) and which hash, in order."""
        self.cleared: list[float] = []
        self._children: dict[tuple[Any, Block], set[Any]] = {}
        """By parent's hash and tokens, the hashes that blocks had: several where adapters and salts set them apart."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> EventWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _read(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVTIMEO, 100)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self.endpoint)
        while not self._ending.is_set():
            with contextlib.suppress(zmq.Again):
                payload = socket.recv_multipart()[-1]
                with self._lock:
                    self._take(msgspec.msgpack.decode(payload), time.monotonic())
        socket.close(0)
        context.term()

    def _take(self, batch: Sequence[Any], now: float) -> None:
        self.batches += 1
        for event in batch[1]:
            if event["type"] == "BlockStored":
                hashes, parent, size = event["block_hashes"], event["parent_block_hash"], event["block_size"]
                for number, name in enumerate(hashes):
                    block = tuple(event["token_ids"][number * size : (number + 1) * size])
                    self._children.setdefault((parent, block), set()).add(name)
                    self.stored[name] = now
                    parent = name
            elif event["type"] == "BlockRemoved":
                self.removed += [(now, name) for name in event["block_hashes"]]
            else:
                self.cleared.append(now)

    def evicted(self, tokens: Sequence[int], size: int, since: float, until: float) -> int:
        """How many blocks of the prompt ``tokens`` were announced as removed between the two times."""
        with self._lock:
            names = {name for block in self._names(tokens, size) for name in block}
            return sum(name in names for when, name in self.removed if since <= when <= until)

    def announced(self, tokens: Sequence[int], size: int, since: float) -> int:
        """How many blocks of the prompt ``tokens`` were announced as stored since then."""
        with self._lock:
            return sum(any(self.stored[name] >= since for name in block) for block in self._names(tokens, size))

    def _names(self, tokens: Sequence[int], size: int) -> list[set[Any]]:
        """Per block of a prompt the hashes that it had."""
        found: list[set[Any]] = []
        parents: set[Any] = {None}
        for start in range(0, len(tokens) - size + 1, size):
            block = tuple(tokens[start : start + size])
            parents = {name for parent in parents for name in self._children.get((parent, block), ())}
            found.append(parents)
        return found
