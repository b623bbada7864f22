"""The access log: a line of JSON for each request, with its outcome and without its content."""

import logging

import msgspec

from kvyard.errors import KvyardError
from kvyard.server.line_writer import LineWriter

log = logging.getLogger(__name__)

PORTION = 64 << 10
"""Bytes of lines that are written without waiting for more."""


class AccessLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are milliseconds since its arrival, unless noted."""

    time: float
    """Arrival, in seconds since 1970."""
    id: str = ""
    path: str
    key: str = ""
    """Name of its key."""
    model: str = ""
    status: int
    outcome: str
    """Outcome, as in ``kvyard_gateway_requests_total``."""
    engine: str = ""
    why: str = ""
    """Why that engine."""
    tries: int = 0
    bytes_in: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    waited_ms: float = 0.0
    """Of these, until it was placed, those that flow control held it back,"""
    waited_because: str = ""
    """and why."""
    placed_ms: float = 0.0
    first_byte_ms: float = 0.0
    total_ms: float = 0.0


class AccessLog:
    """Lines at the end of a file, or on stderr. A line that can't be written is counted and left out."""

    def __init__(self, path: str) -> None:
        """``path`` may be ``-`` for stderr. Raises ``KvyardError`` if it can't be written."""
        self.path = path
        self._lines: list[bytes] = []
        self._gathered = 0
        try:
            self._open()
        except OSError as error:
            raise KvyardError(f"can't write the access log {path}: {error.strerror}") from None

    @property
    def lost(self) -> int:
        """Lines that were left out."""
        return self._writer.lost

    @property
    def error(self) -> str:
        """Why the latest lines couldn't be written; empty where they could."""
        return self._writer.error

    def add(self, line: AccessLine) -> None:
        """Take a line, and write what was gathered if that is enough."""
        text = msgspec.json.encode(line) + b"\n"
        self._lines.append(text)
        self._gathered += len(text)
        if self._gathered >= PORTION:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        text, self._lines, self._gathered = b"".join(self._lines), [], 0
        self.write(text)

    def write(self, text: bytes) -> None:
        """Write whole lines, after the lines that are still waiting."""
        before = self._writer.error
        self._writer.write(text)
        if self._writer.error and not before:
            log.warning("the access log %s can't be written: %s", self.path, self._writer.error)

    def reopen(self) -> None:
        """Begin the file again by its name: the old one may have been put aside. Keeps the old one if that can't be done."""
        self.flush()
        try:
            self._writer.reopen()
        except OSError as error:
            log.warning("the access log %s can't be opened again: %s", self.path, error.strerror)

    def close(self) -> None:
        """Write what was gathered and end it."""
        self.flush()
        self._writer.close()

    def _open(self) -> None:
        self._writer = LineWriter(self.path)
