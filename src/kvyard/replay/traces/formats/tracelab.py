"""TraceLab's rounds of coding agents: JSON lines with one call of a model each, or its CSV of sessions for replays.

The JSON lines carry token counts, times of events and tool calls, but no texts. A prompt goes on from the one before it in its
session, unless it is shorter: then the agent has compacted its context, and shares what the provider found cached. What the
provider found cached for a session's first prompt is shared by the sessions of one project and model. The next round starts
when the answer before it ended, plus the time of tools and people. Rows aren't in order of time: all are read first.

The CSV has rounds of sessions without times; each begins at 0, and a round follows the one before after its tool's time.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvyard.clock import MS
from kvyard.replay.traces.errors import UNREADABLE, BadRow
from kvyard.replay.traces.files import first_record, records
from kvyard.replay.traces.formats.agents import RecordedTurn, weave
from kvyard.replay.traces.formats.growing import GrowingPrompts, check_prompt
from kvyard.replay.traces.formats.table import Fields, integer, read_table, real
from kvyard.replay.traces.formats.wall_time import wall_time
from kvyard.replay.traces.reading import Reading, checked_lengths, span
from kvyard.replay.traces.registry import Format, Head, look
from kvyard.replay.traces.request import TraceRequest

INPUTS = ("user_message", "tool_result")
"""Events of what a round answers."""
COLUMNS = ("session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")


class _TimingEvent(msgspec.Struct, gc=False):
    event_type: str
    timestamp: str | None = None


class _RoundRow(msgspec.Struct, gc=False):
    session_id: str
    input_tokens_total: int
    prefix_tokens: int
    output_tokens: int
    timing_events: list[_TimingEvent]
    provider: str = ""
    project: str | None = None
    model: str | None = None
    trace_key: str | None = None


class _AgentRound(msgspec.Struct, gc=False):
    turn: RecordedTurn
    input: int
    cached: int
    output: int
    calls: bool
    model: str | None
    common: tuple[str, str | None, str | None]


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Return the requests of a pass: rounds in order of their start, or the CSV's in its own."""
    if look(first_record(reading.path)).columns:
        return _read_csv(reading)
    return _read_rounds(reading)


def _read_rounds(reading: Reading) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(_RoundRow).decode
    rounds: dict[str, _AgentRound] = {}
    for number, record in records(reading.path):
        try:
            row = decode(record)
            checked_lengths(row.input_tokens_total, row.output_tokens, ("input_tokens_total", "output_tokens"))
            check_prompt(row.input_tokens_total)
            start, end = _times(row.timing_events)
            name = reading.name(number, row.trace_key)
            rounds[name] = _AgentRound(
                RecordedTurn(name, row.session_id, start, end),
                row.input_tokens_total,
                row.prefix_tokens,
                row.output_tokens,
                any(event.event_type == "tool_call" for event in row.timing_events),
                row.model,
                (row.provider, row.project, row.model),
            )
        except UNREADABLE as bad:
            reading.reject(number, bad)
    prompts = GrowingPrompts(reading.block_size)
    before: dict[str, int] = {}
    for turn, waits in weave(round_.turn for round_ in rounds.values()):
        round_ = rounds.pop(turn.id)
        latest = before.get(turn.session)
        kept = round_.cached if latest is None or round_.input < latest else latest
        before[turn.session] = round_.input
        yield TraceRequest(
            turn.id,
            reading.arrive(turn.start) if waits.delay is None else reading.offset(turn.start),
            round_.input,
            round_.output,
            prompts.ids(turn.session, round_.input, kept, common=round_.common),
            prompts.block_size,
            session=turn.session,
            delay=waits.delay,
            model=round_.model,
            tool_call=round_.calls,
        )


def _times(events: list[_TimingEvent]) -> tuple[int, int]:
    """Return when a round's input was complete, and when its answer was. Raises ``BadRow`` for one without times."""
    ready: int | None = None
    end: int | None = None
    for event in events:
        if event.timestamp is None:
            continue
        time = wall_time(event.timestamp, "timing_events.timestamp")
        if event.event_type not in INPUTS:
            end = time if end is None else max(end, time)
        elif end is None:
            ready = time if ready is None else max(ready, time)
    if ready is None and end is None:
        raise BadRow("timing_events has no times: a round needs at least one")
    start = ready if ready is not None else end
    assert start is not None
    return start, max(start, end or start)


def _read_csv(reading: Reading) -> Iterator[TraceRequest]:
    prompts = GrowingPrompts(reading.block_size)
    waits: dict[str, int] = {}

    def row(number: int, fields: Fields) -> TraceRequest:
        session = fields["session_id"].strip()
        cached = integer(fields, "prefix_len")
        if cached < 0:
            raise BadRow(f"prefix_len is {cached}: a length can't be negative")
        length, output = checked_lengths(
            cached + integer(fields, "input_len"),
            integer(fields, "output_len"),
            ("prefix_len + input_len", "output_len"),
        )
        wait = span(real(fields, "tool_wait_after_ms"), MS, "tool_wait_after_ms") if fields["tool_wait_after_ms"] else 0
        ids = prompts.ids(session, length, cached)
        delay, waits[session] = waits.get(session), wait
        return TraceRequest(
            reading.name(number),
            0,
            length,
            output,
            ids,
            prompts.block_size,
            session=session,
            delay=delay,
            tool_call=wait > 0,
        )

    return read_table(reading, COLUMNS, row)


def _recognise(head: Head) -> bool:
    return set(COLUMNS) <= set(head.columns) or head.has("session_id", "input_tokens_total", "timing_events")


FORMAT = Format(
    name="tracelab",
    summary="TraceLab rounds of coding agents, JSON lines or its CSV: sessions, tools, tokens a provider found cached.",
    recognise=_recognise,
    read=read,
)
