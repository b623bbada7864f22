"""Azure's public LLM traces: CSV of wall time, context and generated tokens. Nothing is known of what prompts share."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from kvyard.clock import SECOND
from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.formats.table import Fields, integer, read_table
from kvyard.replay.traces.reading import Reading, checked_lengths
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

COLUMNS = ("timestamp", "contexttokens", "generatedtokens")

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s*")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read(reading: Reading) -> Iterator[TraceRequest]:
    """The requests of a pass."""

    def row(number: int, fields: Fields) -> TraceRequest:
        tokens_in, tokens_out = integer(fields, "contexttokens"), integer(fields, "generatedtokens")
        checked_lengths(tokens_in, tokens_out, ("ContextTokens", "GeneratedTokens"))
        arrival = reading.arrive(wall_time(fields["timestamp"]))
        return TraceRequest(reading.name(number), arrival, tokens_in, tokens_out)

    return read_table(reading, COLUMNS, row)


def wall_time(text: str) -> int:
    """Nanoseconds since 1970 of a time as written, to the last digit. Raises ``BadRow`` for what is none."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise BadRow(f"TIMESTAMP is {text!r}: it must look like 2023-11-16 18:15:46.6805900")
    day, clock, fraction, zone = match.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC)
    except ValueError as error:
        raise BadRow(f"TIMESTAMP is {text!r}: {error}") from None
    seconds = (whole - _EPOCH) // timedelta(seconds=1)
    if zone and zone != "Z":
        digits = zone[1:].replace(":", "")
        away = int(digits[:2]) * 3600 + int(digits[2:]) * 60
        seconds -= away if zone[0] == "+" else -away
    return seconds * SECOND + int((fraction or "").ljust(9, "0"))


FORMAT = Format(
    name="azure",
    summary="Azure LLM inference traces, CSV: wall time, context and generated tokens; nothing on shared prefixes.",
    recognise=lambda head: set(COLUMNS) <= set(head.columns),
    read=read,
)
