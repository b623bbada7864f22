"""CSV with a header: rows by column name, and numbers out of text. It knows no columns."""

import csv
from collections.abc import Callable, Iterator

from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.reading import Reading
from kvyard.replay.traces.registry import look
from kvyard.replay.traces.request import TraceRequest

Fields = dict[str, str]


def read_table(
    reading: Reading, columns: tuple[str, ...], row: Callable[[int, Fields], TraceRequest | None]
) -> Iterator[TraceRequest]:
    """Return the requests that ``row`` makes of each line after the header, which must have ``columns`` (in lower case)."""
    header: tuple[str, ...] = ()

    def line(number: int, record: bytes) -> TraceRequest | None:
        nonlocal header
        if not header:
            columns_read = look(record).columns
            missing = [column for column in columns if column not in columns_read]
            if missing:
                raise BadRow(f"no column {missing[0]!r} in the header: it must have {', '.join(columns)}")
            header = columns_read
            return None
        try:
            fields = next(csv.reader([record.decode().rstrip("\r\n")]))
        except (UnicodeDecodeError, csv.Error, StopIteration):
            raise BadRow("not a line of CSV") from None
        if len(fields) != len(header):
            raise BadRow(f"{len(fields)} fields where the header has {len(header)}")
        return row(number, dict(zip(header, fields, strict=False)))

    return reading.rows(line)


def integer(fields: Fields, column: str) -> int:
    """Return a whole number. Raises ``BadRow`` for what is none."""
    text = fields[column]
    try:
        return int(text)
    except ValueError:
        pass
    value = real(fields, column)
    if value != int(value):
        raise BadRow(f"{column!r} is {text}: it must be a whole number")
    return int(value)


def real(fields: Fields, column: str) -> float:
    """Return a finite number. Raises ``BadRow`` for what is none."""
    text = fields[column]
    try:
        value = float(text)
    except ValueError:
        raise BadRow(f"{column!r} is {text!r}: it must be a number") from None
    if value - value != 0:
        raise BadRow(f"{column!r} is {text}: it must be finite")
    return value
