"""Arrivals that a recorder's ticks put together, spread again."""

from __future__ import annotations

from kvyard.clock import MS, SECOND
from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.changes import spread


def row(name: str, at: int, delay: int | None = None) -> TraceRequest:
    return TraceRequest(id=name, arrival=at, input_length=10, output_length=1, delay=delay)


def arrivals(rows: list[TraceRequest], window: int = 3 * SECOND) -> list[float]:
    return [one.arrival / SECOND for one in spread(rows, window)]


def test_a_tick_is_spread_until_the_next_one() -> None:
    rows = [row(str(at), 0) for at in range(4)] + [row("b", 3 * SECOND), row("c", 3 * SECOND + 2 * MS)]
    assert arrivals(rows) == [0, 0.75, 1.5, 2.25, 3, 4.5]


def test_no_further_than_the_window() -> None:
    rows = [row("a", 0), row("b", 0), row("c", 60 * SECOND)]
    assert arrivals(rows) == [0, 1.5, 60]


def test_single_arrivals_and_those_who_wait_stay() -> None:
    rows = [row("a", 0), row("b", 5 * SECOND), row("t", 0, delay=7), row("c", 9 * SECOND)]
    assert [(one.id, one.arrival, one.delay) for one in spread(rows, 3 * SECOND)] == [
        (one.id, one.arrival, one.delay) for one in rows
    ]


def test_order_and_number_are_kept_and_nothing_comes_earlier() -> None:
    rows = [row(str(at), (at // 7) * 3 * SECOND + at % 3 * MS) for at in range(70)]
    rows.sort(key=lambda one: one.arrival)
    found = list(spread(rows, 3 * SECOND))
    assert [one.id for one in found] == [one.id for one in rows]
    assert all(new.arrival >= old.arrival for new, old in zip(found, rows, strict=True))
    times = [one.arrival for one in found]
    assert times == sorted(times)
    assert list(spread([], SECOND)) == []
