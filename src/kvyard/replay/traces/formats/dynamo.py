"""Dynamo's request trace, version 1: one event a line, of which those that end a request are rows.

Rows come in the order in which requests *ended*, so this format is read as a whole and sorted. Requests of an agent's session
follow one another, and sub-agents fork and join as they did in the recording; others keep their times. The hashes are
cumulative and 64 bits wide.
"""

from collections.abc import Iterator, Mapping

import msgspec

from kvyard.clock import MS
from kvyard.replay.traces.errors import UNREADABLE, BadRow
from kvyard.replay.traces.files import records
from kvyard.replay.traces.formats.agents import RecordedTurn, weave
from kvyard.replay.traces.reading import Reading, check_ids, checked_lengths, ns, span
from kvyard.replay.traces.registry import Format, Head
from kvyard.replay.traces.request import TraceRequest

SCHEMA = "dynamo.request.trace.v1"


class _Replay(msgspec.Struct, gc=False):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]


class _DynamoRequest(msgspec.Struct, gc=False):
    request_id: str
    request_received_ms: int | float
    output_tokens: int
    input_tokens: int | None = None
    total_time_ms: int | float = 0
    model: str | None = None
    replay: _Replay | None = None


class _Agent(msgspec.Struct, gc=False):
    session_id: str
    parent_session_id: str | None = None


class _Event(msgspec.Struct, gc=False):
    schema: str
    event_type: str
    request: _DynamoRequest | None = None
    agent_context: _Agent | None = None


class _DynamoLine(msgspec.Struct, gc=False):
    event: _Event


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a pass, sorted."""
    decode = msgspec.json.Decoder(_DynamoLine).decode
    by_name: dict[str, tuple[_DynamoRequest, int]] = {}
    agents: list[RecordedTurn] = []
    size = 0
    for number, record in records(reading.path):
        try:
            event = decode(record).event
            if event.schema != SCHEMA:
                raise BadRow(f"schema is {event.schema!r}: kvyard reads {SCHEMA}")
            if event.event_type != "request_end":
                reading.leave_out(f"events of type {event.event_type}")
                continue
            request = _checked(event)
            if request.replay is not None:
                size = size or request.replay.trace_block_size
                if request.replay.trace_block_size != size:
                    raise BadRow(f"trace_block_size is {request.replay.trace_block_size}, in earlier rows {size}")
            start = ns(request.request_received_ms, MS, "request_received_ms")
            end = start + span(request.total_time_ms, MS, "total_time_ms")
            name = reading.name(number, request.request_id)
            by_name[name] = (request, start)
            agent = event.agent_context
            # A request without a session is one of its own, and waits for no other.
            agents.append(
                RecordedTurn(name, f"\0{name}", start, end)
                if agent is None
                else RecordedTurn(name, agent.session_id, start, end, agent.parent_session_id)
            )
        except UNREADABLE as bad:
            reading.reject(number, bad)
    parents = {turn.session: turn.parent for turn in agents}
    for turn, waits in weave(agents):
        request, start = by_name.pop(turn.id)
        arrival = reading.arrive(start) if waits.delay is None else reading.offset(start)
        replay = request.replay
        yield TraceRequest(
            turn.id,
            arrival,
            replay.input_length if replay is not None else request.input_tokens or 0,
            request.output_tokens,
            None if replay is None else replay.input_sequence_hashes,
            0 if replay is None else replay.trace_block_size,
            session=None if turn.session.startswith("\0") else turn.session,
            delay=waits.delay,
            after=waits.after,
            model=request.model,
            root=_root(turn.session, parents),
        )


def _root(session: str, parents: Mapping[str, str | None]) -> str | None:
    """Return the session at the top of those that called ``session``, if any did."""
    seen = {session}
    top = session
    while (parent := parents.get(top)) is not None and parent not in seen:
        seen.add(parent)
        top = parent
    return None if top == session else top


def _checked(event: _Event) -> _DynamoRequest:
    """Return the event's request. Raises ``BadRow`` for one that can't be replayed."""
    request = event.request
    if request is None:
        raise BadRow("a request_end without request")
    replay = request.replay
    tokens_in = request.input_tokens if replay is None else replay.input_length
    checked_lengths(tokens_in, request.output_tokens, ("input_length", "output_tokens"))
    if replay is not None:
        if replay.trace_block_size < 1:
            raise BadRow(f"trace_block_size is {replay.trace_block_size}: it must be at least 1")
        check_ids(replay.input_sequence_hashes, replay.trace_block_size, replay.input_length)
        if min(replay.input_sequence_hashes) < 0:
            raise BadRow("input_sequence_hashes holds a negative number")
    return request


def _recognise(head: Head) -> bool:
    event = head.value.get("event")
    return isinstance(event, dict) and str(event.get("schema", "")).startswith("dynamo.request.trace")


FORMAT = Format(
    name="dynamo",
    summary="Dynamo request trace v1: received times, 16-token sequence hashes, agents and sub-agents.",
    recognise=_recognise,
    read=read,
)
