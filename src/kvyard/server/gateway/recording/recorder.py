"""Live traffic as a trace: when requests came, how long they were and took, and what their prompts had in common. No text,
no hashes.

The file has Mooncake's JSON lines, which ``kvyard replay`` and ``kvyard trace info`` read as is. A row is written when its
request has ended, because only then its answer's length is known, and in order of arrival, because that is how traces are
read: a row waits until all requests that came before it have ended too. What waits is bounded; beyond that the request that
holds up the others is left out and counted.

It knows nothing of HTTP, tokenizers or routing, and never stands in the way of serving: a disk that is full ends the recording,
with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.blocks import NO_HINTS, Hints
from kvyard.clock import SECOND, US, Clock, WallClock
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.line_file import LineFile
from kvyard.replay.traces.writing import hint_columns
from kvyard.server.gateway.recording.prefix_ids import PrefixIds
from kvyard.server.gateway.recording.request_recorder import ArrivedRequest, RecorderCounters

log = logging.getLogger(__name__)

USUAL_BLOCK = 512
"""Tokens that readers of Mooncake's lines take an id for unless the row says otherwise."""
HELD_BYTES = 64 << 20
"""Most bytes of rows that wait for their turn."""
ROW = 400
"""Bytes that a waiting row takes besides its ids, about."""
SESSIONS = 1 << 16
"""Sessions that are kept."""


class _TraceRow(msgspec.Struct, gc=False):
    """A request whose row isn't written yet."""

    id: object
    at: int
    ids: array[int]
    num_tokens: int
    block_size: int
    session: str | None
    model: str | None
    hints: Hints = NO_HINTS
    ended: int = -1
    output: int = 0
    first_token: int | None = None
    cached: int | None = None

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return ROW + 8 * len(self.ids)


