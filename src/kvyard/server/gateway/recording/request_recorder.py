"""Recorders of requests, in this process or another, and the facts that they receive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvyard.blocks import NO_HINTS, Hints


class RecorderCounters(msgspec.Struct):
    """Counters of recorded requests."""

    rows: int = 0
    bytes: int = 0
    """Bytes written, after compression."""
    left_out: int = 0
    """Requests without a token: refused, failed, or in flight at the end."""
    late: int = 0
    """Requests left out because they were in flight for too long: rows are in order of arrival."""
    errors: int = 0
    """Errors of the file system; the first ends the recording."""


class ArrivedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request at its arrival."""

    id: object
    keys: Sequence[int]
    """Names of its full blocks."""
    num_tokens: int
    key_tokens: int
    """Tokens of each of those blocks."""
    tail: Sequence[int] | None = None
    """Tokens after the last full block; ``None`` if unknown."""
    session: str | None = None
    model: str | None = None
    """Set by gateways that serve several models: prompts of different models share no prefix."""
    hints: Hints = NO_HINTS


class RequestRecorder(Protocol):
    """Writes a recording of requests."""

    stopped: str
    counters: RecorderCounters
    path: Path

    def arrived(self, request: ArrivedRequest) -> None: ...

    def ended(
        self, id_: object, output_tokens: int, *, first_token: int | None = None, cached: int | None = None
    ) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
