"""The part of a report that runs along time: records counted in windows, and the fleet's samples. Small enough to be drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvyard.clock.units import MS, SECOND
from kvyard.replay.record import MISSES, Record
from kvyard.replay.report.numbers import spread
from kvyard.replay.report.report import TIERS, Samples, Series

if TYPE_CHECKING:
    from kvyard.replay.fleet import Fleet

WINDOWS = 120
PER_WINDOW = 8
"""Requests that a window should have on average; there are fewer windows where there are few requests."""
CELLS = 40_000
"""Values at most per quantity of all workers together; with very many workers there are fewer points in time."""
FEWEST = 40
"""But not fewer than this."""
_WHOLE = frozenset({"none", "partial_block", "unknown"})
"""Reasons that hold for all that is left of a prompt."""


def sources(record: Record) -> dict[str, int]:
    """Prompt tokens of an admitted request by tier (``TIERS``) or by a name of ``MISSES``; together they are the prompt.

    A prefix that another worker had may be short, and what follows it new: it counts as what it is, whatever ended the prefix.
    """
    found = dict(zip(TIERS, (record.cached, *record.loaded)))
    rest = record.input - sum(found.values())
    if record.miss in _WHOLE:
        return {**found, record.miss: rest}
    lost, elsewhere = record.lost, record.elsewhere
    return {
        **found,
        "evicted": lost,
        "other_worker": elsewhere,
        "never_seen": rest - lost - elsewhere,
    }


def points(wanted: int, workers: int) -> int:
    """How many points in time a quantity of so many workers may have."""
    return max(min(wanted, FEWEST), min(wanted, CELLS // max(1, workers)))


def make_series(records: Sequence[Record], names: Sequence[str], start: int, end: int) -> Series:
    """``records`` in windows from ``start`` to ``end``, nanoseconds. ``names`` are the workers, in order."""
    count = points(min(WINDOWS, max(FEWEST, len(records) // PER_WINDOW)), len(names))
    window = max(1, -(-(end - start + 1) // count))

    def at(when: int) -> int:
        return (when - start) // window

    arrived, finished = [0] * count, [0] * count
    waits: list[list[int]] = [[] for _ in range(count)]
    prompts: dict[str, list[int]] = defaultdict(lambda: [0] * count)
    numbers = {name: number for number, name in enumerate(names)}
    routed = [[0] * count for _ in names]
    tokens = [[0] * count for _ in names]
    for record in records:
        here = at(record.arrival)
        arrived[here] += 1
        if record.status == "finished":
            finished[at(record.ended)] += 1
            waits[here].append(record.first_token - record.arrival)
        if record.worker:
            number = numbers[record.worker.partition("@")[0]]
            routed[number][here] += 1
            tokens[number][here] += record.input
        if record.admitted >= 0:
            there = at(record.admitted)
            for name, part in sources(record).items():
                if part:
                    prompts[name][there] += part
    spreads = [spread(lot, MS) if lot else None for lot in waits]
    return Series(
        window_s=window / SECOND,
        arrived=arrived,
        finished=finished,
        ttft_p50=[None if one is None else one.p50 for one in spreads],
        ttft_p99=[None if one is None else one.p99 for one in spreads],
        prompts={name: prompts[name] for name in (*TIERS, *MISSES) if any(prompts[name])},
        routed=routed,
        routed_tokens=tokens,
    )


def make_samples(fleet: Fleet, start: int) -> Samples:
    """The fleet's samples, with times counted from ``start``; fewer of them where there are very many workers."""
    columns = fleet.timeline.as_dict([worker.name for worker in fleet.workers])
    times: list[float] = columns.pop("times_s")  # type: ignore[assignment]
    del columns["workers"]
    step = -(-len(times) // max(1, points(len(times), len(fleet.workers))))
    return Samples(
        times_s=[round(time - start / SECOND, 9) for time in times[:: step or 1]],
        values={name: [row[:: step or 1] for row in rows] for name, rows in columns.items()},  # type: ignore[attr-defined]
    )
