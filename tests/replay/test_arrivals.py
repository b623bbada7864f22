"""When requests come: open loop, sessions, sub-agents, closed loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.support import SECOND, most_at_once, play, request, sessions

from kvyard.errors import KvyardError
from kvyard.replay.arrivals import TraceArrivals
from kvyard.replay.traces import Trace, TraceRequest


def times(found: list[tuple[str, int, int]]) -> dict[str, float]:
    return {name: came / SECOND for name, came, _ in found}


def test_open_loop_keeps_recorded_times() -> None:
    rows = [request("a", 0), request("b", 0.5), request("c", 0.5), request("d", 7)]
    found = play(rows)
    assert times(found) == {"a": 0, "b": 0.5, "c": 0.5, "d": 7}
    assert [name for name, _, _ in found] == ["a", "b", "c", "d"]


def test_a_speed_up_divides_gaps_and_think_times() -> None:
    rows = [request("a", 0, session="s"), request("x", 4), request("b", session="s", delay=6)]
    assert times(play(rows, speedup=2)) == {"a": 0, "x": 2, "b": 1 + 3}


def test_a_turn_waits_for_the_one_before_and_its_think_time() -> None:
    rows = [
        request("a1", 0, session="a"),
        request("a2", session="a", delay=2),
        request("a3", 3.5, session="a"),
        request("a4", 99, session="a"),
    ]
    # a3 has no delay: it comes at its time, or when a2 has ended if that is later.
    assert times(play(rows)) == {"a1": 0, "a2": 3, "a3": 4, "a4": 99}


def test_a_turn_isnt_late_because_its_row_is() -> None:
    """Its predecessor ends long before the file comes to it."""
    rows = [
        request("a1", 0, session="a"),
        request("x", 100),
        request("y", 200),
        request("a2", session="a", delay=1),
        request("z", 300),
    ]
    assert times(play(rows)) == {"a1": 0, "a2": 2, "x": 100, "y": 200, "z": 300}


def test_the_first_row_that_waits_may_name_one_that_ended_long_ago() -> None:
    """While no row waits for others, those that ended are remembered in another way, odd names included."""
    odd = "a\0b é"
    rows = [
        request(odd, 0),
        *(request(f"x{at}", 10 + at) for at in range(50)),
        request("late", delay=2, after=(odd, "x0")),
    ]
    found = times(play(rows))
    assert len(found) == 52 and found["late"] == found["x48"], "at once when its row is read: both have ended"


def test_an_agent_waits_for_its_sub_agents() -> None:
    rows = [
        request("a1", 0, session="a"),
        request("b1", session="b", delay=0.5, after=("a1",), root="a"),
        request("c1", session="c", delay=1.5, after=("a1",), root="a"),
        request("b2", session="b", delay=1, root="a"),
        request("a2", session="a", delay=0, after=("b2", "c1")),
    ]
    # a1 ends at 1; b1 1.5-2.5, c1 2.5-3.5, b2 3.5-4.5; a2 when both are through.
    assert times(play(rows)) == {"a1": 0, "b1": 1.5, "c1": 2.5, "b2": 3.5, "a2": 4.5}


def test_a_predecessor_may_be_a_single_request() -> None:
    rows = [
        request("a", 0),
        request("b", 5),
        request("c", delay=1, after=("a",)),
        request("d", delay=0, after=("a", "b")),
    ]
    assert times(play(rows)) == {"a": 0, "c": 2, "b": 5, "d": 6}


def test_single_requests_are_read_as_they_come() -> None:
    read = 0

    def endless() -> Iterator[TraceRequest]:
        nonlocal read
        while True:
            read += 1
            yield request(str(read), read)

    arrivals = TraceArrivals(endless())
    for _ in range(10):
        due = arrivals.peek()
        assert due is not None
        arrivals.take(due)
    assert read < 15


def test_closed_loop_limits_requests_in_flight() -> None:
    rows = [request(str(number), number * 1000) for number in range(20)]
    found = play(rows, concurrency=3, lasts={str(number): 1 + number % 4 for number in range(20)})
    assert [name for name, _, _ in found] == [str(number) for number in range(20)]
    assert most_at_once([span[1:] for span in found]) == 3
    assert found[0][1] == 0 and all(came < 100 * SECOND for _, came, _ in found)


def test_in_closed_loop_a_session_keeps_its_slot_while_it_thinks() -> None:
    rows = [
        request("a1", 0, session="a"),
        request("b1", 1, session="b"),
        request("a2", session="a", delay=5),
        request("c1", 2, session="c"),
        request("b2", session="b", delay=1),
    ]
    assert times(play(rows, concurrency=1)) == {"a1": 0, "a2": 6, "b1": 7, "b2": 9, "c1": 10}
    assert times(play(rows, concurrency=2)) == {"a1": 0, "b1": 0, "b2": 2, "c1": 3, "a2": 6}


def test_sessions_that_wait_for_each_other_share_a_slot() -> None:
    """Or a closed loop of one would stand still."""
    rows = [
        request("a1", 0, session="a"),
        request("b1", session="b", delay=1, after=("a1",)),
        request("x", 3),
        request("a2", session="a", delay=1, after=("b1",)),
    ]
    assert times(play(rows, concurrency=1)) == {"a1": 0, "b1": 2, "a2": 4, "x": 5}


def test_a_grouped_trace_is_read_session_by_session() -> None:
    read: list[str] = []

    def rows(_: object) -> Iterator[TraceRequest]:
        for session in range(50):
            for turn in range(3):
                read.append(f"{session}.{turn}")
                yield request(f"{session}.{turn}", session=str(session), delay=0 if turn else None)

    arrivals = TraceArrivals(Trace("made up", "test", rows, grouped=True), concurrency=2)
    assert [row.id for row in arrivals.take(0)] == ["0.0", "1.0"]
    assert len(read) == 7
    found = play(Trace("made up", "test", rows, grouped=True), concurrency=2)
    assert len({name for name, _, _ in found}) == len(found) == 150
    assert most_at_once(session_spans(found, lambda name: name.partition(".")[0])) == 2


def session_spans(found: list[tuple[str, int, int]], session: object) -> list[tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for name, came, ended in found:
        key = session(name)  # type: ignore[operator]
        first, last = spans.get(key, (came, ended))
        spans[key] = (min(first, came), max(last, ended))
    return list(spans.values())


@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    concurrency=st.integers(1, 5),
    lasting=st.lists(st.floats(0.1, 5), min_size=1, max_size=8),
)
def test_closed_loop_of_shuffled_sessions(
    turns: list[int], order: object, concurrency: int, lasting: list[float]
) -> None:
    """However sessions are mixed in the file: everything comes once, turns in order, never too many sessions."""
    left = {f"s{number}": count for number, count in enumerate(turns)}
    done = dict.fromkeys(left, 0)
    rows: list[TraceRequest] = []
    while any(done[name] < left[name] for name in left):
        name = order.choice([one for one in left if done[one] < left[one]])  # type: ignore[attr-defined]
        rows.append(
            request(f"{name}.{done[name]}", len(rows), session=name, delay=None if not done[name] else done[name] % 3)
        )
        done[name] += 1
    lasts = {row.id: lasting[at % len(lasting)] for at, row in enumerate(rows)}
    found = play(rows, lasts=lasts, concurrency=concurrency)
    assert sorted(name for name, _, _ in found) == sorted(row.id for row in rows)
    spans = session_spans(found, lambda name: name.partition(".")[0])
    assert most_at_once(spans) <= concurrency
    ends = {name: ended for name, _, ended in found}
    for name, came, _ in found:
        session, _, turn = name.partition(".")
        if int(turn):
            before = ends[f"{session}.{int(turn) - 1}"]
            assert came == before + (int(turn) % 3) * SECOND


@pytest.mark.parametrize("concurrency", [None, 3])
def test_generated_sessions_all_come_once(concurrency: int | None) -> None:
    trace = sessions(200)
    found = play(trace, 0.3, concurrency=concurrency)
    assert sorted(name for name, _, _ in found) == sorted(row.id for row in trace)


def test_nonsense_is_refused() -> None:
    for options in ({"speedup": 0}, {"speedup": -1}, {"concurrency": 0}):
        with pytest.raises(KvyardError, match="must be"):
            TraceArrivals([], **options)  # type: ignore[arg-type]


def test_a_request_that_waits_for_one_that_never_comes_is_named() -> None:
    arrivals = TraceArrivals([request("a"), request("b", after=("ghost",))])
    assert [one.id for one in arrivals.take(0)] == ["a"]
    with pytest.raises(KvyardError, match="b, for one, waits for ghost"):
        arrivals.check_empty()
