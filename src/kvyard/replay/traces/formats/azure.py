"""Azure's public LLM traces: CSV of wall time, context and generated tokens. Shared prefixes aren't recorded."""

from collections.abc import Iterator

from kvyard.replay.traces.formats.table import Fields, integer, read_table
from kvyard.replay.traces.formats.wall_time import wall_time
from kvyard.replay.traces.reading import Reading, checked_lengths
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

COLUMNS = ("timestamp", "contexttokens", "generatedtokens")


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of the file."""

    def row(number: int, fields: Fields) -> TraceRequest:
        tokens_in, tokens_out = integer(fields, "contexttokens"), integer(fields, "generatedtokens")
        checked_lengths(tokens_in, tokens_out, ("ContextTokens", "GeneratedTokens"))
        arrival = reading.arrive(wall_time(fields["timestamp"]))
        return TraceRequest(reading.name(number), arrival, tokens_in, tokens_out)

    return read_table(reading, COLUMNS, row)


FORMAT = Format(
    name="azure",
    summary="Azure LLM inference traces, CSV: wall time, context and generated tokens; nothing on shared prefixes.",
    recognise=lambda head: set(COLUMNS) <= set(head.columns),
    read=read,
)
