"""Mooncake's JSON lines, with the fields that Dynamo and AIPerf added: sessions, delays, request ids.

``timestamp`` and ``delay`` are milliseconds, ``hash_ids`` cumulative and for 512 tokens each. Rows that share a ``session_id``
are turns of a closed loop: one starts when the one before it ended, plus its ``delay``, or plus the difference of their
timestamps if it has none, which is how Dynamo takes them. ``wait_for`` names further requests to wait for. ``block_size``,
which ``kvyard gateway --record`` writes, says how many tokens an id stands for where that isn't 512. ``retention`` is a
priority from 0 to 100 for the whole request, or a list of ``{"start", "stop", "priority", "duration"}`` in tokens and ms. Other
hints are ``session_end``, ``ttl`` (ms) with ``ttl_then``, and ``conversation``, a session's name for which no row waits.
``tool_call`` says that an answer called a tool, ``tenant`` who the request belongs to.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from kvyard.blocks import NO_HINTS, Hints, Retention
from kvyard.blocks.spec import ConfigError
from kvyard.clock import MS
from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.reading import Reading, check_ids, checked_lengths, ns, span
from kvyard.replay.traces.registry import Format, Head
from kvyard.replay.traces.request import TraceRequest

BLOCK_SIZE = 512


class _MooncakeRow(msgspec.Struct, gc=False):
    timestamp: int | float | None = None
    created_time: int | float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    hash_ids: list[int] | None = None
    request_id: str | int | None = None
    session_id: str | int | None = None
    delay: int | float | None = None
    delay_ms: int | float | None = None
    wait_for: tuple[str, ...] = ()
    priority: int = 0
    lora: str | None = None
    salt: str | None = None
    tenant: str | None = None
    model: str | None = None
    root_session_id: str | None = None
    block_size: int | None = None
    retention: "int | tuple[_Kept, ...]" = ()
    tool_call: bool = False
    conversation: str | int | None = None
    session_end: bool = False
    ttl: int | float | None = None
    ttl_then: Literal["ordinary", "first"] = "ordinary"


class _Kept(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Tokens ``start`` to ``stop`` (the end without one) are worth ``priority``, for ``duration`` milliseconds after use."""

    priority: int
    start: int = 0
    stop: int | None = None
    duration: int | float | None = None


class _MooncakeSessions(msgspec.Struct):
    """State of earlier rows that later ones can refer to."""

    last: dict[str, int | None] = {}
    """The time of each session's latest turn."""
    timed: bool | None = None
    """True if rows that wait for no other have times: all of them, or none."""


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Return the requests of a pass."""
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    given = reading.block_size
    sessions = _MooncakeSessions()

    def row(number: int, record: bytes) -> TraceRequest:
        fields = decode(record)
        ids = fields.hash_ids
        size = given or fields.block_size or BLOCK_SIZE
        if size < 1:
            raise BadRow(f"block_size is {size}: an id stands for at least one token")
        tokens_in, tokens_out = checked_lengths(
            fields.input_length if fields.input_tokens is None else fields.input_tokens,
            fields.output_length if fields.output_tokens is None else fields.output_tokens,
            ("input_length", "output_length"),
        )
        if ids is not None:
            _check_ids(ids, size, tokens_in)
        stamp = fields.timestamp if fields.created_time is None else fields.created_time
        time = None if stamp is None else ns(stamp, MS, "timestamp")
        session, wait_for = fields.session_id, fields.wait_for
        if session is None and not wait_for:
            delay = None
        else:
            session = None if session is None else str(session)
            delay = _delay(reading, fields, time, session, sessions)
        arrival = _arrival(reading, time, delay, sessions)
        name = reading.name(number, fields.request_id)
        if session is not None:
            sessions.last[session] = time
        return TraceRequest(
            name,
            arrival,
            tokens_in,
            tokens_out,
            ids=ids,
            id_block_size=size if ids is not None else 0,
            session=session,
            delay=delay,
            after=wait_for,
            priority=fields.priority,
            lora=fields.lora,
            salt=fields.salt,
            tenant=fields.tenant,
            model=fields.model,
            root=fields.root_session_id,
            tool_call=fields.tool_call,
            hints=_hints(fields),
        )

    return reading.rows(row)


def _check_ids(ids: Sequence[int], size: int, tokens: int) -> None:
    check_ids(ids, size, tokens)
    if min(ids) < 0:
        raise BadRow(f"hash_ids holds {min(ids)}: ids can't be negative")
    if max(ids) >> 64:
        raise BadRow(f"hash_ids holds {max(ids)}: ids have at most 64 bits; shorten those that are longer hashes")


def _arrival(reading: Reading, time: int | None, delay: int | None, sessions: _MooncakeSessions) -> int:
    """Return the arrival of a row with this time, which waits for others if it has a ``delay``."""
    if delay is not None:
        return 0 if time is None else reading.offset(time)
    if sessions.timed is None:
        sessions.timed = time is not None
    if time is None and sessions.timed:
        raise BadRow("timestamp is missing, and it waits for no other row")
    return 0 if time is None else reading.arrive(time)


def _hints(row: _MooncakeRow) -> Hints:
    if (
        row.conversation is None
        and row.ttl is None
        and row.retention == ()
        and not row.session_end
        and row.ttl_then == "ordinary"
    ):
        return NO_HINTS
    ttl = None if row.ttl is None else span(row.ttl, MS, "ttl")
    name = "" if row.conversation is None else str(row.conversation)
    try:
        return Hints(name, row.session_end, ttl, row.ttl_then, _retention(row.retention))
    except ConfigError as wrong:
        raise BadRow(f"hints: {wrong}") from None


def _retention(given: int | tuple[_Kept, ...]) -> tuple[Retention, ...]:
    if isinstance(given, int):
        given = (_Kept(priority=given),)
    try:
        return tuple(
            Retention(
                directive.start,
                directive.stop,
                directive.priority,
                None if directive.duration is None else span(directive.duration, MS, "duration"),
            )
            for directive in given
        )
    except ConfigError as wrong:
        raise BadRow(f"retention: {wrong}") from None


def _delay(
    reading: Reading, row: _MooncakeRow, time: int | None, session: str | None, sessions: _MooncakeSessions
) -> int | None:
    """Return the row's delay after those before it. None if it waits for no other."""
    for name in row.wait_for:
        if not reading.has_name(name):
            raise BadRow(f"it waits for {name!r}, which is no request_id of an earlier row")
    given = row.delay if row.delay_ms is None else row.delay_ms
    first = session not in sessions.last
    if first and not row.wait_for:
        if given:
            raise BadRow(
                f"delay is {given}, but it is the first turn of session {session!r}: give it a timestamp instead"
            )
        return None
    if given is not None:
        return span(given, MS, "delay")
    before = None if session is None else sessions.last.get(session)
    if time is None or before is None:
        return 0
    if time < before:
        raise BadRow(f"its time is before that of the previous turn of session {session!r}: put turns in order")
    return time - before


def _recognise(head: Head) -> bool:
    value = head.value
    lengths = ("input_length" in value or "input_tokens" in value) and (
        "output_length" in value or "output_tokens" in value
    )
    return lengths and any(field in value for field in ("timestamp", "created_time", "hash_ids", "session_id"))


FORMAT = Format(
    name="mooncake",
    summary="Mooncake JSON lines: ms, lengths, 512-token ids; session_id, delay and wait_for as in Dynamo.",
    recognise=_recognise,
    read=read,
)
