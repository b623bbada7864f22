"""Compiled pass tables on disk: a file per model, card, split and source, found again by what it was made from."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.timing.pass_table import FORMAT, PassTable
from kvyard.errors import KvyardError


def cache_folder() -> Path:
    """Return the folder of tables: KVYARD_CACHE, or ``kvyard`` in the user's cache folder."""
    asked = os.environ.get("KVYARD_CACHE")
    return Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvyard"


def cached_table(parts: list[str], make: Callable[[], PassTable]) -> PassTable:
    """Return the table made from what ``parts`` name: from disk, or by ``make`` and then kept.

    A file that can't be read or written is no error: the table is then made again the next time.
    """
    key = xxhash.xxh3_128_hexdigest("\n".join([FORMAT, *parts]).encode())
    path = cache_folder() / "timing" / f"{key}.msgpack"
    try:
        table = msgspec.msgpack.decode(path.read_bytes(), type=PassTable)
        table.check()
        return table
    except (OSError, KvyardError, *DECODE_ERRORS):
        pass
    table = make()
    table.check()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.msgpack.encode(table))
        Path(file.name).replace(path)
    except OSError:
        pass
    return table


def folder_digest(folder: Path) -> str:
    """Return a fingerprint of the CSV files in ``folder``."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.csv")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
