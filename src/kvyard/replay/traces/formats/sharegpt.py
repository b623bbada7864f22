"""ShareGPT as LLMServingSim tokenised it: JSON lines with the real tokens of prompt and answer, and nanoseconds."""

from collections.abc import Iterator

import msgspec

from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.reading import Reading, checked_lengths
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest


class _ShareGptRow(msgspec.Struct, gc=False):
    input_toks: int
    output_toks: int
    arrival_time_ns: int
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Return the requests of a pass."""
    decode = msgspec.json.Decoder(_ShareGptRow).decode

    def row(number: int, record: bytes) -> TraceRequest:
        fields = decode(record)
        checked_lengths(fields.input_toks, fields.output_toks, ("input_toks", "output_toks"))
        for tokens, count, field in (
            (fields.input_tok_ids, fields.input_toks, "input_tok_ids"),
            (fields.output_tok_ids, fields.output_toks, "output_tok_ids"),
        ):
            if tokens is not None and len(tokens) != count:
                raise BadRow(f"{field} has {len(tokens)} tokens where {count} are announced")
        return TraceRequest(
            reading.name(number),
            reading.arrive(fields.arrival_time_ns),
            fields.input_toks,
            fields.output_toks,
            tokens=fields.input_tok_ids,
            output_tokens=fields.output_tok_ids,
        )

    return reading.rows(row)


FORMAT = Format(
    name="sharegpt",
    summary="ShareGPT tokens of LLMServingSim, JSON lines: nanoseconds and real token ids in and out.",
    recognise=lambda head: head.has("input_toks", "output_toks", "arrival_time_ns"),
    read=read,
)
