"""Measured passes from files: lines of them, as a sweep writes, or an engine's own log.

An engine's log is one JSON document whose ``passes`` are ``[start, end, scheduling, preparation, [[new, past], ...], decoding,
summed context, device ms, longest context]``: nanoseconds of one clock, but for the device's milliseconds, which may be null.
What a pass took beyond the device's time, and until the next one began, is the host's, unless the engine had nothing to do.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from kvyard.clock import MS
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.timing.measurements import Measurement, Measurements, parse_measurements
from kvyard.errors import KvyardError
from kvyard.replay.traces.files import whole

LoggedPass: TypeAlias = tuple[int, int, int, int, list[tuple[int, int]], int, int, float | None, int]
IDLE = 3
"""Multiple of the usual gap beyond which an engine counts as idle between two passes."""


class PassLog(msgspec.Struct):
    """The part of an engine's log that has its passes."""

    passes: list[LoggedPass]
    device: str | None = None


def read_passes(path: str | Path) -> Measurements:
    """Return passes from a file of either kind, packed or not. Raises ``KvyardError`` for what can't be read or has none."""
    data = whole(Path(path))
    log = _document(data)
    if log is not None:
        return passes_of(log, str(path))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise KvyardError(f"{path}: can't be read: it is no text") from None
    return parse_measurements(text, str(path))


def _document(data: bytes) -> Any:
    """Return the log that ``data`` is as a whole, ``None`` for lines."""
    if not data.lstrip().startswith(b"{"):
        return None
    try:
        document = msgspec.json.decode(data)
    except DECODE_ERRORS:
        return None
    return document if "passes" in document else None


def passes_of(log: Any, source: str) -> Measurements:
    """Return the passes of a log that was read already. Raises ``KvyardError``, naming ``source``, if it has none."""
    try:
        pass_log = msgspec.convert(log, PassLog)
    except msgspec.ValidationError as error:
        raise KvyardError(f"{source} can't be read as a log of passes: {error}") from None
    if not pass_log.passes:
        raise KvyardError(f"{source}: has no measured pass: its passes are empty")
    return Measurements(source, pass_log.device, tuple(_rows(pass_log.passes, source)))


def _rows(passes: Sequence[LoggedPass], source: str) -> list[Measurement]:
    gaps = [after[0] - before[1] for before, after in pairwise(passes)]
    most = IDLE * statistics.median(gaps) if gaps else 0
    rows = []
    for number, (row, gap) in enumerate(zip(passes, [*gaps, 0], strict=False)):
        start, end, _, _, prefills, batch, context, device_ms, longest = row
        computed = tuple((new, past) for new, past in prefills if new > 0)
        took = (end - start + (gap if 0 < gap <= most else 0)) / MS
        if took <= 0 or not (computed or batch > 0) or (device_ms is not None and device_ms <= 0):
            raise KvyardError(f"{source}: pass {number} takes no time or computes nothing: {row}")
        kind = "decode" if not computed else "mixed" if batch or len(computed) > 1 else "prefill"
        ms, host = (took, None) if device_ms is None else (device_ms, max(0.0, took - device_ms))
        rows.append(Measurement(kind, computed, batch, context, longest, ms, host))
    return rows
