"""Files that appear under their names once they are whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvyard.errors import KvyardError


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write, in place of what was there; nothing is left of it if that fails. Raises ``KvyardError``."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:
        raise KvyardError(f"can't write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Raise ``KvyardError`` where a file can't be written there, before there is anything to write."""
    path = Path(path)
    if path.is_dir():
        raise KvyardError(f"can't write {path}: it is a folder")
    if not os.access(path.parent, os.W_OK):
        raise KvyardError(f"can't write {path}: {path.parent} isn't there, or isn't yours to write to")


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write a file in one go. Raises as ``whole_file`` does."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
