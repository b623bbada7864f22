"""Times of day as text, ISO 8601 or nearly, in nanoseconds since 1970."""

import re
from datetime import UTC, datetime, timedelta

from kvyard.clock import SECOND
from kvyard.replay.traces.errors import BadRow

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s*")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def wall_time(text: str, field: str = "TIMESTAMP") -> int:
    """Return nanoseconds since 1970 of a time as written, to the last digit. Raises ``BadRow`` for what is none."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise BadRow(f"{field} is {text!r}: it must look like 2023-11-16 18:15:46.6805900")
    day, clock, fraction, zone = match.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC)
    except ValueError as error:
        raise BadRow(f"{field} is {text!r}: {error}") from None
    seconds = (whole - _EPOCH) // timedelta(seconds=1)
    if zone and zone != "Z":
        digits = zone[1:].replace(":", "")
        away = int(digits[:2]) * 3600 + int(digits[2:]) * 60
        seconds -= away if zone[0] == "+" else -away
    return seconds * SECOND + int((fraction or "").ljust(9, "0"))
