"""Measured passes, and the files that they come in.

Measurements are JSON lines:

    {"kind": "prefill", "new": 512, "past": 2048, "ms": 17.34}
    {"kind": "decode", "batch": 32, "ctx": 4096, "ms": 9.09}
    {"kind": "mixed", "prefills": [[512, 0], [64, 2048]], "batch": 32, "ctx": 4096, "ms": 20.9}
    {"kind": "mixed", "prefills": [], "batch": 32, "context": 131072, "longest": 9000, "ms": 9.6, "host_ms": 0.7}
    {"kind": "skew", "batch": 32, "mean": 1215.6, "max": 7900, "ms": 7.1}

``ctx`` is each sequence's context, the token being computed included; where they differ, ``context`` is their sum and
``longest`` the longest, or ``mean`` and ``max`` in a line of kind ``skew``. Where ``host_ms`` is there, ``ms`` is what the
device took and ``host_ms`` what came on top. Lines of other kinds (``copy``) are left alone; a ``device`` line names the card.
"""

import math
from typing import Any, TypeAlias

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError

KINDS = ("prefill", "decode", "mixed")
READ = (*KINDS, "skew")
NAMED = 3
"""Prompts of a pass that are named one by one."""
SHOWN = 5
"""Bad rows named in one refusal."""
PassShape: TypeAlias = tuple[tuple[tuple[int, int], ...], int, int, int]
"""A pass as a timing model takes it: prefills, decode batch, summed context, longest context."""


class Measurement(msgspec.Struct, frozen=True):
    """One measured pass."""

    kind: str
    prefills: tuple[tuple[int, int], ...]
    batch: int
    context: int
    """Summed over the batch."""
    longest: int
    ms: float
    host_ms: float | None = None
    """Time that the host added, if measured: ``ms`` is then the device's alone."""
    others: tuple[tuple[float, PassShape], ...] = ()
    """Other passes that ``ms`` holds, and how many of each, if several were timed as one."""
    group: int | None = None
    """Measurements of one group were taken together, and are left out of a fit together."""

    @property
    def shape(self) -> PassShape:
        """The pass as a timing model takes it."""
        return self.prefills, self.batch, self.context, self.longest

    def __str__(self) -> str:
        parts = [f"{new} new after {past}" for new, past in self.prefills[:NAMED]]
        if len(self.prefills) > NAMED:
            parts.append(f"{len(self.prefills) - NAMED} more prompts")
        if self.batch:
            parts.append(f"{self.batch} decoding at {self.context // self.batch}")
        return ", ".join(parts)


class Measurements(msgspec.Struct, frozen=True):
    """A file of them, or what else they come from."""

    source: str
    device: str | None
    rows: tuple[Measurement, ...]
    lone: tuple[Measurement, ...] = ()
    """Prompts that an engine computed alone, with all that their clients waited for beyond the pass."""
    request_ms: float | None = None
    """Clients' waiting beyond passes, if measured."""
    notes: tuple[str, ...] = ()
    """Notes for readers of the fit."""


def parse_measurements(text: str, source: str) -> Measurements:
    """Parse the lines of a file, ``source``. Raises ``KvyardError`` if there is no measured pass, and for bad rows, by line."""
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
            elif value.get("kind") in READ:
                rows.append(_row(value))
            elif not isinstance(value.get("kind"), str):
                raise KvyardError(f"no kind; {', '.join(KINDS)} are measured passes")
        except DECODE_ERRORS as error:
            faults.append(f"line {number}: not JSON ({error})")
        except KvyardError as error:
            faults.append(f"line {number}: {error}")
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise KvyardError(f"{source}: {'; '.join(faults[:SHOWN])}{more}")
    if not rows:
        raise KvyardError(f"{source}: has no measured pass: lines of kind {', '.join(KINDS)} are needed")
    return Measurements(source, device, tuple(rows))


def _row(value: dict[str, Any]) -> Measurement:
    kind = value["kind"]
    ms = value.get("ms")
    if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not (math.isfinite(ms) and ms > 0):
        raise KvyardError(f"ms must be a number above 0, got {ms!r}")
    host = value.get("host_ms")
    if host is not None and (isinstance(host, bool) or not isinstance(host, (int, float)) or not 0 <= host < math.inf):
        raise KvyardError(f"host_ms must be a number of at least 0, got {host!r}")
    if kind == "prefill":
        return Measurement(kind, ((_count(value, "new", 1), _count(value, "past", 0)),), 0, 0, 0, float(ms), host)
    if kind in ("decode", "skew"):
        return Measurement("decode", (), *_decoding(value, _count(value, "batch", 1)), float(ms), host)
    pairs = value.get("prefills")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise KvyardError(f"prefills must be a list of [new, past] pairs, got {pairs!r}")
    prefills = tuple((_count({"new": new}, "new", 1), _count({"past": past}, "past", 0)) for new, past in pairs)
    batch = _count(value, "batch", 0)
    if not prefills and not batch:
        raise KvyardError("a mixed pass computes something: prefills or a batch above 0")
    if not prefills:
        kind = "decode"
    elif not batch:
        kind = "prefill" if len(prefills) == 1 else kind
    return Measurement(kind, prefills, *_decoding(value, batch), float(ms), host)


def _decoding(value: dict[str, Any], batch: int) -> tuple[int, int, int]:
    """Return batch, summed context, longest context."""
    if not batch:
        return 0, 0, 0
    if value["kind"] == "skew":
        mean = value.get("mean")
        if isinstance(mean, bool) or not isinstance(mean, (int, float)) or not 1 <= mean < math.inf:
            raise KvyardError(f"mean must be a number of at least 1, got {mean!r}")
        return batch, round(batch * mean), _count(value, "max", 1)
    if "context" in value:
        context = _count(value, "context", batch)
        return batch, context, _count(value, "longest", 0) if "longest" in value else 0
    each = _count(value, "ctx", 1)
    return batch, batch * each, each


def _count(value: dict[str, Any], name: str, least: int) -> int:
    number = value.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise KvyardError(f"{name} must be a whole number of at least {least}, got {number!r}")
    return number
