"""Measured passes, as JSON lines: what a profile is fitted to. It reads and checks rows and knows no formula.

    {"kind": "prefill", "new": 512, "past": 2048, "ms": 17.34}
    {"kind": "decode", "batch": 32, "ctx": 4096, "ms": 9.09}
    {"kind": "mixed", "prefills": [[512, 0], [64, 2048]], "batch": 32, "ctx": 4096, "ms": 20.9}

``ctx`` is each sequence's context, the token being computed included. Lines of other kinds (``device``, ``copy``) are left
alone; a ``device`` line names the card.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from kvyard.errors import KvyardError

KINDS = ("prefill", "decode", "mixed")
SHOWN = 5
"""Bad rows named in one refusal."""


class Measurement(msgspec.Struct, frozen=True):
    """One measured pass."""

    kind: str
    prefills: tuple[tuple[int, int], ...]
    batch: int
    ctx: int
    ms: float

    @property
    def shape(self) -> tuple[tuple[tuple[int, int], ...], int, int]:
        """As a timing model takes it: prefills, decode batch, summed context."""
        return self.prefills, self.batch, self.batch * self.ctx

    def __str__(self) -> str:
        parts = [f"{new} new after {past}" for new, past in self.prefills]
        if self.batch:
            parts.append(f"{self.batch} decoding at {self.ctx}")
        return ", ".join(parts)


class Measurements(msgspec.Struct, frozen=True):
    """A file of them."""

    source: str
    device: str | None
    rows: tuple[Measurement, ...]


def read_measurements(path: str | Path) -> Measurements:
    """Read a file. Raises ``KvyardError`` for one that can't be read, has no measured pass, or has bad rows, by line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvyardError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    rows, faults, device = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
            if not isinstance(value, dict):
                raise KvyardError("not a JSON object")
            if value.get("kind") == "device":
                device = str(value.get("name"))
            elif value.get("kind") in KINDS:
                rows.append(_row(value))
            elif not isinstance(value.get("kind"), str):
                raise KvyardError(f"no kind; {', '.join(KINDS)} are measured passes")
        except msgspec.DecodeError as error:
            faults.append(f"line {number}: not JSON ({error})")
        except KvyardError as error:
            faults.append(f"line {number}: {error}")
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise KvyardError(f"{path}: {'; '.join(faults[:SHOWN])}{more}")
    if not rows:
        raise KvyardError(f"{path}: has no measured pass: lines of kind {', '.join(KINDS)} are needed")
    return Measurements(str(path), device, tuple(rows))


def _row(value: dict[str, Any]) -> Measurement:
    kind = value["kind"]
    ms = value.get("ms")
    if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not (math.isfinite(ms) and ms > 0):
        raise KvyardError(f"ms must be a number above 0, got {ms!r}")
    if kind == "prefill":
        return Measurement(kind, ((_count(value, "new", 1), _count(value, "past", 0)),), 0, 0, float(ms))
    if kind == "decode":
        return Measurement(kind, (), _count(value, "batch", 1), _count(value, "ctx", 1), float(ms))
    pairs = value.get("prefills")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise KvyardError(f"prefills must be a list of [new, past] pairs, got {pairs!r}")
    prefills = tuple((_count({"new": new}, "new", 1), _count({"past": past}, "past", 0)) for new, past in pairs)
    batch = _count(value, "batch", 0)
    if not prefills and not batch:
        raise KvyardError("a mixed pass computes something: prefills or a batch above 0")
    return Measurement(kind, prefills, batch, _count(value, "ctx", 1 if batch else 0), float(ms))


def _count(value: dict[str, Any], name: str, least: int) -> int:
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise KvyardError(f"{name} must be a whole number of at least {least}, got {found!r}")
    return found
