"""Lanes: the deadline is fixed at submission, and nothing that happens later moves it."""

from __future__ import annotations

import pytest

from kvyard.clock import ClockError
from kvyard.tiers.links import Direction, LaneConfig, Link, LinkConfig, make_link

GB = 10**9
OUT, IN = Direction.OUT, Direction.IN


def fifo(bandwidth: int | None = GB, **lane: int) -> Link:
    both = LaneConfig(bandwidth=bandwidth, **lane)
    return make_link(LinkConfig(discipline="fifo", outward=both, inward=both))


def test_one_after_the_other() -> None:
    link = fifo(first_byte_ns=10)
    a, b = link.submit(0, OUT, 100), link.submit(0, OUT, 50)
    assert link.earliest() == 110
    c = link.submit(200, OUT, 10)
    assert link.advance(1000) == [a, b, c]
    assert [(t.started, t.ended, t.queued) for t in (a, b, c)] == [(10, 110, 0), (110, 160, 100), (210, 220, 0)]
    assert link.stats(OUT).busy_ns == 160
    assert link.stats(OUT).queued_ns == 100


def test_the_head_holds_up_the_lane_but_not_the_other() -> None:
    link = fifo()
    a = link.submit(0, OUT, 600)
    b = link.submit(0, OUT, 100)
    c = link.submit(0, IN, 100)
    assert link.advance(1000) == [c, a, b]
    assert [t.ended for t in (a, b, c)] == [600, 700, 100]


def test_cancelling_never_shortens_a_lane() -> None:
    link = fifo()
    a, b, c = (link.submit(0, OUT, 100) for _ in range(3))
    assert link.cancel(50, a)
    assert link.cancel(50, b)
    assert (a.started, a.ended) == (0, 50)
    assert (b.started, b.ended) == (None, 50)
    assert link.earliest() == 300
    link.check_integrity()
    assert link.advance(250) == []
    assert link.stats(OUT).bytes == 200  # they passed all the same
    assert link.stats(OUT).busy_ns == 250
    assert link.advance(300) == [c]
    assert link.cancel(300, c) is False
    assert link.cancel(300, a) is False
    assert link.stats(OUT).cancelled == 2
    assert link.earliest() is None


def test_fractions_of_a_nanosecond_add_up() -> None:
    link = fifo(bandwidth=3 * GB)
    small = [link.submit(0, OUT, 1) for _ in range(3000)]
    whole = link.submit(0, IN, 3000)
    link.advance(10**6)
    assert small[-1].ended == whole.ended == 1000
    assert [t.ended for t in small[:4]] == [1, 1, 1, 2]


def test_without_a_bandwidth_only_order_is_left() -> None:
    link = fifo(bandwidth=None, first_byte_ns=5)
    a = link.submit(50, OUT, 10**12)
    b = link.submit(50, OUT, 10**12)
    assert link.advance(54) == []
    assert link.advance(55) == [a, b]
    assert link.stats(OUT).busy_ns == 0


def test_pieces_and_equal_instants() -> None:
    link = fifo(piece_overhead=10)
    a = link.submit(0, IN, 80, pieces=2)
    b = link.submit(0, OUT, 90)
    assert link.advance(100) == [a, b]
    assert (a.ended, b.ended) == (100, 100)


def test_past_landings_are_due_at_once() -> None:
    link = fifo()
    a = link.submit(0, OUT, 10)
    link.submit(50, OUT, 10)
    assert link.earliest() == 50
    assert link.advance(50) == [a]
    with pytest.raises(ClockError, match="50 ns, not 49 ns"):
        link.advance(49)
