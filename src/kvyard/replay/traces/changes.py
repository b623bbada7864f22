"""Traces derived from traces: another speed, a part of one. As lazy as their source."""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Final

import msgspec
from msgspec.structs import replace

from kvyard.clock import MS, to_seconds
from kvyard.errors import KvyardError
from kvyard.replay.traces.laws import arrival_law, arrival_times
from kvyard.replay.traces.reading import ReadingTally
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace


def scaled(trace: Trace, speedup: float) -> Trace:
    """Return the trace with gaps and think times divided by ``speedup``. Raises ``KvyardError`` unless that is above 0."""
    if not 0 < speedup < float("inf"):
        raise KvyardError(f"a speed-up must be a number above 0, not {speedup}")

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        for request in trace.rows(tally):
            delay = None if request.delay is None else round(request.delay / speedup)
            yield replace(request, arrival=round(request.arrival / speedup), delay=delay)

    return Trace(f"{trace.name} at {speedup:g}x", trace.format, rows, grouped=trace.grouped)


TOGETHER = 10 * MS
"""Arrivals closer than this to the one before them were recorded as one."""


def spread(requests: Iterable[TraceRequest], window: int) -> Iterator[TraceRequest]:
    """Yield ``requests`` with those that were recorded together spread evenly over ``window`` nanoseconds, or over the time
    until the next ones if that is shorter. Recorders that stamp in ticks make bursts which never were. Who waits for others
    stays.
    """
    batch: list[TraceRequest] = []
    last = 0
    for request in requests:
        if request.delay is None:
            if batch and request.arrival - last > TOGETHER:
                yield from _spread(batch, min(window, request.arrival - batch[0].arrival))
                batch = []
            last = request.arrival
        batch.append(request)
    yield from _spread(batch, window)


