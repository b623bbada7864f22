"""Weka's agent sessions (kv-cache-tester, AgentX): one JSON object a session, as lines, as a file, or a directory of files.

Ids stand for whole blocks of 64 tokens and are comparable within a session, so each session gets a range of its own, and the
tokens behind its last whole block an id that no other has. Sessions have no place on a common clock: each starts at 0, and its
turns follow one another, after the think time that was recorded. Sub-agents are sessions that fork and join.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from kvyard.clock import SECOND
from kvyard.hashing.prefix_tree import common_length
from kvyard.replay.traces.errors import UNREADABLE, BadRow
from kvyard.replay.traces.files import records
from kvyard.replay.traces.formats.agents import RecordedTurn, weave
from kvyard.replay.traces.reading import Reading, checked_lengths, ns, span
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

BLOCK_SIZE = 64
SLACK = 1 * SECOND
"""Times inside a sub-agent are whole seconds."""
SHARE = 1 << 32
"""Number of ids of a session: those of its file below the middle, those of unshared ends above."""


class _WekaRequest(msgspec.Struct, gc=False):
    t: int | float
    type: str
    input: int = msgspec.field(default=0, name="in")
    output: int = msgspec.field(default=0, name="out")
    hash_ids: msgspec.Raw = msgspec.Raw(b"[]")
    """Raw text: most of it repeats the request before, see ``_IdTexts``."""
    model: str | None = None
    api_time: int | float | None = None
    think_time: int | float | None = None
    stop: str | None = None
    agent_id: str | None = None
    requests: list[_WekaRequest] = []


class _WekaSession(msgspec.Struct):
    id: str
    requests: list[_WekaRequest]
    block_size: int = BLOCK_SIZE
    hash_id_scope: str = "local"


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a pass, a session at a time."""
    decode = msgspec.json.Decoder(_WekaSession).decode
    for number, record in records(reading.path):
        try:
            requests = _SessionReader(reading, number, decode(record)).requests()
        except UNREADABLE as bad:
            reading.reject(number, bad)
            continue
        yield from requests


class _SessionReader:
    """One session."""

    def __init__(self, reading: Reading, number: int, session: _WekaSession) -> None:
        if session.hash_id_scope not in ("local", "global"):
            raise BadRow(f"hash_id_scope is {session.hash_id_scope!r}: it must be local or global")
        self.session = session
        self.name = reading.name(number, session.id)
        self.block_size = reading.block_size or session.block_size
        if self.block_size < 1:
            raise BadRow(f"block_size is {session.block_size}: it must be at least 1")
        # Sessions with ids in common take theirs from range 0; every session's unshared ends lie in its own.
        self.base = 0 if session.hash_id_scope == "global" else number * SHARE
        self.ends = number * SHARE + SHARE // 2
        self.texts = _IdTexts()
        self.recorded: list[RecordedTurn] = []
        self.found: dict[str, _WekaRequest] = {}

    def requests(self) -> list[TraceRequest]:
        """Return all of them, in the order of their start."""
        self._collect(self.session.requests, self.name, None, 0)
        return [self._request(turn, waits.after, waits.delay) for turn, waits in weave(self.recorded, SLACK)]

    def _collect(self, requests: list[_WekaRequest], session: str, parent: str | None, base: int) -> None:
        agents = 0
        for request in requests:
            start = base + ns(request.t, SECOND, "t")
            if request.type == "subagent":
                agents += 1
                # Times inside are counted from the marker in kv-cache-tester's files, from the session's start in AgentX's.
                absolute = bool(request.requests) and request.requests[0].t >= request.t
                name = f"{session}/{request.agent_id or agents}"
                self._collect(request.requests, name, session, base if absolute else start)
                continue
            name = f"{self.name}:{len(self.found)}"
            self.found[name] = request
            api = 0 if request.api_time is None else span(request.api_time, SECOND, "api_time")
            think = None if request.think_time is None else span(request.think_time, SECOND, "think_time")
            self.recorded.append(RecordedTurn(name, session, start, start + api, parent, think))

    def _request(self, turn: RecordedTurn, after: tuple[str, ...], delay: int | None) -> TraceRequest:
        recorded = self.found[turn.id]
        try:
            checked_lengths(recorded.input, recorded.output, ("in", "out"))
            ids = self._ids(recorded)
        except BadRow as bad:
            raise BadRow(f"request {turn.id}: {bad}") from None
        return TraceRequest(
            turn.id,
            max(0, turn.start) if delay is not None else 0,
            recorded.input,
            recorded.output,
            ids,
            self.block_size,
            session=turn.session,
            delay=delay,
            after=after,
            model=recorded.model,
            root=None if turn.session == self.name else self.name,
            tool_call=recorded.stop == "tool_use",
        )

    def _ids(self, request: _WekaRequest) -> array[int]:
        """Packed, because a session has a hundred prompts of a thousand blocks."""
        whole, rest = divmod(request.input, self.block_size)
        ids = self.texts.ids(bytes(request.hash_ids), self.base)
        count = len(ids)
        if count not in (whole, whole + (rest > 0)):
            raise BadRow(
                f"{count} hash_ids of {self.block_size} tokens where in is {request.input}: there must be {whole}, one for "
                "each whole block"
            )
        if count == whole and rest:
            ids.append(self.ends)
            self.ends += 1
        return ids


class _IdTexts:
    """Reads the ids of requests that repeat most of those before them: only what differs from the one before is decoded."""

    def __init__(self) -> None:
        self._text = b"[]"
        self._ids = array("q")

    def ids(self, text: bytes, base: int) -> array[int]:
        """Return the numbers in ``text``, each plus ``base``. Raises ``BadRow``."""
        same = common_length(self._text, text)
        cut = text.rfind(b",", 0, same)
        known, rest = (0, text) if cut < 0 else (text.count(b",", 0, cut + 1), b"[" + text[cut + 1 :])
        listed = msgspec.json.decode(rest, type=list[int])
        if listed and (min(listed) < 0 or max(listed) >= SHARE // 2):
            raise BadRow(f"hash_ids holds a number that isn't between 0 and {SHARE // 2 - 1}")
        ids = self._ids[:known]
        ids.extend([id_ + base for id_ in listed] if base else listed)
        self._text, self._ids = text, ids
        return ids[:]


FORMAT = Format(
    name="weka",
    summary="Weka agent sessions (kv-cache-tester, AgentX): turns, think times, sub-agents, 64-token ids.",
    recognise=lambda head: head.has("id", "requests"),
    read=read,
    grouped=True,
)
