"""Bytes of a trace from a file: plain, gzip or xz, a line at a time. It knows no format.

A directory is a trace too, of one record per ``.json`` file, or else of the lines of all its ``.jsonl`` files, which is how
agent sessions are published. A ``.json`` file is one record as a whole.
"""

import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from kvyard.replay.traces.errors import TraceError

MAX_LINE = 1 << 28
"""Bytes of the longest line we believe in. What is longer isn't a line."""

PACKED = (".gz", ".xz")


def open_bytes(path: Path) -> IO[bytes]:
    """Return the unpacked bytes of ``path``. Raises ``TraceError`` if it can't be opened."""
    try:
        if path.suffix == ".gz":
            return cast("IO[bytes]", gzip.open(path, "rb"))
        if path.suffix == ".xz":
            return cast("IO[bytes]", lzma.open(path, "rb"))
        return path.open("rb")
    except FileNotFoundError:
        raise TraceError(path, "no such file") from None
    except OSError as error:
        raise TraceError(path, f"can't be read: {error.strerror}") from None


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the records of a trace and the number of each: lines from 1, or whole files. Blank lines are left out.

    Raises ``TraceError`` where the file can't be read or breaks off.
    """
    if path.is_dir():
        files = sorted(child for child in path.iterdir() if _is_document(child))
        for number, child in enumerate(files, 1):
            yield number, whole(child)
        if not files:
            yield from _lines_of_all(path)
    elif _is_document(path):
        yield 1, whole(path)
    else:
        yield from _lines(path)


def is_cut_off(path: Path, record: bytes) -> bool:
    """Return true if a record is a line without its end: the last one of a file whose writer was killed."""
    return not record.endswith(b"\n") and not path.is_dir() and not _is_document(path)


def _lines_of_all(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a directory's files, numbered as if they were one file."""
    files = sorted(child for child in path.iterdir() if _plain_suffix(child) == ".jsonl")
    if not files:
        raise TraceError(
            path, "a directory without .json files, or .jsonl files: name a trace file, or a directory of sessions"
        )
    before = last = 0
    for child in files:
        for last, record in _lines(child):
            yield before + last, record
        before += last


def whole(path: Path) -> bytes:
    """Return the unpacked file. Raises ``TraceError`` as ``records`` does."""
    with open_bytes(path) as file:
        try:
            return file.read()
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise TraceError(path, _broken(path, error)) from None


def first_record(path: Path) -> bytes:
    """Return the first record, for a look at the format; empty if there is none. Raises ``TraceError`` as ``records`` does."""
    for _, record in records(path):
        return record
    return b""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    with open_bytes(path) as file:
        try:
            for line in iter(lambda: file.readline(MAX_LINE), b""):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if len(line) == MAX_LINE:
                    raise TraceError(path, f"no end of line within {MAX_LINE >> 20} MiB: is this a text file?", number)
                if not line.isspace():
                    yield number, line
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise TraceError(path, _broken(path, error), number + 1) from None


def _broken(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"can't be read: {error.strerror}"
    kind = {".gz": "gzip", ".xz": "xz"}.get(path.suffix, "")
    if isinstance(error, EOFError):
        return f"the {kind} file breaks off: fetch it again, or unpack what is there and use --skip-bad"
    return f"not a whole {kind} file ({error}): fetch it again, or rename it if it isn't packed"


def _is_document(path: Path) -> bool:
    return _plain_suffix(path) == ".json"


def _plain_suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix
