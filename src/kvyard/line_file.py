"""Lines to a file, compressed or not, whose process may die at any moment, and whose size is limited.

Lines are gathered and written together. In a ``.gz`` file each portion is a member of its own: members one after another
are a gzip file too. Whatever happens, a full disk in the middle of a portion too, the file ends with a whole line; where
the process is killed while it writes, only its last line may be broken.
"""

import gzip
import os
from contextlib import suppress
from pathlib import Path

from kvyard.errors import KvyardError

PORTION = 256 << 10
"""Bytes of lines that are written without waiting for more."""


class LineFile:
    """A file of lines, or a row of them. Methods that write raise ``OSError``; the file has no broken line then, and ``lost``
    counts the lines that aren't in it.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        """Begin the file, for its owner's eyes only. ``keep``: how many full ones ``rotate`` leaves beside it.

        Raises ``KvyardError`` where it exists already or can't be written.
        """
        self.path = path
        self.keep = keep
        self.bytes = 0
        """In this file, as packed."""
        self.lost = 0
        """Lines that couldn't be written."""
        self.rotations = 0
        self._packed = path.suffix == ".gz"
        self._lines: list[bytes] = []
        self._gathered = 0
        try:
            self._file = self._begin()
        except FileExistsError:
            raise KvyardError(f"{path} exists: choose another name, such as one with {{start}}, or remove it") from None
        except OSError as error:
            raise KvyardError(f"can't write {path}: {error.strerror}") from None

    def add(self, line: bytes) -> None:
        """Take a line, and write what was gathered if that is enough."""
        self._lines.append(line)
        self._gathered += len(line)
        if self._gathered >= PORTION:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered: it survives this process then."""
        if not self._lines:
            return
        lines, portion = len(self._lines), b"".join(self._lines)
        self._lines, self._gathered = [], 0
        if self._packed:
            portion = gzip.compress(portion, 4, mtime=0)
        rest = memoryview(portion)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # Back to the last whole line that fitted; of a packed portion nothing can be kept.
            whole = 0 if self._packed else portion.rfind(b"\n", 0, len(portion) - len(rest)) + 1
            self.lost += lines - (0 if self._packed else portion.count(b"\n", 0, whole))
            self.bytes += whole
            with suppress(OSError):
                os.ftruncate(self._file, self.bytes)
            raise
        self.bytes += len(portion)

    def rotate(self) -> None:
        """Put the file aside under a number, begin it again, and remove the oldest beyond ``keep``."""
        self.flush()
        self._end()
        self.rotations += 1
        os.rename(self.path, self._numbered(self.rotations))
        if self.rotations > self.keep:
            self._numbered(self.rotations - self.keep).unlink(missing_ok=True)
        self._file = self._begin()
        self.bytes = 0

    def close(self) -> None:
        """Write what was gathered and end the file."""
        try:
            self.flush()
        finally:
            self._end()

    def _end(self) -> None:
        # Once: the number may be another file's by the next time.
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _begin(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def _numbered(self, number: int) -> Path:
        stem, dot, suffixes = self.path.name.partition(".")
        return self.path.with_name(f"{stem}.{number}{dot}{suffixes}")
