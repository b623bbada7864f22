"""Logs of a real vLLM block manager: reading them, replaying them, and finding the first difference.

The format is that of the oracle they were recorded with: JSON lines of an operation and its result, the first a
configuration. What vLLM says of itself (class names, version) is not compared; everything it did is.
"""

from __future__ import annotations

import json
import lzma
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvyard.blocks.conform.replayer import LogError, Record, Replayer
from kvyard.errors import KvyardError

ABOUT_VLLM = ("vllm", "coordinator", "managers")
"""Fields of a configuration's result that name vLLM's own parts."""


class Difference(msgspec.Struct, frozen=True):
    """The first operation whose result is not the recorded one."""

    line: int
    op: Record
    field: str
    recorded: object
    ours: object
    before: list[Record]
    """The operations that led there, the last few."""


class Verdict(msgspec.Struct, frozen=True):
    """How one log compares."""

    name: str
    operations: int
    difference: Difference | None


def conform(path: Path) -> Verdict:
    """Replay one log (plain or .xz). Raises ``LogError`` for a file that isn't one."""
    name = path.name.removesuffix(".xz").removesuffix(".jsonl")
    replayer: Replayer | None = None
    before: deque[Record] = deque(maxlen=5)
    number = 0
    for number, record in _records(path):
        op, recorded = record["op"], record["result"]
        if replayer is None:
            if op["op"] != "config":
                raise LogError(f"{path}:{number}: the first operation must be config, not {op['op']!r}")
            try:
                replayer = Replayer(op)
            except (KvyardError, TypeError, KeyError, AttributeError) as refused:
                raise LogError(f"{path}:{number}: this configuration can't be replayed: {refused}") from refused
            ours = replayer.configured()
            recorded = {key: value for key, value in recorded.items() if key not in ABOUT_VLLM}
        else:
            try:
                ours = replayer.apply(op)
            except (LogError, TypeError) as refused:
                raise LogError(f"{path}:{number}: this operation can't be replayed: {refused}") from refused
        field = _first_difference(recorded, ours)
        if field is not None:
            return Verdict(
                name, number, Difference(number, op, field, recorded.get(field), ours.get(field, ours), list(before))
            )
        before.append(op)
    if replayer is None:
        raise LogError(f"{path}: the log is empty")
    return Verdict(name, number, None)


def _first_difference(recorded: Record, ours: Record) -> str | None:
    if "error" in recorded and "error" in ours:
        return None
    for field in sorted(recorded.keys() | ours.keys()):
        if field not in ours or field not in recorded or recorded[field] != ours[field]:
            return field
    return None


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    if not (isinstance(record["op"]["op"], str) and isinstance(record["result"], dict)):
                        raise TypeError
                except (ValueError, KeyError, TypeError) as bad:
                    raise LogError(f'{path}:{number}: expected a line of {{"op": ..., "result": ...}}') from bad
                yield number, record
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as bad:
        raise LogError(f"{path}: can't be read: {bad}") from bad
