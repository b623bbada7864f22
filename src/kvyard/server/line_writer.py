"""Lines to a file, a pipe, a terminal or a socket, written without ever waiting for its reader.

What the system doesn't take at once is kept up to ``BACKLOG`` and tried again with the next lines; beyond that lines are
counted and left out. A pipe or terminal is opened a second time for that: its flags are shared with whoever else has it open.
"""

import logging
import os
import select
import socket
import stat
import sys
from contextlib import suppress

STDERR = "-"
BACKLOG = 1 << 20
"""Bytes of lines that are kept for a reader that is slower."""
PIECE = 4096
"""Bytes that a pipe takes whole or not at all."""
SLOW = "its reader doesn't keep up"


class LineWriter:
    """Writes lines to ``path``, or to stderr if that is ``-``. Raises ``OSError`` only where the file can't be opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lost = 0
        """Lines that were left out."""
        self.error = ""
        """Why lines couldn't be written most recently; empty where they could."""
        self._pending = bytearray()
        self._file = -1
        self._piece = PIECE
        self._shared = False
        """True if the file is open elsewhere too, and so may not be closed."""
        self._waits = False
        """True if a write may wait for a reader, so that the system is asked before each."""
        self._socket: socket.socket | None = None
        self._open()

    def write(self, lines: bytes) -> None:
        """Write whole lines, or keep them until there is room."""
        if len(self._pending) + len(lines) > BACKLOG:
            self.flush()
        if len(self._pending) + len(lines) > BACKLOG and self._pending:
            self.lost += lines.count(b"\n")
            self.error = self.error or SLOW
            return
        self._pending += lines
        self.flush()

    def flush(self) -> None:
        """Write what is pending, as far as there is room."""
        pending = self._pending
        try:
            while pending:
                end = pending.rfind(b"\n", 0, self._piece) + 1 or self._piece
                if self._waits and not _has_room(self._file):
                    raise BlockingIOError
                if self._socket is not None:
                    del pending[: self._socket.send(pending[:end], socket.MSG_DONTWAIT)]
                else:
                    del pending[: os.write(self._file, pending[:end])]
            self.error = ""
        except BlockingIOError:
            if len(pending) > BACKLOG // 2:
                self.error = SLOW
        except OSError as error:
            self.lost += pending.count(b"\n")
            pending.clear()
            self.error = error.strerror or str(error)

    def reopen(self) -> None:
        """Open the file again by its name: the old one may have been renamed. Raises ``OSError`` and keeps it then."""
        self.flush()
        old, shared, pipe = self._file, self._shared, self._socket
        self._open()
        _close(old, shared, pipe)

    def close(self) -> None:
        """Write what there is room for, count the rest as lost."""
        self.flush()
        self.lost += self._pending.count(b"\n")
        self._pending.clear()
        _close(self._file, self._shared, self._socket)
        self._file, self._socket = -1, None

    def _open(self) -> None:
        if self.path == STDERR:
            self._open_stderr()
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.stat(self.path).st_mode):
                # Opened for both, or it would wait for a reader, now and after each.
                flags = os.O_RDWR | os.O_NONBLOCK
        self._file = os.open(self.path, flags, 0o600)
        self._piece = PIECE if flags & os.O_NONBLOCK else BACKLOG
        _widen(self._file)

    def _open_stderr(self) -> None:
        self._file, self._shared, self._socket = sys.stderr.fileno(), True, None
        mode = os.fstat(self._file).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(self._file))
        elif not stat.S_ISREG(mode):
            try:
                self._file = os.open(f"/proc/self/fd/{self._file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._shared = False
                _widen(self._file)
            except OSError:  # another user's, or there is no /proc
                self._waits = True


def _close(file: int, shared: bool, pipe: socket.socket | None) -> None:
    if pipe is not None:
        pipe.close()
    if not shared and file >= 0:
        os.close(file)


def _has_room(file: int) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return bool(poll.poll(0))


def _widen(file: int) -> None:
    """Let a pipe hold more, so that a reader has some time."""
    with suppress(ImportError, AttributeError, OSError):  # not on this system, or no pipe
        import fcntl

        fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, BACKLOG)


class LineHandler(logging.Handler):
    """Logs to stderr without ever waiting for its reader."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = LineWriter(STDERR)
        self._logged = 0
        """Lost lines that were reported."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            lost = self._writer.lost - self._logged
            if lost:
                text += f"\n{lost} lines were left out: stderr wasn't read"
            self._writer.write(text.encode("utf-8", "backslashreplace") + b"\n")
            if self._writer.lost == self._logged + lost:
                self._logged += lost
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        super().close()
