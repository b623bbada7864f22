"""Spans of OpenTelemetry as exporters write them, and the session and agent of each span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.formats.wall_time import wall_time
from kvyard.replay.traces.reading import LONGEST_TIME

CONVERSATIONS = ("gen_ai.conversation.id", "session.id")
"""Attributes that name a session, the first that is set."""


class TraceSpan(msgspec.Struct, gc=False):
    """One span; times in nanoseconds since 1970."""

    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool = False


class SpanContext(NamedTuple):
    """The session a span belongs to."""

    session: str
    parent: str | None
    """Session of the agent that called this one."""
    root: str | None
    """Top session. None if ``session`` is it."""


class _Attribute(msgspec.Struct, gc=False):
    key: str
    value: dict[str, Any] = {}


class _Status(msgspec.Struct, gc=False, frozen=True):
    code: str | int = 0
    status_code: str | int = 0


class _OtlpSpan(msgspec.Struct, gc=False, rename="camel"):
    trace_id: str
    span_id: str
    start_time_unix_nano: str | int
    end_time_unix_nano: str | int
    parent_span_id: str = ""
    attributes: list[_Attribute] = []
    status: _Status = _Status()


class _ScopeSpans(msgspec.Struct, gc=False, rename="camel"):
    spans: list[_OtlpSpan] = []


class _ResourceSpans(msgspec.Struct, gc=False, rename="camel"):
    scope_spans: list[_ScopeSpans] = []


class _Ids(msgspec.Struct, gc=False, frozen=True):
    trace_id: str = ""
    span_id: str = ""


class _PlainSpan(msgspec.Struct, gc=False):
    start_time: str
    end_time: str
    attributes: dict[str, Any]
    trace_id: str = ""
    span_id: str = ""
    context: _Ids = _Ids()
    parent_id: str | None = None
    parent_span_id: str | None = None
    session_id: str | None = None
    status: _Status = _Status()


class _Batch(msgspec.Struct, gc=False, rename={"resource_spans": "resourceSpans"}):
    resource_spans: list[_ResourceSpans] | None = None
    spans: list[_PlainSpan] | None = None


_batch = msgspec.json.Decoder(_Batch).decode
_plain = msgspec.json.Decoder(_PlainSpan).decode


def spans(record: bytes) -> Iterator[TraceSpan]:
    """Yield the spans of a record. Raises ``BadRow`` and msgspec's errors."""
    batch = _batch(record)
    if batch.resource_spans is not None:
        for resource in batch.resource_spans:
            for scope in resource.scope_spans:
                yield from map(_from_otlp, scope.spans)
        return
    for span in (_plain(record),) if batch.spans is None else batch.spans:
        yield _from_plain(span)


def _from_otlp(span: _OtlpSpan) -> TraceSpan:
    start, end = _nanoseconds(span.start_time_unix_nano), _nanoseconds(span.end_time_unix_nano)
    attributes = {attribute.key: _value(attribute.value) for attribute in span.attributes}
    return _checked_span(span.trace_id, span.span_id, span.parent_span_id, start, end, attributes, span.status)


def _from_plain(span: _PlainSpan) -> TraceSpan:
    start, end = wall_time(span.start_time, "start_time"), wall_time(span.end_time, "end_time")
    attributes = span.attributes
    if span.session_id:
        attributes.setdefault(CONVERSATIONS[-1], span.session_id)
    parent = span.parent_id or span.parent_span_id or ""
    trace, own = span.trace_id or span.context.trace_id, span.span_id or span.context.span_id
    return _checked_span(trace, own, parent, start, end, attributes, span.status)


def _checked_span(
    trace: str, own: str, parent: str, start: int, end: int, attributes: dict[str, Any], status: _Status
) -> TraceSpan:
    if not own:
        raise BadRow("a span without span_id")
    if end < start:
        raise BadRow(f"span {own[:40]} ends before it starts")
    failed = status.code in (2, "STATUS_CODE_ERROR", "ERROR") or status.status_code in (2, "ERROR")
    return TraceSpan(trace, own, parent, start, end, attributes, failed)


def _nanoseconds(value: str | int) -> int:
    try:
        time_ns = int(value)
    except ValueError:
        raise BadRow(f"a span's time is {value[:40]!r}: it must be nanoseconds since 1970") from None  # type: ignore[index]
    if not 0 <= time_ns < LONGEST_TIME:
        raise BadRow(f"a span's time is {str(value)[:40]}: it must be nanoseconds since 1970")
    return time_ns


def _value(value: Mapping[str, Any]) -> Any:
    """Return an attribute's value; whole numbers may be written as text."""
    for kind, content in value.items():
        if kind == "intValue":
            try:
                return int(content)
            except (TypeError, ValueError):
                raise BadRow(f"intValue is {str(content)[:40]!r}: it must be a whole number") from None
        if kind == "arrayValue":
            listed = content.get("values", ()) if isinstance(content, dict) else ()
            return [next(iter(each.values()), None) for each in listed if isinstance(each, dict)]
        return content
    return None


class _Place(NamedTuple):
    """Attributes that a span's descendants inherit: the conversation, the nearest two agents, and how many there are above."""

    conversation: str | None
    agent: str | None
    caller: str | None
    depth: int


class SpanTree:
    """Spans by their parents. Spans may come in any order, and parents may be missing."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], tuple[str, str | None, bool]] = {}
        """Parent, conversation and whether it invokes an agent."""
        self._places: dict[tuple[str, str], _Place] = {}

    def add(self, span: TraceSpan) -> None:
        """Add a span. All must be added before the first call of ``context``."""
        named = next((str(span.attributes[name]) for name in CONVERSATIONS if span.attributes.get(name)), None)
        invokes = span.attributes.get("gen_ai.operation.name") == "invoke_agent"
        self._spans[span.trace, span.id] = (span.parent, named, invokes)

    def context(self, span: TraceSpan) -> SpanContext:
        """Return the session that a span belongs to."""
        place = self._place((span.trace, span.id))
        top = place.conversation or span.trace or span.id
        if place.depth < 2:
            return SpanContext(top, None, None)
        return SpanContext(f"{top}/{place.agent}", top if place.depth == 2 else f"{top}/{place.caller}", top)

    def _place(self, key: tuple[str, str]) -> _Place:
        climbed: list[tuple[str, str]] = []
        seen: set[tuple[str, str]] = set()
        place = _Place(None, None, None, 0)
        ancestor = key
        while ancestor in self._spans and ancestor not in seen:
            known = self._places.get(ancestor)
            if known is not None:
                place = known
                break
            seen.add(ancestor)
            climbed.append(ancestor)
            ancestor = (ancestor[0], self._spans[ancestor][0])
        for span in reversed(climbed):
            _, named, invokes = self._spans[span]
            conversation = named or place.conversation
            if invokes:
                place = _Place(conversation, span[1], place.agent, place.depth + 1)
            else:
                place = _Place(conversation, place.agent, place.caller, place.depth)
            self._places[span] = place
        return place
