"""Errors of a trace, with their place."""

from pathlib import Path

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError


class TraceError(KvyardError):
    """A trace that can't be read: the file, the line if there is one, what is wrong, and what would help."""

    def __init__(self, path: str | Path, why: str, line: int | None = None) -> None:
        super().__init__(f"{path}: {why}" if line is None else f"{path}, line {line}: {why}")
        self.path = path
        self.line = line
        self.why = why


class BadRow(Exception):
    """Why a row is no request. Readers raise it; ``Reading`` names the line or counts it."""


UNREADABLE = (BadRow, *DECODE_ERRORS)
"""Exceptions of reading a record."""