class _Sessions:
    """The sessions of one file: which turn a request is, and how long after the last one it came. Names are made here."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[str, int]] = {}
        """Per session its name in the file, and when its last turn ended; in order of use. A new file must not refer to turns
        in another one."""
        self._named = 0

    def turn(self, session: str, arrived: int, ended: int) -> dict[str, Any]:
        """Return the fields of a row."""
        known = self.last.pop(session, None)
        if known is None:
            self._named += 1
            self.last[session] = (f"s{self._named}", ended)
            if len(self.last) > SESSIONS:
                del self.last[next(iter(self.last))]
            return {"session_id": f"s{self._named}"}
        name, before = known
        self.last[session] = (name, max(before, ended))
        if arrived < before:
            return {}  # beside the last turn rather than after it: it keeps its time and doesn't wait
        return {"session_id": name, "delay": _milliseconds(arrived - before)}


def _milliseconds(ns: int) -> int | float:
    """Round to the microsecond, which is finer than any clock here, and short."""
    us = ns // US
    return us // 1000 if us % 1000 == 0 else us / 1000


class TrafficRecorder:
    """Writes one recording. For one thread."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock,
        block_size: int | None = None,
        limit: int = 1 << 30,
        keep: int = 0,
        remembered: int = 1 << 23,
        engine_times: bool = False,
    ) -> None:
        """Begin the file; ``.gz`` packs it, and ``{start}`` in its name stands for the seconds since 1970.

        An id stands for ``block_size`` tokens; left out, for as many as a request's keys. At ``limit`` bytes it ends, or
        with ``keep`` goes on in a new file while that number of full ones stay, numbered. About ``remembered`` prefixes are
        recognised. ``engine_times``: its caller is an engine, so that HTTP and tokenizing are in none of the times; each
        row says so. Raises ``KvyardError`` where the file exists or can't be written, and for figures that can't be.
        """
        for name, value in (("block size", block_size), ("limit", limit), ("memory", remembered)):
            if value is not None and value < 1:
                raise KvyardError(f"a recording's {name} must be at least 1, not {value}")
        if keep < 0:
            raise KvyardError(f"a recording can't keep {keep} full files: 0 ends it at the limit")
        start = str(WallClock.since_epoch().now() // SECOND)
        self.path = Path(str(path).replace("{start}", start))
        self.block_size = block_size
        self.counters = RecorderCounters()
        self.stopped = ""
        """Why nothing is recorded any more; empty while it is."""
        self.ids = PrefixIds(remembered)
        self._clock = clock
        self._limit = limit
        self._engine_times = engine_times
        self.file = LineFile(self.path, keep=keep)
        self._before = 0
        """Bytes in full files."""
        self._first: int | None = None
        self._open: dict[object, _TraceRow] = {}
        self.waiting: deque[_TraceRow] = deque()
        """Requests whose rows aren't written, in order of arrival; the first is open."""
        self._held = 0
        self._sessions = _Sessions()
        self._conversations: dict[str, str] = {}
        """Names of sessions that only hints are about, as they are in the file; in order of use."""
        self._named = 0

    def check(self, key_tokens: int) -> None:
        """Raise ``KvyardError`` unless ids can be made of keys for ``key_tokens`` tokens each."""
        size = self.block_size
        if key_tokens < 1 or (size is not None and size % key_tokens):
            raise KvyardError(
                f"a recording's block size must be a multiple of the index's, {key_tokens}: {size} is none"
            )

    def arrived(self, request: ArrivedRequest) -> None:
        """Record a request that arrived. Raises ``KvyardError`` as ``check`` does. An id that is open already is left out."""
        key_tokens, num_tokens, model = request.key_tokens, request.num_tokens, request.model
        self.check(key_tokens)
        if self.stopped:
            return
        if num_tokens < 1 or request.id in self._open:
            self.counters.left_out += 1
            return
        size = self.block_size or key_tokens
        ids = self._ids(request.keys, num_tokens, size, key_tokens, request.tail, model)
        now = self._clock.now()
        entry = _TraceRow(request.id, now, ids, num_tokens, size, request.session, model, request.hints)
        self._open[request.id] = entry
        self.waiting.append(entry)
        self._held += entry.size
        while self._held > HELD_BYTES and len(self.waiting) > 1:
            late = self.waiting.popleft()
            self._held -= late.size
            del self._open[late.id]
            self.counters.late += 1
            self._release()

    def ended(
        self, id_: object, output_tokens: int, *, first_token: int | None = None, cached: int | None = None
    ) -> None:
        """Close a request with ``output_tokens``. Without any it is left out. An unknown request is ignored.

        ``first_token`` is the time of the first of them, if it was seen; ``cached`` the cached tokens of the prompt.
        """
        entry = self._open.pop(id_, None)
        if entry is None:
            return
        entry.ended = self._clock.now()
        entry.output = output_tokens
        entry.first_token, entry.cached = first_token, cached
        self._release()

    def flush(self) -> None:
        """Let what was recorded survive this process, but for rows that wait for their turn."""
        self._guarded(self.file.flush)

    def close(self) -> None:
        """Write all rows of requests that have ended, and end the file. Open ones are left out."""
        for entry in self._open.values():
            entry.ended, entry.output = self._clock.now(), 0
        self._open.clear()
        self._release()
        self._guarded(self.file.flush)
        if not self.stopped:
            self.file.close()
            self.stopped = "it was closed"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _ids(
        self,
        keys: Sequence[int],
        num_tokens: int,
        size: int,
        key_tokens: int,
        tail: Sequence[int] | None,
        model: str | None,
    ) -> array[int]:
        """Return one id for each started block of ``size`` tokens."""
        stride = size // key_tokens
        names: Sequence[int] = keys[stride - 1 :: stride]
        whole = ceil_div(num_tokens, size)
        if len(names) > whole:
            names = names[:whole]
        if len(names) == whole - 1 and tail is not None and len(keys) * key_tokens + len(tail) == num_tokens:
            rest = (*keys[len(names) * stride :], *tail)
            names = [*names, self.ids.name(rest, names[-1] if names else 0)]
        ids = self.ids.of(names, model)
        ids.extend(self.ids.fresh(whole - len(ids)))
        return ids

    def _release(self) -> None:
        """Write the rows whose turn has come."""
        waiting = self.waiting
        while waiting and waiting[0].ended >= 0:
            entry = waiting.popleft()
            self._held -= entry.size
            if entry.output < 1:
                self.counters.left_out += 1
            elif not self.stopped:
                self._guarded(self._write, entry)

    def _write(self, entry: _TraceRow) -> None:
        if self._first is None:
            self._first = entry.at
        row: dict[str, Any] = {
            "timestamp": _milliseconds(entry.at - self._first),
            "input_length": entry.num_tokens,
            "output_length": entry.output,
            "hash_ids": entry.ids.tolist(),
            "e2e": _milliseconds(entry.ended - entry.at),
        }
        if self._engine_times:
            row["clock"] = "engine"
        if entry.first_token is not None:
            row["ttft"] = _milliseconds(entry.first_token - entry.at)
        if entry.cached is not None:
            row["cached"] = entry.cached
        if entry.block_size != USUAL_BLOCK:
            row["block_size"] = entry.block_size
        if entry.session is not None:
            row |= self._sessions.turn(entry.session, entry.at, entry.ended)
        if entry.model is not None:
            row["model"] = entry.model
        if entry.hints is not NO_HINTS:
            row |= self._said(entry)
        self.file.add(msgspec.json.encode(row) + b"\n")
        self.counters.rows += 1

    def _said(self, entry: _TraceRow) -> dict[str, Any]:
        """Return its hints, with a name made here for their session, unless the row has one."""
        columns = hint_columns(entry.hints)
        name = columns.pop("conversation", None)
        if name is None or entry.session is not None:
            return columns
        known = self._conversations.pop(name, None)
        if known is None:
            self._named += 1
            known = f"c{self._named}"
        self._conversations[name] = known
        if len(self._conversations) > SESSIONS:
            del self._conversations[next(iter(self._conversations))]
        return columns | {"conversation": known}

    def _guarded(self, write: Callable[..., None], *args: Any) -> None:
        """Write, and see to the limit. An error ends the recording."""
        if self.stopped:
            return
        try:
            write(*args)
            self.counters.bytes = self._before + self.file.bytes
            if self.file.bytes >= self._limit:
                self._full()
        except OSError as error:
            self.counters.errors += 1
            self.counters.rows -= self.file.lost
            self.counters.bytes = self._before + self.file.bytes
            self._stop(f"{self.path} can't be written: {error.strerror}")

    def _full(self) -> None:
        if not self.file.keep:
            self._stop(f"{self.path} has reached its limit of {self._limit} bytes")
            return
        self.file.flush()
        self._before += self.file.bytes
        self.file.rotate()
        self._sessions.last.clear()  # names aren't used again

    def _stop(self, why: str) -> None:
        self.stopped = why
        self._open.clear()
        self.waiting.clear()
        self._held = 0
        with contextlib.suppress(OSError):
            self.file.close()
        log.warning("recording ended: %s", why)
