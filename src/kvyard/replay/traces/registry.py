"""The formats a trace may be in, and how one is recognised. A new format is one ``Format`` and one call of ``register``."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.traces.errors import TraceError
from kvyard.replay.traces.files import first_record
from kvyard.replay.traces.reading import Reading
from kvyard.replay.traces.request import TraceRequest


class Head(NamedTuple):
    """The first record of a file, as far as it can be made out."""

    value: dict[str, Any]
    """What it says, if it is a JSON object."""
    columns: tuple[str, ...]
    """Its fields, if it is a line of CSV, stripped and in lower case."""

    def has(self, *fields: str) -> bool:
        """Whether it is an object with all these fields."""
        return all(field in self.value for field in fields)


class Format(NamedTuple):
    """One format."""

    name: str
    summary: str
    """One line for people: what it is and where it comes from."""
    recognise: Callable[[Head], bool]
    """Whether a file that begins like this is one."""
    read: Callable[[Reading], Iterator[TraceRequest]]
    """The requests of one pass."""
    grouped: bool = False
    """Whether each session comes as a whole, on a clock of its own, before the next begins."""


_formats: dict[str, Format] = {}


def register(new: Format) -> Format:
    """Add a format. It is tried before those added earlier. Raises ``KvyardError`` if the name is taken."""
    if new.name in _formats:
        raise KvyardError(f"there is a trace format {new.name!r} already")
    _formats[new.name] = new
    return new


def known_formats() -> dict[str, Format]:
    """All of them by name."""
    import kvyard.replay.traces.formats  # noqa: F401 - it registers ours

    return dict(_formats)


def find(name: str) -> Format:
    """The format of that name. Raises ``KvyardError`` for an unknown one."""
    known = known_formats()
    if name not in known:
        raise KvyardError(f"{name!r} is no trace format: choose one of {', '.join(sorted(known))}")
    return known[name]


def detect(path: Path) -> Format:
    """The format of a file by its first record. Raises ``TraceError`` where it can't be told."""
    record = first_record(path)
    if not record:
        raise TraceError(path, "the file is empty")
    head = look(record)
    for candidate in reversed(known_formats().values()):
        if candidate.recognise(head):
            return candidate
    known = ", ".join(sorted(known_formats()))
    if head.value:
        seen = f"an object with {', '.join(list(head.value)[:8])}"
    elif head.columns:
        seen = f"the columns {', '.join(head.columns[:8])}"
    else:
        raise TraceError(path, f"neither JSON lines nor CSV; kvyard reads {known}")
    raise TraceError(path, f"no known format begins with {seen}; pass --format if it is one of {known}")


def look(record: bytes) -> Head:
    """What a first record says of itself."""
    try:
        value = msgspec.json.decode(record)
        return Head(value if isinstance(value, dict) else {}, ())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        text = record.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return Head({}, ())
    if not text.isprintable() or text[:1] in "[{":
        return Head({}, ())
    return Head({}, tuple(field.strip().lower() for field in next(csv.reader([text]))))
