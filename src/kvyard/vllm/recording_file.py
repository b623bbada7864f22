"""One file of a recording. It ends at its limit or if it can't be written, with a line in the log, and counts its rows."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from kvyard.line_file import LineFile

log = logging.getLogger("vllm.kvyard")


class RecordingFile:
    """A file of lines that never raises once it has begun."""

    def __init__(self, path: Path, limit: int) -> None:
        """Raises ``KvyardError`` where the file exists or can't be written."""
        self.rows = 0
        """Rows that are written: without those in memory, or lost with the disk."""
        self.errors = 0
        self.ended = False
        self._file = LineFile(path)
        self._limit = limit
        self._gathered = 0

    def add(self, lines: bytes, rows: int = 1) -> None:
        """Take ``lines``, which count as ``rows``. Does nothing once the file has ended."""
        if not self.ended:
            self._gathered += rows
            self._write(lambda: self._file.add(lines))

    def flush(self) -> None:
        """Write what was gathered."""
        if not self.ended:
            self._write(self._file.flush)

    def close(self) -> None:
        """Write what was gathered and end the file."""
        if not self.ended:
            self._write(self._file.close)
            self.ended = True

    def _write(self, write: Callable[[], None]) -> None:
        before = self._file.bytes
        try:
            write()
            if self._file.bytes > before:
                self.rows += self._gathered
                self._gathered = 0
            if self._file.bytes >= self._limit:
                self.ended = True
                self._file.close()
                log.warning("kvyard: %s has reached its limit of %d bytes and ends", self._file.path, self._limit)
        except OSError as problem:
            self.ended = True
            self.errors += 1
            with contextlib.suppress(OSError):
                self._file.close()
            log.warning("kvyard: recording of %s ended: it can't be written: %s", self._file.path, problem.strerror)
