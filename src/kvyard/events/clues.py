"""Clues: what the raw payloads of a stream give away about the engine that wrote them.

Decoding makes all engines look alike, which is its purpose. Here the differences are of interest: how events are written,
what hashes look like, which words are used for media. Payloads are read loosely and nothing is judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

ENGINES = ("vllm", "sglang", "trtllm", "kvyard", "unknown")
NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "kvyard": "kvyard",
    "unknown": "an engine we can't tell",
}

_OPTIONAL = ("group_idx", "kv_cache_spec_kind", "locality", "ownership", "session_id", "reason")
_SGLANG_WORDS = {"CPU_PINNED", "DISK", "EXTERNAL"}


class Clues(msgspec.Struct):
    """What was seen in payloads, as written."""

    encodings: Counter[str] = msgspec.field(default_factory=Counter)
    """Events as ``map``, ``array``, ``wrapped`` or ``trtllm``."""
    hashes: Counter[str] = msgspec.field(default_factory=Counter)
    """Hashes as ``unsigned``, ``signed``, ``digest`` or ``hex``."""
    media: Counter[str] = msgspec.field(default_factory=Counter)
    fields: list[str] = msgspec.field(default_factory=list)
    """Optional fields of vLLM's events that were set."""
    batch_lengths: Counter[int] = msgspec.field(default_factory=Counter)

    def look(self, payload: bytes) -> None:
        """Take in a payload; one that can't be read at all leaves no clue."""
        try:
            if payload[:1] in (b"[", b"{"):
                found = msgspec.json.decode(payload)
            else:
                found = msgspec.msgpack.decode(payload)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
            return
        if isinstance(found, Mapping):
            found = [found] if "data" in found else [found.get("ts"), found.get("events")]
        if not isinstance(found, list):
            return
        if any(isinstance(item, Mapping) and "data" in item for item in found):
            for item in found:
                self._look_at_dict(item)
            return
        self.batch_lengths[len(found)] += 1
        if len(found) > 1 and isinstance(found[1], list):
            for event in found[1]:
                self._look_at(event)

    def engine(self) -> str:
        """The engine that writes like this, one of ``ENGINES``."""
        encodings, signed = self.encodings, self.hashes["signed"] > 0
        if encodings["trtllm"]:
            return "trtllm"
        if "reason" in self.fields:
            return "kvyard"
        if _SGLANG_WORDS & set(self.media):
            return "sglang"
        if {"group_idx", "kv_cache_spec_kind", "locality"} & set(self.fields):
            return "vllm"
        if encodings["array"]:
            return "sglang" if signed else "vllm"
        if encodings["map"]:
            # TensorRT-LLM's own stream: first eight bytes of a digest, signed, and never another medium.
            return "trtllm" if signed and set(self.media) <= {"GPU"} else "vllm"
        return "unknown"

    def _look_at(self, event: Any) -> None:
        if isinstance(event, bytes):
            self.encodings["wrapped"] += 1
            try:
                event = msgspec.msgpack.decode(event)
            except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
                return
        if isinstance(event, Mapping):
            self.encodings["map"] += 1
            for name in _OPTIONAL:
                if name not in self.fields and event.get(name) is not None:
                    self.fields.append(name)
            hashes, medium = event.get("block_hashes"), event.get("medium")
        elif isinstance(event, list) and event:
            self.encodings["array"] += 1
            at = 6 if event[0] == "BlockStored" else 2
            hashes, medium = (event[1] if len(event) > 1 else None), (event[at] if len(event) > at else None)
            if at == 6 and len(event) > 9 and event[9] is not None and "group_idx" not in self.fields:
                self.fields.append("group_idx")
        else:
            return
        if isinstance(medium, str):
            self.media[medium[:40]] += 1
        if isinstance(hashes, list):
            self._look_at_hashes(hashes)

    def _look_at_hashes(self, hashes: list[Any]) -> None:
        for key in hashes:
            if isinstance(key, int):
                self.hashes["signed" if key < 0 else "unsigned"] += 1
            elif isinstance(key, bytes):
                self.hashes["digest"] += 1
            elif isinstance(key, str):
                self.hashes["hex"] += 1

    def _look_at_dict(self, item: Any) -> None:
        self.encodings["trtllm"] += 1
        data = item.get("data") if isinstance(item, Mapping) else None
        if not isinstance(data, Mapping):
            return
        blocks = data.get("blocks")
        if isinstance(blocks, list):
            self._look_at_hashes([block.get("block_hash") for block in blocks if isinstance(block, Mapping)])
        if isinstance(data.get("block_hashes"), list):
            self._look_at_hashes(data["block_hashes"])
