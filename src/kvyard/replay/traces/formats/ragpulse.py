"""RAGPulse: a week of a university's question answering; prompts are made of parts: passages, history, search, question.

The folder holds ``0_trace.jsonl``, whose rows name the parts of a prompt in order, and files that give each part's length. So
what prompts share is known to the token. Templates add a few tokens that no part has; they stand at the prompt's end. Turns
keep their recorded times, but wait for the turn before. Rows are put in order of their times, which one of them isn't in.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kvyard.clock import SECOND
from kvyard.replay.traces.errors import UNREADABLE, BadRow, TraceError
from kvyard.replay.traces.files import records
from kvyard.replay.traces.reading import Reading, checked_lengths, ns
from kvyard.replay.traces.registry import Format, Head
from kvyard.replay.traces.request import TraceRequest

PARTS = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
"""Files with the lengths of parts."""
MOST_TOKENS = 1 << 31
"""Tokens of all parts together: each has a number of its own."""
LONGEST_PROMPT = 10_000_000
MOST_TEMPLATE = 4_096
"""Tokens of a prompt that none of its parts has, at most; 6 to 12 in the published files."""


class _RagRow(msgspec.Struct, gc=False):
    timestamp: str | int | float
    input_length: int
    output_length: int
    hash_ids: dict[str, list[int]]
    session_id: str | int | None = None


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a pass, in order of their times."""
    trace = reading.path / "0_trace.jsonl" if reading.path.is_dir() else reading.path
    parts = _parts(trace)
    decode = msgspec.json.Decoder(_RagRow).decode
    rows: list[tuple[int, int, _RagRow]] = []
    for number, record in records(trace):
        try:
            row = decode(record)
            checked_lengths(row.input_length, row.output_length, ("input_length", "output_length"))
            _check_parts(row, parts)
            rows.append((_time(row.timestamp), number, row))
        except UNREADABLE as bad:
            reading.reject(number, bad)
    rows.sort(key=lambda entry: entry[:2])
    for time, number, row in rows:
        yield TraceRequest(
            reading.name(number),
            reading.arrive(time),
            row.input_length,
            row.output_length,
            tokens=_tokens(row, parts),
            session=None if row.session_id is None else str(row.session_id),
        )


def _parts(trace: Path) -> Mapping[int, range]:
    """Return the tokens of each part, by its id. Raises ``TraceError`` where its file is missing or wrong."""
    tokens_of: dict[int, range] = {}
    next_token = 0
    for name in PARTS:
        path = trace.with_name(f"{name}.jsonl")
        if not path.exists():
            raise TraceError(
                trace, f"{path.name} isn't beside it, which holds lengths of RAGPulse's parts: fetch all of data/"
            )
        for number, record in records(path):
            try:
                row = msgspec.json.decode(record, type=dict[str, int])
            except UNREADABLE as bad:
                raise TraceError(path, f"not a part and its length ({bad})", number) from None
            part = next((value for key, value in row.items() if key.endswith("_id")), None)
            length = row.get("token_length", -1)
            if part is None or not 0 <= length <= LONGEST_PROMPT or length >= MOST_TOKENS - next_token:
                raise TraceError(path, f"a row must have an id and a token_length from 0 to {LONGEST_PROMPT}", number)
            tokens_of[part] = range(next_token, next_token + length)
            next_token += length
    return tokens_of


def _check_parts(row: _RagRow, parts: Mapping[int, range]) -> None:
    """Raises ``BadRow`` unless the parts are known and fit into the prompt."""
    length = 0
    for name, listed in row.hash_ids.items():
        for part in listed:
            if part not in parts:
                raise BadRow(f"{name} holds {part}, of which no file beside it gives the length")
            length += len(parts[part])
    if not length <= row.input_length <= min(length + MOST_TEMPLATE, LONGEST_PROMPT):
        raise BadRow(
            f"input_length is {row.input_length}, and the prompt's parts have {length} tokens: it must be that, and at most "
            f"{MOST_TEMPLATE} for the template"
        )


def _tokens(row: _RagRow, parts: Mapping[int, range]) -> array[int]:
    tokens = array("I")
    for listed in row.hash_ids.values():
        for part in listed:
            tokens.extend(parts[part])
    tokens.extend(range(MOST_TOKENS, MOST_TOKENS + row.input_length - len(tokens)))
    return tokens


def _time(stamp: str | int | float) -> int:
    if isinstance(stamp, str):
        try:
            stamp = float(stamp)
        except ValueError:
            raise BadRow(f"timestamp is {stamp!r}: it must be a number of seconds") from None
    return ns(stamp, SECOND, "timestamp")


def _recognise(head: Head) -> bool:
    return head.has("timestamp", "input_length") and isinstance(head.value.get("hash_ids"), dict)


FORMAT = Format(
    name="ragpulse",
    summary="RAGPulse, a folder of JSON lines: seconds, prompts as parts with lengths (passages, history), sessions.",
    recognise=_recognise,
    read=read,
)
