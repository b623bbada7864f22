"""Changes of inputs that keep their structure: bytes alone seldom become other JSON, and what isn't JSON is refused at once."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
from tests.events.wire.fuzzing import corrupt

HEADS = 4
"""Bytes at most before the text or the message begins: targets take some of them for choices."""


def mutate(data: bytes, most: int, seed: int) -> bytes | None:
    """``data`` with a part of one of its lines or messages exchanged, or with a line that comes twice; ``None`` where that
    can't be, and in half of all cases.
    """
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return None
    for skip in rng.sample(range(HEADS), HEADS):
        head, rest = data[:skip], data[skip:]
        found = _in_lines(rng, rest) if rest[:1] in (b"{", b"[") else _in_message(rng, rest)
        if found is not None and len(head) + len(found) <= most:
            return head + found
    return None


def _in_lines(rng: random.Random, text: bytes) -> bytes | None:
    lines = text.split(b"\n")
    at = rng.randrange(len(lines))
    if len(lines) > 1 and rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), lines[at])
        return b"\n".join(lines)
    try:
        lines[at] = json.dumps(_changed(rng, json.loads(lines[at])), separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return b"\n".join(lines)


def _in_message(rng: random.Random, data: bytes) -> bytes | None:
    try:
        value = msgspec.msgpack.decode(data)
        return msgspec.msgpack.encode(_changed(rng, value)) if isinstance(value, list | dict) else None
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
        return None


def _changed(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = corrupt(rng, value)
    return value
