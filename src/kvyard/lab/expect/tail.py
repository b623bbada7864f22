"""The end of a growing recording, read in constant time however long the recording is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from kvyard.errors import KvyardError
from kvyard.lab.expect.traffic import Traffic, read_traffic
from kvyard.replay.traces import Trace

CHUNK = 1 << 20
PACKED = (".gz", ".xz")


def read_latest(path: Path, rows: int, read: Callable[[Path], Trace]) -> Traffic:
    """Read the latest ``rows`` requests of the JSON lines in ``path``; all of a packed file, which can't be read from its end.

    ``read`` opens a trace. Raises ``KvyardError`` as reading traces does.
    """
    if path.suffix in PACKED:
        return read_traffic(read(path))
    with tempfile.TemporaryDirectory(prefix="kvyard-watch-") as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(last_lines(path, rows))
        return read_traffic(read(copy))


def last_lines(path: Path, count: int) -> bytes:
    """Return the last ``count`` lines of ``path`` that are whole: what comes after the last line break is being written."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, 2)
            kept = b""
            while start > 0 and kept.count(b"\n") <= count:
                step = min(CHUNK, start)
                start -= step
                file.seek(start)
                kept = file.read(step) + kept
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
    lines = kept.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return b"".join(lines[-count:])