def _spread(batch: list[TraceRequest], window: int) -> Iterator[TraceRequest]:
    free = [request for request in batch if request.delay is None]
    first = free[0].arrival if free else 0
    index = 0
    for request in batch:
        if request.delay is None:
            # A recorded order stays, also where its stamps are apart by more than their share of the window.
            yield replace(request, arrival=max(request.arrival, first + window * index // len(free)))
            index += 1
        else:
            yield request


PREFETCH = ":prefetch"
"""Suffix of the id of a request that prefetches for the turn after the named one."""


def prefetched(requests: Iterable[TraceRequest], lead: int) -> Iterator[TraceRequest]:
    """``requests``, and before each turn that follows a tool a request that repeats the prompt of the turn before and asks for
    one token, ``lead`` nanoseconds before the tool is through. Whatever lower tiers have of the prompt is loaded by then. Tools
    that take no longer than ``lead`` have none.
    """
    latest: dict[str, TraceRequest] = {}
    for request in requests:
        session = request.session
        if session is None:
            yield request
            continue
        before = latest.get(session)
        latest[session] = request
        if before is not None and before.tool_call and not request.after and (request.delay or 0) > lead:
            yield replace(
                before,
                id=before.id + PREFETCH,
                output_length=1,
                session=None,
                delay=(request.delay or 0) - lead,
                after=(before.id,),
                root=before.root or session,
                tool_call=False,
                prefetch=True,
            )
        yield request


def with_arrivals(trace: Trace, law: str, seed: int = 0) -> Trace:
    """Return the trace with newly drawn arrivals, such as ``poisson:2``; who waits for others still does, and has no time of
    its own.

    This puts sessions that have clocks of their own on a common one. Raises ``KvyardError`` for a law that makes no sense.
    """
    gaps = arrival_law(law)

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        times = arrival_times(gaps, Random(f"{seed} arrivals"))
        for request in trace.rows(tally):
            yield replace(request, arrival=next(times) if request.delay is None else 0)

    return Trace(f"{trace.name} with {law}", trace.format, rows)


_APART: Final = 1 << 40
"""Distance between the ids of one copy and the next: more than any recorder has numbered so far."""
_64_BITS: Final = (1 << 64) - 1
"""Ids that are hashes have all of these, and those of copies must fit too."""


def tiled(trace: Trace, times: int) -> Trace:
    """Return the trace ``times`` times, one copy after the other, each with names and ids of its own: no copy shares anything
    with another. The first is the trace as it is. Raises ``KvyardError`` for less than one, and for sessions without a common
    clock.
    """
    if times < 1:
        raise KvyardError(f"a trace can be repeated 1 time or more, not {times}")
    if trace.grouped:
        raise KvyardError(f"{trace.name}: its sessions have no common clock, so no copy can follow another")

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        last = offset = seen = 0
        for copy in range(times):
            if copy:
                offset = last + last // max(1, seen)  # as far behind the last request as requests are apart on average
            for request in trace.rows(tally if not copy else ReadingTally()):
                seen += 1
                last = max(last, offset + request.arrival)
                yield _renamed(request, copy, offset) if copy else request

    return Trace(f"{trace.name}, {times} times", trace.format, rows)


def _renamed(request: TraceRequest, copy: int, offset: int) -> TraceRequest:
    end = f"~{copy}"
    return replace(
        request,
        id=request.id + end,
        arrival=request.arrival + offset,
        ids=None if request.ids is None else [id_ + copy * _APART & _64_BITS for id_ in request.ids],
        session=None if request.session is None else request.session + end,
        root=None if request.root is None else request.root + end,
        after=tuple([name + end for name in request.after]),
        salt=f"{request.salt or ''}{end}" if request.tokens is not None else request.salt,
    )


def sliced(
    trace: Trace,
    *,
    skip: int = 0,
    first: int | None = None,
    since: int = 0,
    until: int | None = None,
    sessions: int | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
) -> Trace:
    """Return a part of a trace, with its first arrival at 0.

    ``since`` and ``until`` (nanoseconds) choose by arrival. A request with a delay has no arrival of its own: it is in if one
    that it waits for is. ``sessions`` takes that many sessions as a whole. ``min_tokens`` and ``max_tokens`` choose by the
    tokens of prompt and answer together. Of what is left, ``skip`` requests are left out and ``first`` are taken. Who is in
    doesn't wait for who isn't; a turn that has lost all it waited for starts at its recorded time, or at 0 where sessions
    have clocks of their own. Raises ``KvyardError`` for numbers that make no sense.
    """
    for name, value in (("skip", skip), ("since", since), ("min_tokens", min_tokens)):
        if value < 0:
            raise KvyardError(f"{name} can't be negative: {value}")
    for name, most in (("first", first), ("sessions", sessions), ("max_tokens", max_tokens)):
        if most is not None and most < 1:
            raise KvyardError(f"{name} must be at least 1, not {most}")
    if until is not None and until <= since:
        raise KvyardError(f"nothing lies between {to_seconds(since):g} s and {to_seconds(until):g} s")
    if max_tokens is not None and max_tokens < min_tokens:
        raise KvyardError(f"no request has at least {min_tokens} and at most {max_tokens} tokens")
    if trace.grouped and (since or until is not None):
        raise KvyardError(f"{trace.name}: its sessions have no common clock; slice it by sessions or requests")

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        lengths = (min_tokens, max_tokens)
        return _Slice(skip, first, since, until, sessions, lengths, trace.grouped).of(trace.rows(tally), tally)

    return Trace(f"part of {trace.name}", trace.format, rows, grouped=trace.grouped)


def without_long(trace: Trace, max_tokens: int | None) -> Trace:
    """Return ``trace`` without requests of more than ``max_tokens`` tokens, prompt and answer together."""
    return trace if max_tokens is None else sliced(trace, max_tokens=max_tokens)


class _Slice(msgspec.Struct):
    """One pass."""

    skip: int
    first: int | None
    since: int
    until: int | None
    sessions: int | None
    lengths: tuple[int, int | None]
    grouped: bool
    start: int | None = None
    names: set[str] = set()
    """Requests with sessions or successors that are in."""
    turned: set[str] = set()
    """Sessions of which a turn is in."""
    roots: set[str] = set()

    def of(self, requests: Iterator[TraceRequest], tally: ReadingTally) -> Iterator[TraceRequest]:
        taken = 0
        for request in requests:
            if self.sessions is not None and not self._wanted(request):
                if self.grouped:
                    return
                continue
            if request.delay is None and self.until is not None and request.arrival >= self.until:
                if request.session is None and not self.turned:
                    return
                continue
            if not self._in_time(request):
                continue
            least, most = self.lengths
            tokens = request.input_length + request.output_length
            if most is not None and tokens > most:
                tally.left_out[f"more than {most:,} tokens"] += 1
                continue
            if tokens < least:
                continue
            if self.skip:
                self.skip -= 1
                continue
            yield self._taken(request)
            taken += 1
            if taken == self.first:
                return

    def _wanted(self, request: TraceRequest) -> bool:
        """Return true if it belongs to one of the sessions taken; a request without one counts as one."""
        root = request.root or request.session or f"\0{request.id}"
        if root not in self.roots:
            if len(self.roots) == self.sessions:
                return False
            self.roots.add(root)
        return True

    def _in_time(self, request: TraceRequest) -> bool:
        if request.delay is None:
            return request.arrival >= self.since
        return not (self.since or self.until is not None) or self._waits(request)

    def _waits(self, request: TraceRequest) -> bool:
        return request.session in self.turned or not self.names.isdisjoint(request.after)

    def _taken(self, request: TraceRequest) -> TraceRequest:
        arrival, delay, after = request.arrival, request.delay, request.after
        if after:
            after = tuple(name for name in after if name in self.names)
        if delay is not None and not after and request.session not in self.turned:
            delay = None
            if self.grouped:
                arrival = 0
        if delay is None and self.start is None:
            self.start = arrival
        if request.session is not None:
            self.turned.add(request.session)
        if request.session is not None or request.after:
            self.names.add(request.id)
        return replace(request, arrival=max(0, arrival - (self.start or 0)), delay=delay, after=after)
