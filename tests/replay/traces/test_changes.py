"""Other speeds and parts of traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.replay.traces.support import CONVERSATION, SAMPLES, jsonl, mooncake

from kvyard.errors import KvyardError
from kvyard.replay.traces import Trace, TraceRequest, open_trace
from kvyard.replay.traces.changes import scaled, sliced, tiled, with_arrivals

MS = 1_000_000


@pytest.fixture
def talk(tmp_path: Path) -> Trace:
    """Two sessions and loose requests, interleaved."""
    return open_trace(
        jsonl(
            tmp_path / "t.jsonl",
            mooncake(0, session_id="a", request_id="a0"),
            mooncake(10, request_id="x"),
            mooncake(20, session_id="b", request_id="b0"),
            mooncake(25, session_id="a", delay=5, request_id="a1"),
            mooncake(30, request_id="y"),
            mooncake(35, session_id="b", delay=7, request_id="b1", wait_for=["a1"]),
            mooncake(40, request_id="z"),
        )
    )


def names(trace: Trace) -> list[str]:
    return [one.id for one in trace]


def test_scaled(talk: Trace) -> None:
    found = {one.id: one for one in scaled(talk, 2)}
    assert (found["y"].arrival, found["b1"].delay, found["a1"].arrival) == (15 * MS, 3.5 * MS, 12.5 * MS)
    slower = list(scaled(open_trace(CONVERSATION, limit=50), 1 / 3))
    assert [one.arrival for one in slower] == [3 * one.arrival for one in open_trace(CONVERSATION, limit=50)]
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(KvyardError, match="above 0"):
            scaled(talk, wrong)


def test_sliced_by_number(talk: Trace) -> None:
    part = sliced(talk, skip=2, first=4)
    found = {one.id: one for one in part}
    assert list(found) == ["b0", "a1", "y", "b1"]
    assert (found["b0"].arrival, found["y"].arrival) == (0, 10 * MS)
    assert (found["a1"].delay, found["a1"].arrival) == (None, 5 * MS), "nobody is left to wait for"
    assert (found["b1"].delay, found["b1"].after) == (7 * MS, ("a1",))
    assert names(part) == names(part), "as often as you like"


def test_sliced_by_time(talk: Trace) -> None:
    found = list(sliced(talk, since=15 * MS, until=30 * MS))
    assert [(one.id, one.arrival, one.delay, one.after) for one in found] == [
        ("b0", 0, None, ()),
        ("b1", 15 * MS, 7 * MS, ()),
    ]
    assert names(sliced(talk, until=15 * MS)) == ["a0", "x", "a1", "b1"]


def test_sliced_by_length(talk: Trace) -> None:
    lengths = {one.id: one.input_length + one.output_length for one in talk}
    most = sorted(lengths.values())[len(lengths) // 2]
    assert names(sliced(talk, max_tokens=most)) == [name for name, tokens in lengths.items() if tokens <= most]
    assert names(sliced(talk, min_tokens=most)) == [name for name, tokens in lengths.items() if tokens >= most]
    with pytest.raises(KvyardError, match="no request has at least 5 and at most 4 tokens"):
        sliced(talk, min_tokens=5, max_tokens=4)


def test_sliced_by_sessions(talk: Trace) -> None:
    assert names(sliced(talk, sessions=2)) == ["a0", "x", "a1"]
    assert names(sliced(talk, sessions=3)) == ["a0", "x", "b0", "a1", "b1"]
    weka = open_trace(SAMPLES / "weka_sessions.jsonl.xz")
    assert len(list(sliced(weka, sessions=1))) == 53


def test_sessions_with_clocks_of_their_own() -> None:
    weka = open_trace(SAMPLES / "weka_sessions.jsonl.xz")
    first = next(iter(sliced(weka, skip=30)))
    assert (first.arrival, first.delay, first.after) == (0, None, ())
    with pytest.raises(KvyardError, match="slice it by sessions or requests"):
        sliced(weka, since=5)


@pytest.mark.parametrize(
    "wrong", [{"skip": -1}, {"first": 0}, {"since": -1}, {"sessions": 0}, {"since": 5, "until": 5}, {"until": 0}]
)
def test_parts_that_make_no_sense(talk: Trace, wrong: dict[str, int]) -> None:
    with pytest.raises(KvyardError):
        sliced(talk, **wrong)


def test_an_empty_part_says_so(talk: Trace) -> None:
    with pytest.raises(KvyardError, match="no requests in it"):
        list(sliced(talk, skip=100))


def test_changes_pass_on_what_was_skipped(tmp_path: Path) -> None:
    trace = scaled(open_trace(jsonl(tmp_path / "t.jsonl", mooncake(0), mooncake(1, -5)), skip_bad=True), 2)
    assert len(list(trace)) == 1
    assert trace.tally.skipped == 1


def test_arrivals_drawn_anew(talk: Trace) -> None:
    found = list(with_arrivals(talk, "constant:4"))
    heads = [one for one in found if one.delay is None]
    assert [one.arrival for one in heads] == [250 * MS * i for i in range(5)]
    assert [(one.delay, one.after) for one in found] == [(one.delay, one.after) for one in talk]
    assert list(with_arrivals(talk, "poisson:1")) == list(with_arrivals(talk, "poisson:1"))
    assert list(with_arrivals(talk, "poisson:1")) != list(with_arrivals(talk, "poisson:1", seed=1))
    weka = with_arrivals(open_trace(SAMPLES / "weka_sessions.jsonl.xz"), "poisson:1")
    assert not weka.grouped
    with pytest.raises(KvyardError, match="unknown law 'never'"):
        with_arrivals(talk, "never")


def test_tiled(talk: Trace) -> None:
    rows = list(talk)
    found = list(tiled(talk, 3))
    assert found[: len(rows)] == rows
    assert len({one.id for one in found}) == len(found) == 3 * len(rows)
    arrivals = [one.arrival for one in found if one.delay is None]
    assert arrivals == sorted(arrivals)
    second = found[len(rows) : 2 * len(rows)]
    for before, after in zip(rows, second, strict=True):
        assert (before.input_length, before.output_length) == (after.input_length, after.output_length)
        assert set(before.ids or ()).isdisjoint(after.ids or ())
        assert len(before.ids or ()) == len(after.ids or ())
        assert after.session is None or after.session.startswith(before.session or "")
    shared = [[one.ids[0] == two.ids[0] for one in rows for two in rows if one.ids and two.ids], []]
    shared[1] = [one.ids[0] == two.ids[0] for one in second for two in second if one.ids and two.ids]
    assert shared[0] == shared[1]


def test_copies_of_ids_that_are_hashes_have_64_bits_too() -> None:
    top = (1 << 64) - 1
    one = TraceRequest("a", 0, 1000, 1, ids=[top, top - 1], id_block_size=512)
    ids = [id_ for copy in tiled(Trace("hashes", "", lambda tally: iter([one])), 3) for id_ in copy.ids or ()]
    assert len(set(ids)) == 6 and max(ids) == top


def test_copies_that_make_no_sense(talk: Trace) -> None:
    with pytest.raises(KvyardError, match="1 time or more"):
        tiled(talk, 0)
