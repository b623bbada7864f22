"""LMCache's agent transcripts: JSON lines with the whole text of prompt and answer, microseconds, and sessions.

What prompts share follows from their texts. No tokenizer is available, so four bytes of text stand for a token: about what
tokenizers make of English and code, and prompts that begin alike share exactly that. Rows aren't in order of their times in
the published files, and a trace is a directory with one file a session: all rows are read, and then put in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from kvyard.clock import US
from kvyard.replay.traces.errors import UNREADABLE
from kvyard.replay.traces.files import records
from kvyard.replay.traces.reading import Reading, ns
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

BYTES_PER_TOKEN = 4


class _Transcript(msgspec.Struct, gc=False):
    timestamp: int | float
    input: str
    output: str
    session_id: str | None = None


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a pass, in order of their times."""
    decode = msgspec.json.Decoder(_Transcript).decode
    rows: list[tuple[int, int, _Transcript]] = []
    for number, record in records(reading.path):
        try:
            row = decode(record)
            if row.input:
                rows.append((ns(row.timestamp, US, "timestamp"), number, row))
            else:
                reading.leave_out("prompts without text")
        except UNREADABLE as bad:
            reading.reject(number, bad)
    rows.sort(key=lambda entry: entry[:2])
    for time, number, row in rows:
        tokens, answer = text_tokens(row.input), text_tokens(row.output)
        yield TraceRequest(
            reading.name(number),
            reading.arrive(time),
            len(tokens),
            len(answer),
            tokens=tokens,
            output_tokens=answer,
            session=row.session_id,
        )


def text_tokens(text: str) -> array[int]:
    """Return a number for every four bytes of ``text``, the last perhaps of fewer."""
    data = text.encode("utf-8", "surrogatepass")
    return array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))


FORMAT = Format(
    name="lmcache",
    summary="LMCache agent transcripts, JSON lines or a directory of them: texts, sessions, 4 bytes taken as a token.",
    recognise=lambda head: head.has("timestamp", "input", "output") and isinstance(head.value["input"], str),
    read=read,
)
