"""One pass over a trace file: numbers rows, rebases times, checks lengths, and refuses or skips bad rows."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvyard.clock import SECOND
from kvyard.integers import ceil_div
from kvyard.replay.traces.errors import UNREADABLE, BadRow, TraceError
from kvyard.replay.traces.files import is_cut_off, records
from kvyard.replay.traces.request import TraceRequest

COMMON_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Tokens an id usually stands for, for hints."""

LONGEST_TIME = 1 << 62
"""Nanoseconds, from 1970 too: sums of two of these times still fit into 64 bits."""
MOST_TOKENS = (1 << 31) - 1
"""Most tokens of a prompt or an answer."""

KEPT = 5
"""Number of skipped rows that are kept in words."""


class ReadingTally(msgspec.Struct):
    """Rows that a pass left out."""

    skipped: int = 0
    """Bad rows, with ``skip_bad``."""
    examples: list[str] = []
    """The first few of them in words."""
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    """Rows that aren't bad and aren't requests to replay either, by reason."""

    def notes(self) -> list[str]:
        """Return the counts in words."""
        skipped = [f"{self.skipped:,} bad rows skipped, the first: {self.examples[0]}"] if self.skipped else []
        return skipped + [f"{count:,} rows left out: {reason}" for reason, count in self.left_out.items()]


class Reading:
    """Helper for a reader of a format. A new one is made for each pass."""

    __slots__ = ("_names", "_numbered", "_start", "_time", "block_size", "path", "skip_bad", "tally", "unordered")

    def __init__(
        self, path: Path, *, block_size: int = 0, skip_bad: bool = False, unordered: bool = False, tally: ReadingTally
    ) -> None:
        self.path = path
        self.block_size = block_size
        """Tokens an id stands for; 0 where the format or its rows say it."""
        self.skip_bad = skip_bad
        self.unordered = unordered
        """True if times may go back, because rows are sorted afterwards."""
        self.tally = tally
        self._start: int | None = None
        self._time = 0
        self._names: set[str] | None = None
        """Names taken; ``None`` while all rows are called by their numbers."""
        self._numbered = 0
        """The latest of those."""

    def rows(self, row: Callable[[int, bytes], TraceRequest | None]) -> Iterator[TraceRequest]:
        """Yield the requests that ``row`` makes of each record, and nothing for those it raises ``BadRow`` for or
        returns None.
        """
        for number, record in records(self.path):
            try:
                request = row(number, record)
            except UNREADABLE as bad:
                whole = isinstance(bad, BadRow | msgspec.ValidationError)  # it could be read, and is wrong
                if number > 1 and not whole and is_cut_off(self.path, record):
                    self.leave_out("the last line was cut off, as where its writer is killed")
                else:
                    self.reject(number, bad)
                continue
            if request is not None:
                yield request

    def reject(self, number: int, bad: Exception) -> None:
        """Count a bad row, or raise ``TraceError`` for it."""
        error = TraceError(self.path, _sentence(bad), number)
        if not self.skip_bad:
            raise error
        self.tally.skipped += 1
        if len(self.tally.examples) < KEPT:
            self.tally.examples.append(str(error))

    def leave_out(self, reason: str) -> None:
        """Count a row that is no request to replay."""
        self.tally.left_out[reason] += 1

    def arrive(self, time: int) -> int:
        """Return a time in nanoseconds as one since the first. Raises ``BadRow`` where it goes back."""
        if self._start is None:
            self._start = self._time = time
        if time < self._time and not self.unordered:
            behind = (self._time - time) / SECOND
            raise BadRow(
                f"its time is {behind:g} s before that of an earlier row: sort the file by time, or pass --sort"
            )
        self._time = time
        return time - self._start

    def offset(self, time: int) -> int:
        """Return the offset of a request that waits for others: it needs no order."""
        passed = time - (self._start or 0)
        return passed if self.unordered else max(0, passed)

    def name(self, number: int, given: str | int | None = None) -> str:
        """Return the row's id: its own if it has one, else its number. Raises ``BadRow`` where another row has it already."""
        own = str(number)
        name = own if given is None else str(given)
        if self._names is None:
            if name == own:
                self._numbered = number
                return name  # as with all rows so far, so there is nothing to remember
            self._names = {str(before) for before in range(1, self._numbered + 1)}
        if name in self._names:
            raise BadRow(f"the request id {name!r} is taken by an earlier row: ids must be unique")
        self._names.add(name)
        return name

    def has_name(self, name: str) -> bool:
        """Return true if an earlier row has this name."""
        if self._names is None:
            return name.isdecimal() and name == str(int(name)) and 0 < int(name) <= self._numbered
        return name in self._names


def ns(value: float, unit: int, field: str) -> int:
    """Return a time as written, in nanoseconds. Raises ``BadRow`` for what is no time."""
    try:
        time = value * unit if isinstance(value, int) else round(value * unit)
    except (ValueError, OverflowError):
        raise BadRow(f"{field} is {value}: a time must be a finite number") from None
    if not -LONGEST_TIME < time < LONGEST_TIME:
        raise BadRow(f"{field} is {value:g}: that is more than 146 years; is it in another unit?")
    return time


def span(value: float, unit: int, field: str) -> int:
    """Return a length of time, in nanoseconds. Raises ``BadRow`` for one that is none or negative."""
    time = ns(value, unit, field)
    if time < 0:
        raise BadRow(f"{field} is {value}: a time to wait can't be negative")
    return time


def checked_lengths(input_length: int | None, output_length: int | None, names: tuple[str, str]) -> tuple[int, int]:
    """Return the lengths of prompt and answer. Raises ``BadRow`` where a request could not have run."""
    if input_length is None:
        raise BadRow(f"{names[0]} is missing")
    if input_length < 1:
        raise BadRow(f"{names[0]} is {input_length}: a prompt has at least one token")
    if output_length is None:
        raise BadRow(f"{names[1]} is missing")
    if output_length < 0:
        raise BadRow(f"{names[1]} is {output_length}: a length can't be negative")
    if input_length > MOST_TOKENS or output_length > MOST_TOKENS:
        name, length = (names[0], input_length) if input_length > MOST_TOKENS else (names[1], output_length)
        raise BadRow(f"{name} is {length}: no request has more than {MOST_TOKENS} tokens")
    return input_length, output_length


def check_ids(ids: Sequence[int], size: int, input_length: int) -> None:
    """Raises ``BadRow`` unless there is one id for each started block of ``size`` tokens."""
    want = ceil_div(input_length, size)
    if len(ids) != want:
        verdict = "don't cover" if len(ids) < want else "are too many for"
        fitting = [other for other in COMMON_SIZES if ids and len(ids) == ceil_div(input_length, other)]
        if fitting:
            hint = f"there must be {want}, or an id stands for {fitting[0]} tokens; then pass --trace-block-size {fitting[0]}"
        else:
            hint = f"there must be {want}; pass --trace-block-size if an id stands for another number of tokens"
        raise BadRow(f"{len(ids)} ids of {size} tokens {verdict} {input_length} tokens: {hint}")


def _sentence(bad: Exception) -> str:
    if isinstance(bad, BadRow):
        return str(bad)
    if isinstance(bad, msgspec.ValidationError):
        text = str(bad)
        return text[0].lower() + text[1:]
    return f"not a record of JSON ({bad})"
