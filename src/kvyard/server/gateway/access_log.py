"""The access log: a line of JSON for each request, of what became of it. Nothing of what it said is in there."""

import logging
import os
import sys

import msgspec

from kvyard.errors import KvyardError

log = logging.getLogger(__name__)

STDERR = "-"
PORTION = 64 << 10
"""Bytes of lines that are written without waiting for more."""


class AccessLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are milliseconds since it came, unless it says otherwise."""

    time: float
    """When it came, in seconds since 1970."""
    id: str = ""
    path: str
    key: str = ""
    """Whose it was, by the name of its key."""
    model: str = ""
    status: int
    outcome: str
    """As in ``kvyard_gateway_requests_total``."""
    engine: str = ""
    why: str = ""
    """Why that engine."""
    tries: int = 0
    bytes_in: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    placed_ms: float = 0.0
    first_byte_ms: float = 0.0
    total_ms: float = 0.0


class AccessLog:
    """Lines at the end of a file, or on stderr. A line that can't be written is counted and left out."""

    def __init__(self, path: str) -> None:
        """``path`` may be ``-`` for stderr. Raises ``KvyardError`` where it can't be written."""
        self.path = path
        self.lost = 0
        self.error = ""
        """Why the last lines couldn't be written; empty where they could."""
        self._lines: list[bytes] = []
        self._gathered = 0
        self._file = -1
        try:
            self._open()
        except OSError as error:
            raise KvyardError(f"can't write the access log {path}: {error.strerror}") from None

    def add(self, line: AccessLine) -> None:
        """Take a line, and write what was gathered if that is enough."""
        text = msgspec.json.encode(line) + b"\n"
        self._lines.append(text)
        self._gathered += len(text)
        if self._gathered >= PORTION:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        if not self._lines:
            return
        text, self._lines, self._gathered = b"".join(self._lines), [], 0
        self.write(text)

    def write(self, text: bytes) -> None:
        """Write whole lines at once."""
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self.error = ""
        except OSError as error:
            self.lost += text.count(b"\n")
            if not self.error:
                log.warning("the access log %s can't be written: %s", self.path, error.strerror)
            self.error = error.strerror or str(error)

    def reopen(self) -> None:
        """Begin the file again by its name: the old one may have been put aside. Keeps the old one where that can't be done."""
        self.flush()
        old = self._file
        try:
            self._open()
        except OSError as error:
            log.warning("the access log %s can't be opened again: %s", self.path, error.strerror)
            return
        if self.path != STDERR and old >= 0:
            os.close(old)

    def close(self) -> None:
        """Write what was gathered and end it."""
        self.flush()
        if self.path != STDERR and self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self) -> None:
        if self.path == STDERR:
            self._file = sys.stderr.fileno()
        else:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
