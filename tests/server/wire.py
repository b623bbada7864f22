"""A publisher that says just what it is told, byte by byte: for engines that aren't ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq


class Wire:
    """A PUB socket with vLLM's framing. Nobody answers for what it sent."""

    def __init__(self, topic: bytes = b"", first: int = 0, hwm: int = 0) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, hwm)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.topic = topic
        self.seq = first

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)

    def raw(self, *parts: bytes) -> None:
        self._socket.send_multipart(list(parts))

    def payload(self, payload: bytes) -> None:
        self.raw(self.topic, self.seq.to_bytes(8, "big"), payload)
        self.seq += 1

    def batch(self, *events: dict[str, Any], rank: int | None = 0) -> None:
        self.payload(msgspec.msgpack.encode([1.0 + self.seq, list(events), rank]))

    def stored(
        self, hashes: Sequence[Any], tokens: Sequence[int] | None, size: int, parent: Any = None, **fields: Any
    ) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": None if tokens is None else list(tokens),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        self.batch({**event, **fields})

    def removed(self, hashes: Sequence[Any], **fields: Any) -> None:
        self.batch({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields})

    def cleared(self) -> None:
        self.batch({"type": "AllBlocksCleared"})
