"""Closed loops of load generators whose processes own sessions and slots."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.replay.support import SECOND, request

from kvyard.replay.clients.client import Pacing
from kvyard.replay.process_arrivals import EventLoop, ProcessArrivals
from kvyard.replay.traces import TraceRequest


def turns(sessions: int, count: int) -> list[TraceRequest]:
    """Sessions one after the other, as a trace may have them."""
    return [request(f"{name}.{turn}", session=f"s{name}") for name in range(sessions) for turn in range(count)]


def play(
    rows: Sequence[TraceRequest], slots: int, pacing: Pacing, lasts: dict[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """When each request was sent and answered, in seconds, if a server takes one second or what ``lasts`` has."""
    arrivals = ProcessArrivals(rows, concurrency=slots, pacing=pacing)
    in_flight: list[tuple[int, int, TraceRequest]] = []
    out: dict[str, tuple[float, float]] = {}
    while not arrivals.exhausted or in_flight:
        due = arrivals.peek()
        if in_flight and (due is None or min(in_flight)[0] <= due):
            end, _, row = in_flight.pop(in_flight.index(min(in_flight)))
            arrivals.ended(row, arrivals.observed(row, end))
            continue
        assert due is not None, "arrivals wait for nobody"
        for row in arrivals.take(due):
            end = due + round((lasts or {}).get(row.id, 1.0) * SECOND)
            in_flight.append((end, len(out), row))
            out[row.id] = (due / SECOND, end / SECOND)
    arrivals.check_empty()
    return out


def test_turns_go_round_by_round_and_a_session_stays_with_its_process() -> None:
    sent = play(turns(4, 2), 2, Pacing(processes=2))
    # Process 0 has sessions 0 and 2 and one slot, process 1 has 1 and 3.
    assert [sent[name][0] for name in ("0.0", "2.0", "0.1", "2.1")] == [0, 1, 2, 3]
    assert [sent[name][0] for name in ("1.0", "3.0", "1.1", "3.1")] == [0, 1, 2, 3]


def test_a_slot_is_held_while_its_session_has_no_answer() -> None:
    rows = turns(2, 3)
    sent = play(rows, 2, Pacing(processes=1), {"0.0": 10.0})
    # The second turn of session 0 takes the other slot as soon as that is free, and keeps session 1 from going on.
    assert sent["1.0"] == (0, 1)
    assert sent["0.1"][0] == 10
    assert sent["1.1"][0] == 10


def test_a_pause_holds_slot_and_session() -> None:
    sent = play(turns(2, 2), 1, Pacing(processes=1, turnaround=SECOND // 2))
    assert [sent[name][0] for name in ("0.0", "1.0", "0.1", "1.1")] == [0, 1.5, 3, 4.5]


def test_slots_that_dont_divide_evenly_go_to_the_first_processes() -> None:
    sent = play(turns(6, 1), 4, Pacing(processes=3))
    assert sorted(start for start, _ in sent.values()) == [0, 0, 0, 0, 1, 1]
    assert sent["3.0"][0] == 0, "process 0 has two slots"


def test_a_process_tokenizes_one_turn_at_a_time() -> None:
    tokens = request("0.0", session="s").input_length
    pacing = Pacing(processes=1, token_ns=SECOND / tokens)  # a second for each turn
    sent = play(turns(2, 1), 2, pacing, {"0.0": 5.0, "1.0": 5.0})
    assert (sent["0.0"][0], sent["1.0"][0]) == (1, 2)
    # Answered at 6, and then counted twice, until 8: the other answer, of 7, is seen at 8.
    arrivals = ProcessArrivals(turns(2, 1), concurrency=2, pacing=pacing)
    (first,), (second,) = arrivals.take(SECOND), arrivals.take(2 * SECOND)
    arrivals.ended(first, 6 * SECOND)
    assert arrivals.observed(second, 7 * SECOND) == 8 * SECOND
    assert arrivals.observed(second, 9 * SECOND) == 9 * SECOND


def test_an_event_loop_fits_work_between_what_is_planned() -> None:
    loop = EventLoop()
    assert loop.run(10, 5) == 15
    assert loop.run(12, 5) == 20
    assert loop.run(0, 5) == 5, "before both"
    assert loop.run(3, 10) == 30, "nothing is wide enough before"
    assert [loop.free_from(instant) for instant in (0, 7, 10, 19, 25, 30)] == [5, 7, 30, 30, 30, 30]
    assert loop.run(40, 0) == 40


@given(
    sessions=st.integers(1, 7),
    count=st.integers(1, 4),
    slots=st.integers(1, 6),
    processes=st.integers(1, 4),
    lasting=st.lists(st.sampled_from([0.5, 1.0, 3.0, 7.0]), min_size=28, max_size=28),
    token_ns=st.sampled_from([0.0, 1e5]),
)
def test_every_turn_is_sent_once_after_the_one_before_it(
    sessions: int, count: int, slots: int, processes: int, lasting: list[float], token_ns: float
) -> None:
    rows = turns(sessions, count)
    lasts = {row.id: lasting[number] for number, row in enumerate(rows)}
    sent = play(rows, slots, Pacing(processes=processes, token_ns=token_ns), lasts)
    assert sent.keys() == {row.id for row in rows}
    for name in range(sessions):
        for turn in range(1, count):
            assert sent[f"{name}.{turn}"][0] >= sent[f"{name}.{turn - 1}"][1]
    instants = sorted({start for start, _ in sent.values()})
    assert all(sum(start <= instant < end for start, end in sent.values()) <= slots for instant in instants)
