"""A trace in parts: one to search on, a prefix of that for a first look, and one that is kept for the test.

They are cut by time. Turns of a session belong where the session began. Where sessions have no common clock, they are cut by
sessions, in the file's order.
"""

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.jobs import TracePart
from kvyard.replay.traces import Trace
from kvyard.replay.traces.changes import without_long
from kvyard.replay.traces.reading import ReadingTally

PREFIX = 0.25
"""Share of the search part on which a point is first tried."""
FEWEST = 100
"""Requests of a prefix that is worth the trouble."""


class TraceParts(msgspec.Struct, frozen=True):
    """Split of a trace."""

    train: TracePart
    prefix: TracePart | None
    """None where it would be too short to be of use."""
    test: TracePart | None
    """None if none was asked for."""
    requests: dict[str, int]
    """Requests of each part."""


def cut(trace: Trace, test: float, max_tokens: int | None = None) -> TraceParts:
    """Return ``trace`` in parts, the last ``test`` share of its time for the test. Requests of more than ``max_tokens`` aren't
    counted, since no replay has them. Raises ``KvyardError``.
    """
    if not 0 <= test < 1:
        raise KvyardError(
            f"--test {test:g}: the share of the trace that is kept for the test is at least 0 and below 1"
        )
    if trace.grouped:
        return _checked(_by_sessions(trace, test), trace, test, max_tokens)
    times = [request.arrival for request in trace if request.delay is None]
    length = times[-1] - times[0] if times else 0
    train_end = _at(length, 1 - test) if test else None
    first = _at(length, (1 - test) * PREFIX)
    parts: dict[str, TracePart | None] = {
        "train": TracePart(until=train_end),
        "prefix": TracePart(until=first),
        "test": TracePart(since=train_end) if train_end else None,
    }
    return _checked(parts, trace, test, max_tokens)


def _by_sessions(trace: Trace, test: float) -> dict[str, TracePart | None]:
    starts: list[int] = []
    seen: set[str] = set()
    total = 0
    for total, request in enumerate(trace, 1):
        root = request.root or request.session or request.id
        if root not in seen:
            seen.add(root)
            starts.append(total - 1)
    train = starts[min(len(starts) - 1, round(len(starts) * (1 - test)))] if test else total
    prefix = starts[min(len(starts) - 1, round(len(starts) * (1 - test) * PREFIX))]
    return {
        "train": TracePart(first=train or None),
        "prefix": TracePart(first=prefix or None),
        "test": TracePart(skip=train) if test else None,
    }


def _checked(parts: dict[str, TracePart | None], trace: Trace, test: float, max_tokens: int | None) -> TraceParts:
    requests = {
        name: sum(1 for _ in without_long(part.of(trace), max_tokens).rows(ReadingTally())) if part is not None else 0
        for name, part in parts.items()
    }
    train = parts["train"]
    if train is None or not requests["train"] or (test and not requests["test"]):
        raise KvyardError(
            f"--test {test:g} leaves {requests['train']:,} requests to search on and {requests['test']:,} for the test: "
            "take a longer trace, or --test 0 for none"
        )
    if not FEWEST <= requests["prefix"] < requests["train"]:
        parts["prefix"], requests["prefix"] = None, 0
    return TraceParts(train, parts["prefix"], parts["test"], requests)


def _at(length: int, share: float) -> int:
    """Return an instant that lies after the first request in any case."""
    return max(1, round(length * share))
