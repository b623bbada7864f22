"""Receivers of requests for a recording, here or in another process, and the facts that they receive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvyard.blocks import NO_HINTS, Hints


class RecorderCounters(msgspec.Struct):
    """Counters of recorded requests."""

    rows: int = 0
    bytes: int = 0
    """Written, as packed."""
    left_out: int = 0
    """Requests that made no token: refused, failed, or open at the end."""
    late: int = 0
    """Requests that were open for too long for the others to wait for them."""
    errors: int = 0
    """Of the file system; the first ends the recording."""


class ArrivedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that came."""

    id: object
    keys: Sequence[int]
    """Names of its full blocks."""
    num_tokens: int
    key_tokens: int
    """Tokens of each of those blocks."""
    tail: Sequence[int] | None = None
    """Tokens behind them; ``None`` if they aren't known."""
    session: str | None = None
    model: str | None = None
    """For gateways that serve several, whose prompts share nothing."""
    hints: Hints = NO_HINTS


class RequestRecorder(Protocol):
    """Takes down requests."""

    stopped: str
    counters: RecorderCounters
    path: Path

    def arrived(self, request: ArrivedRequest) -> None: ...

    def ended(
        self, id_: object, output_tokens: int, *, first_token: int | None = None, cached: int | None = None
    ) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
