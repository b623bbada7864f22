"""The formats a trace may be in, and how one is recognised. A format is one file with a ``Format``, and one entry here.

Installed packages add to them by an entry point in the group ``kvyard.traces``, programs by ``FORMATS.register(name, format)``.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.registry import Registry
from kvyard.replay.traces.errors import TraceError
from kvyard.replay.traces.files import first_record
from kvyard.replay.traces.reading import Reading
from kvyard.replay.traces.request import TraceRequest


class Head(NamedTuple):
    """The first record of a file, as far as it can be made out."""

    value: dict[str, Any]
    """Its value, if it is a JSON object."""
    columns: tuple[str, ...]
    """Its fields, if it is a line of CSV, stripped and in lower case."""

    def has(self, *fields: str) -> bool:
        """Return true if it is an object with all these fields."""
        return all(field in self.value for field in fields)


class Format(NamedTuple):
    """One format."""

    name: str
    summary: str
    """One line for people: what it is and where it comes from."""
    recognise: Callable[[Head], bool]
    """Return true if a file that begins like this is of the format."""
    read: Callable[[Reading], Iterator[TraceRequest]]
    """The requests of one pass."""
    grouped: bool = False
    """True if each session comes as a whole, on a clock of its own, before the next begins."""


HOME = "kvyard.replay.traces.formats"
OURS = {
    name: f"{HOME}.{name}:FORMAT"
    for name in (
        "dynamo",
        "weka",
        "otel",
        "servegen",
        "lmcache",
        "bailian",
        "ragpulse",
        "tracelab",
        "mooncake",
        "sharegpt",
        "burstgpt",
        "blis",
        "multi_round_qa",
        "azure",
        "plain",
    )
}
"""In the order in which they are tried: the more a format asks of a first record, the earlier."""
FORMATS: Registry[Format] = Registry("trace format", "kvyard.traces", OURS)


def detect(path: Path) -> Format:
    """Return the format of a file by its first record; those added from outside are tried first, the latest before the
    others.

    Raises ``TraceError`` if it is unclear.
    """
    record = first_record(path)
    if not record:
        raise TraceError(path, "the file is empty")
    head = look(record)
    known = FORMATS.names()
    for name in [*reversed(known[len(OURS) :]), *OURS]:
        try:
            candidate = FORMATS.get(name)
        except KvyardError:
            continue  # a package that can't be loaded is no obstacle to other formats; asked for by name, it is refused
        if candidate.recognise(head):
            return candidate
    names = ", ".join(sorted(known))
    if head.value:
        seen = f"an object with {', '.join(list(head.value)[:8])}"
    elif head.columns:
        seen = f"the columns {', '.join(head.columns[:8])}"
    else:
        raise TraceError(path, f"neither JSON lines nor CSV; kvyard reads {names}")
    raise TraceError(
        path,
        f"no known format begins with {seen}; pass --format if it is one of {names}. A CSV file with the columns arrival "
        "(seconds), input and output (tokens) alone is read as plain",
    )


def look(record: bytes) -> Head:
    """Return the description of a first record."""
    try:
        value = msgspec.json.decode(record)
        return Head(value if isinstance(value, dict) else {}, ())
    except DECODE_ERRORS:
        pass
    try:
        text = record.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return Head({}, ())
    if not text.isprintable() or text[:1] in "[{":
        return Head({}, ())
    return Head({}, tuple(field.strip().lower() for field in next(csv.reader([text]))))
