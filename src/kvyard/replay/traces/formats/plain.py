"""The plainest trace: CSV or JSON lines with ``arrival`` (seconds), ``input`` and ``output`` (tokens), and nothing else."""

from collections.abc import Iterator

import msgspec

from kvyard.clock import SECOND
from kvyard.replay.traces.files import first_record
from kvyard.replay.traces.formats.table import Fields, integer, read_table, real
from kvyard.replay.traces.reading import Reading, checked_lengths, ns
from kvyard.replay.traces.registry import Format, Head, look
from kvyard.replay.traces.request import TraceRequest

COLUMNS = ("arrival", "input", "output")


class _PlainRow(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    arrival: int | float
    input: int
    output: int


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Return the requests of a pass."""
    decode = msgspec.json.Decoder(_PlainRow).decode

    def request(number: int, arrival: float, tokens_in: int, tokens_out: int) -> TraceRequest:
        checked_lengths(tokens_in, tokens_out, ("input", "output"))
        time = reading.arrive(ns(arrival, SECOND, "arrival"))
        return TraceRequest(reading.name(number), time, tokens_in, tokens_out)

    def line(number: int, record: bytes) -> TraceRequest:
        row = decode(record)
        return request(number, row.arrival, row.input, row.output)

    def fields(number: int, row: Fields) -> TraceRequest:
        return request(number, real(row, "arrival"), integer(row, "input"), integer(row, "output"))

    if look(first_record(reading.path)).columns:
        return read_table(reading, COLUMNS, fields)
    return reading.rows(line)


def _recognise(head: Head) -> bool:
    return set(head.value or head.columns) == set(COLUMNS)


FORMAT = Format(
    name="plain",
    summary="CSV or JSON lines with arrival (seconds), input and output (tokens) and nothing else.",
    recognise=_recognise,
    read=read,
)
