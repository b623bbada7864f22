"""A trace: requests in order, read again on each pass and never held as a whole."""

import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from kvyard.errors import KvyardError
from kvyard.replay.traces.errors import TraceError
from kvyard.replay.traces.identity import chained
from kvyard.replay.traces.reading import Reading, ReadingTally
from kvyard.replay.traces.registry import FORMATS, detect
from kvyard.replay.traces.request import TraceRequest


class Trace:
    """Requests in order. Iterate it as often as you like; each pass reads its source again."""

    def __init__(
        self, name: str, format: str, rows: Callable[[ReadingTally], Iterator[TraceRequest]], *, grouped: bool = False
    ) -> None:
        """``rows`` starts a pass, and notes in the tally what it leaves out."""
        self.name = name
        """The file's name, or how the trace was made."""
        self.format = format
        self.grouped = grouped
        """True if each session comes as a whole, on a clock of its own, before the next begins."""
        self.tally = ReadingTally()
        """Rows that the latest pass left out so far."""
        self.rows = rows
        """Starts a pass that notes in a tally what it leaves out, for traces made of traces."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests. Raises ``TraceError`` at a row that is none, and where there is no request at all."""
        self.tally = tally = ReadingTally()
        rows = self.rows(tally)
        first = next(rows, None)
        if first is None:
            notes = tally.notes()
            raise TraceError(self.name, f"no requests in it{': ' if notes else ''}{', '.join(notes)}")
        yield first
        yield from rows

    @cached_property
    def first(self) -> TraceRequest:
        """The first request. Raises as iterating does."""
        return next(self.rows(ReadingTally()), None) or next(iter(self))

    @property
    def id_block_size(self) -> int:
        """Tokens an id stands for, going by the first request; 0 without ids."""
        return self.first.id_block_size

    def __repr__(self) -> str:
        return f"<Trace {self.name!r}, {self.format}>"


def open_trace(
    path: str | Path,
    format: str | None = None,
    *,
    trace_block_size: int | None = None,
    skip_bad: bool = False,
    sort: bool = False,
    chain_ids: bool = False,
    limit: int | None = None,
) -> Trace:
    """Open the trace in a file, compressed or not, or in a directory of sessions. Only its beginning is read here.

    ``format`` overrides the detected format; ``trace_block_size`` the tokens of an id. ``skip_bad`` counts bad rows in the
    trace's ``tally`` instead of raising at the first. ``sort`` puts requests in order of arrival, for which it holds them
    all. ``chain_ids`` is for files whose ids name blocks and not prefixes. ``limit`` is the number of requests after which
    the trace ends. Raises ``KvyardError`` if the file can't be read, its format is unclear or an option makes no sense.
    """
    path = Path(path)
    for name, value in (("trace_block_size", trace_block_size), ("limit", limit)):
        if value is not None and value < 1:
            raise KvyardError(f"{name} must be at least 1, not {value}")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(path, "a pipe can be read once, and a trace is read several times: write it to a file first")
    chosen = detect(path) if format is None else FORMATS.get(format)

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        reading = Reading(path, block_size=trace_block_size or 0, skip_bad=skip_bad, unordered=sort, tally=tally)
        requests = chosen.read(reading)
        if chain_ids:
            requests = (
                request if request.ids is None else replace(request, ids=chained(request.ids)) for request in requests
            )
        if sort:
            requests = iter(in_order(requests))
        return requests if limit is None else islice(requests, min(limit, sys.maxsize))

    return Trace(str(path), chosen.name, rows, grouped=chosen.grouped and not sort)


def in_order(requests: Iterator[TraceRequest]) -> list[TraceRequest]:
    """Return all requests by arrival, with the first at 0. Those that wait for others stay behind them."""
    kept = list(requests)
    turns: dict[str, int] = {}
    times: dict[str, int] = {}
    keyed: list[tuple[int, int, TraceRequest]] = []
    start: int | None = None
    for number, request in enumerate(kept):
        waits = [times[name] for name in request.after if name in times]
        if request.session in turns:
            waits.append(turns[request.session])
        if not waits and (start is None or request.arrival < start):
            start = request.arrival
        time = max([request.arrival, *waits])
        times[request.id] = time
        if request.session is not None:
            turns[request.session] = time
        keyed.append((time, number, request))
    keyed.sort()
    if not start:
        return [request for _, _, request in keyed]
    # A request with a delay may have no time, which is written as 0.
    return [
        request
        if request.delay is not None and not request.arrival
        else replace(request, arrival=request.arrival - start)
        for _, _, request in keyed
    ]
