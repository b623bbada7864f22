"""BurstGPT: CSV of seconds and token counts, in later files with sessions and elapsed times too.

Rows without response tokens are requests that failed; they are left out and counted, as vLLM's own reader of these files
does. Turns of a session keep their recorded times, but wait for the previous turn. Shared prefixes aren't recorded.
"""

from collections.abc import Iterator

from kvyard.clock import SECOND
from kvyard.replay.traces.formats.table import Fields, integer, read_table, real
from kvyard.replay.traces.reading import Reading, checked_lengths, ns
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

COLUMNS = ("timestamp", "request tokens", "response tokens")


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of the file."""

    def row(number: int, fields: Fields) -> TraceRequest | None:
        tokens_in, tokens_out = integer(fields, "request tokens"), integer(fields, "response tokens")
        if tokens_out == 0 or tokens_in == 0:
            reading.leave_out("failed: no response tokens" if tokens_out == 0 else "no request tokens")
            return None
        checked_lengths(tokens_in, tokens_out, ("'Request tokens'", "'Response tokens'"))
        session = fields.get("session id", "").strip()
        return TraceRequest(
            reading.name(number),
            reading.arrive(ns(real(fields, "timestamp"), SECOND, "Timestamp")),
            tokens_in,
            tokens_out,
            session=session if session not in ("", "-", "-1") else None,
            model=fields.get("model") or None,
        )

    return read_table(reading, COLUMNS, row)


FORMAT = Format(
    name="burstgpt",
    summary="BurstGPT, CSV: seconds, request and response tokens, perhaps sessions; nothing on shared prefixes.",
    recognise=lambda head: set(COLUMNS) <= set(head.columns),
    read=read,
)
