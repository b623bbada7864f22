"""What takes requests down, here or in another process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvyard.blocks import NO_HINTS, Hints
from kvyard.server.gateway.recording.recorder import RecorderCounters


class RequestRecorder(Protocol):
    """What takes down requests."""

    stopped: str
    counters: RecorderCounters
    path: Path

    def arrived(
        self,
        id_: object,
        keys: Sequence[int],
        num_tokens: int,
        *,
        key_tokens: int,
        tail: Sequence[int] | None = None,
        session: str | None = None,
        model: str | None = None,
        hints: Hints = NO_HINTS,
    ) -> None: ...

    def ended(
        self, id_: object, output_tokens: int, *, first_token: int | None = None, cached: int | None = None
    ) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...
