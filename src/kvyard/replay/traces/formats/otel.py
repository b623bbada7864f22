"""Model calls of OpenTelemetry traces, by the GenAI semantic conventions: sessions, agents, sub-agents, tools.

Read are OTLP's JSON (lines of ``resourceSpans``, as the collector's file exporter writes them, or a document) and spans with
plain attributes (``spans``, or one a line). A call's session is its ``gen_ai.conversation.id``, its own or that of the spans
around it, else its trace. An ``invoke_agent`` inside another one is a sub-agent. Tokens come from ``gen_ai.usage.*``. Contents
of prompts aren't read: a prompt goes on from the one before it in its session, unless it is shorter; then it shares the tokens
that the provider found cached. First prompts with equal system instructions share those. All spans are read first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvyard.replay.traces.errors import UNREADABLE, BadRow
from kvyard.replay.traces.files import records
from kvyard.replay.traces.formats.agents import RecordedTurn, weave
from kvyard.replay.traces.formats.growing import GrowingPrompts, check_prompt
from kvyard.replay.traces.formats.otel_spans import SpanContext, SpanTree, TraceSpan, spans
from kvyard.replay.traces.reading import Reading, checked_lengths
from kvyard.replay.traces.registry import Format, Head
from kvyard.replay.traces.request import TraceRequest

CALLS = ("chat", "text_completion", "generate_content")
"""Operations that are requests to a model."""
CALLED_TOOL = ("tool_call", "tool_calls", "tool_use", "function_call")
"""Finish reasons of answers that call a tool."""
BYTES_PER_TOKEN = 4
"""Bytes of system instructions that are taken as a token."""


class _ModelCall(msgspec.Struct, gc=False):
    input: int
    output: int
    cached: int
    """Tokens that the provider found cached."""
    model: str | None
    system: str
    root: str | None
    calls_tool: bool


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a pass, in order of their start."""
    tree = SpanTree()
    kept: list[tuple[int, TraceSpan]] = []
    for number, record in records(reading.path):
        try:
            for span in spans(record):
                tree.add(span)
                operation = span.attributes.get("gen_ai.operation.name")
                if operation in CALLS or operation == "execute_tool":
                    kept.append((number, span))
                elif operation != "invoke_agent":
                    reading.leave_out("spans that call no model")
        except UNREADABLE as bad:
            reading.reject(number, bad)
    calls: dict[str, _ModelCall] = {}
    turns: list[RecordedTurn] = []
    tools: dict[str, list[int]] = defaultdict(list)
    for number, span in kept:
        context = tree.context(span)
        if span.attributes["gen_ai.operation.name"] == "execute_tool":
            tools[context.session].append(span.start)
            continue
        try:
            call = _call(span, context, reading)
            if call is None:
                continue
            name = reading.name(number, span.id)
        except BadRow as bad:
            reading.reject(number, bad)
            continue
        calls[name] = call
        turns.append(RecordedTurn(name, context.session, span.start, span.end, context.parent))
    yield from _requests(reading, turns, calls, _tool_times(turns, tools))


def _requests(
    reading: Reading, turns: list[RecordedTurn], calls: dict[str, _ModelCall], called: set[str]
) -> Iterator[TraceRequest]:
    prompts = GrowingPrompts(reading.block_size)
    before: dict[str, int] = {}
    for turn, waits in weave(turns):
        call = calls.pop(turn.id)
        latest = before.get(turn.session)
        if latest is None:
            kept = call.cached or len(call.system.encode()) // BYTES_PER_TOKEN
        else:
            kept = latest if call.input >= latest else call.cached
        before[turn.session] = call.input
        yield TraceRequest(
            turn.id,
            reading.arrive(turn.start) if waits.delay is None else reading.offset(turn.start),
            call.input,
            call.output,
            prompts.ids(turn.session, call.input, kept, common=(call.model, call.system)),
            prompts.block_size,
            session=turn.session,
            delay=waits.delay,
            after=waits.after,
            model=call.model,
            root=call.root,
            tool_call=call.calls_tool or turn.id in called,
        )


def _call(span: TraceSpan, context: SpanContext, reading: Reading) -> _ModelCall | None:
    """Return the call of a span, or nothing for one that is counted and left out. Raises ``BadRow``."""
    attributes = span.attributes
    if span.failed:
        reading.leave_out("calls that ended in an error")
        return None
    tokens_in = _tokens(attributes, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
    tokens_out = _tokens(attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
    if tokens_in is None or tokens_out is None:
        reading.leave_out("calls without token counts")
        return None
    checked_lengths(tokens_in, tokens_out, ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"))
    check_prompt(tokens_in)
    reasons = attributes.get("gen_ai.response.finish_reasons", ())
    return _ModelCall(
        tokens_in,
        tokens_out,
        _tokens(attributes, "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens") or 0,
        _text(attributes, "gen_ai.response.model", "gen_ai.request.model"),
        _text(attributes, "gen_ai.system_instructions") or "",
        context.root,
        any(reason in CALLED_TOOL for reason in (reasons if isinstance(reasons, list | tuple) else (reasons,))),
    )


def _tokens(attributes: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = attributes.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRow(f"{name} is {str(value)[:40]!r}: it must be a whole number")
        return value
    return None


def _text(attributes: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of these attributes that is set, as text."""
    for name in names:
        value = attributes.get(name)
        if value:
            return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return None


def _tool_times(turns: list[RecordedTurn], tools: Mapping[str, list[int]]) -> set[str]:
    """Return the calls of a session after which, and before the next, a tool was executed."""
    starts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for turn in turns:
        starts[turn.session].append((turn.start, turn.id))
    ids: set[str] = set()
    for session, times in tools.items():
        ordered = sorted(starts.get(session, ()))
        times.sort()
        for index, (start, name) in enumerate(ordered):
            stop = ordered[index + 1][0] if index + 1 < len(ordered) else None
            last = len(times) if stop is None else bisect_left(times, stop)
            if bisect_right(times, start) < last:
                ids.add(name)
    return ids


def _recognise(head: Head) -> bool:
    value = head.value
    if isinstance(value.get("resourceSpans"), list) or isinstance(value.get("spans"), list):
        return True
    return head.has("attributes", "start_time") and ("span_id" in value or "context" in value)


FORMAT = Format(
    name="otel",
    summary="OpenTelemetry traces by the GenAI conventions, OTLP JSON or plain spans: conversations, sub-agents, tools.",
    recognise=_recognise,
    read=read,
)
