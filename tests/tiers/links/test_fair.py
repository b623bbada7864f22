"""Closed forms: what lands when, worked out by hand. Bandwidths are in bytes per nanosecond, written as ``n * GB``."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvyard.clock import ClockError
from kvyard.tiers.links import Direction, LaneConfig, Link, LinkConfig, Transfer, make_link
from kvyard.tiers.links.fair import FairLink, FairTransfer
from kvyard.tiers.links.link import LinkError

GB = 10**9
OUT, IN = Direction.OUT, Direction.IN


def fair(bandwidth: int | None = GB, duplex: int | None = None, **lane: int) -> Link:
    both = LaneConfig(bandwidth=bandwidth, **lane)
    return make_link(LinkConfig(outward=both, inward=both, duplex_bandwidth=duplex))


def finish(link: Link) -> list[Transfer]:
    """Run to the end, each landing when the link said it would be."""
    landed: list[Transfer] = []
    while (then := link.earliest()) is not None:
        link.check_integrity()
        now = link.advance(then)
        assert now
        assert all(transfer.ended == then for transfer in now)
        landed += now
    link.check_integrity()
    return landed


def ends(*transfers: Transfer) -> list[int | None]:
    return [transfer.ended for transfer in transfers]


def test_one_transfer_takes_its_bytes_over_the_bandwidth() -> None:
    link = fair()
    a = link.submit(50, OUT, 1000)
    assert link.earliest() == 1050
    assert link.advance(1049) == []
    assert a.ended is None
    assert link.advance(1050) == [a]
    assert (a.started, a.ended, a.queued) == (50, 1050, 0)
    assert link.earliest() is None


def test_an_end_is_the_first_nanosecond_at_which_all_bytes_have_moved() -> None:
    link = fair(bandwidth=3 * GB)
    a = link.submit(0, OUT, 10)  # 3 1/3 ns
    b = link.submit(0, IN, 9)
    finish(link)
    assert ends(a, b) == [4, 3]


def test_two_overlapping_transfers() -> None:
    link = fair()
    a = link.submit(0, OUT, 300)
    b = link.submit(100, OUT, 100)
    # a alone for 100 ns; then both at a half: b takes 200 ns, a has 100 of its 200 left.
    assert finish(link) == [b, a]
    assert ends(a, b) == [400, 300]
    assert (a.queued, b.queued) == (100, 100)


def test_three_overlapping_transfers_of_different_sizes() -> None:
    link = fair()
    a, b, c = (link.submit(0, OUT, n) for n in (600, 300, 90))
    # Thirds until c is through at 270; halves until b is, which then has 210 left, at 690; a has 300 left.
    finish(link)
    assert ends(a, b, c) == [990, 690, 270]
    assert link.stats(OUT).busy_ns == 990
    assert link.stats(OUT).bytes == 990


def test_three_that_arrive_one_after_the_other() -> None:
    link = fair(bandwidth=6 * GB)
    a = link.submit(0, IN, 1200)
    b = link.submit(50, IN, 600)
    c = link.submit(100, IN, 300)
    # a: 300 by 50, 450 by 100, then thirds of 6 = 2 B/ns. c is through at 250, when a has 450 and b 150 left of it;
    # b at 300, with a at 3 B/ns, has moved all; a has 300 left at 6 B/ns.
    finish(link)
    assert ends(a, b, c) == [350, 300, 250]


def test_a_client_cap_leaves_the_rest_to_others() -> None:
    link = fair(bandwidth=10 * GB, client_bandwidth=6 * GB)
    a = link.submit(0, OUT, 600, client="x")
    b = link.submit(0, OUT, 300, client="x")
    c = link.submit(0, OUT, 400, client="y")
    # A third of 10 each would give x 6 2/3, more than its cap: a and b get 3 each, c the other 4. Until 100, when b and c
    # are through; a then has 300 left at its client's 6 B/ns.
    finish(link)
    assert ends(a, b, c) == [150, 100, 100]


def test_a_capped_client_alone_stays_below_the_link() -> None:
    link = fair(bandwidth=10 * GB, client_bandwidth=4 * GB)
    a = link.submit(0, OUT, 400, client="x")
    b = link.submit(0, IN, 400, client="x")  # its cap is for each direction
    finish(link)
    assert ends(a, b) == [100, 100]


def test_a_client_cap_on_an_unlimited_link() -> None:
    link = fair(bandwidth=None, client_bandwidth=2 * GB)
    a = link.submit(0, OUT, 200, client="x")
    b = link.submit(0, OUT, 200, client="y")
    finish(link)
    assert ends(a, b) == [100, 100]


def test_first_byte_latency_uses_no_bandwidth() -> None:
    link = fair(first_byte_ns=40)
    a = link.submit(0, OUT, 100)
    b = link.submit(60, OUT, 100)
    assert link.earliest() == 140 + 40  # b slows a down from 100 on, before anything lands
    finish(link)
    # a moves from 40, alone until 100, when 40 are left: halves until 180; b then has 60 left.
    assert ends(a, b) == [180, 240]
    assert (a.started, b.started) == (40, 100)
    assert link.stats(OUT).busy_ns == 200


def test_cancelling_mid_way_gives_its_share_to_the_others() -> None:
    link = fair()
    a = link.submit(0, OUT, 400)
    b = link.submit(0, OUT, 400)
    assert link.cancel(200, b) is True
    # Both have moved 100; a moves its other 300 alone.
    assert finish(link) == [a]
    assert ends(a, b) == [500, 200]
    assert b.cancelled
    assert not a.cancelled
    stats = link.stats(OUT)
    assert (stats.landed, stats.cancelled, stats.bytes, stats.busy_ns) == (1, 1, 500, 500)
    assert link.cancel(600, b) is False


def test_cancelling_one_that_waits() -> None:
    link = fair(first_byte_ns=100)
    a, c, b = (link.submit(n, OUT, 100) for n in (0, 10, 20))
    assert link.cancel(50, c)
    assert (c.started, c.ended) == (None, 50)
    finish(link)
    # a moves from 100, alone until 120, when 80 are left: halves until 280; b then has 20 left.
    assert ends(a, b) == [280, 300]
    assert link.stats(OUT).bytes == 200


def test_a_landed_transfer_cannot_be_cancelled() -> None:
    link = fair()
    a = link.submit(0, OUT, 100)
    assert link.cancel(100, a) is False  # lands at this very instant
    assert not a.cancelled
    assert link.earliest() == 100  # due at once
    assert link.advance(100) == [a]


def test_directions_without_coupling_leave_each_other_alone() -> None:
    link = fair()
    a, b = link.submit(0, OUT, 100), link.submit(0, IN, 100)
    assert finish(link) == [a, b]
    assert ends(a, b) == [100, 100]


def test_both_directions_under_one_limit() -> None:
    link = fair(bandwidth=5 * GB, duplex=6 * GB)
    a = link.submit(0, OUT, 600)
    b = link.submit(0, IN, 300)
    # 3 B/ns each until b is through at 100; a has 300 left at 5 B/ns.
    finish(link)
    assert ends(a, b) == [160, 100]


def test_the_limit_of_both_directions_is_shared_by_transfer() -> None:
    link = fair(bandwidth=5 * GB, duplex=9 * GB)
    a = link.submit(0, OUT, 500)
    b, c = link.submit(0, IN, 250), link.submit(0, IN, 250)
    # Thirds of 9 would be 6 inwards, more than 5: b and c get 2.5 each, a the other 4. At 100 b and c are through.
    finish(link)
    assert ends(a, b, c) == [120, 100, 100]
    link = fair(bandwidth=50 * GB, duplex=9 * GB)
    a = link.submit(0, OUT, 300)
    b, c = link.submit(0, IN, 300), link.submit(0, IN, 300)
    finish(link)
    assert ends(a, b, c) == [100, 100, 100]


def test_pieces_cost_what_their_overhead_says() -> None:
    link = fair(piece_overhead=10)
    a = link.submit(0, OUT, 100)
    b = link.submit(0, IN, 100, pieces=5)
    finish(link)
    assert ends(a, b) == [110, 150]
    assert link.stats(IN).bytes == 100


def test_unlimited_links_land_with_the_first_byte() -> None:
    link = fair(bandwidth=None, first_byte_ns=7)
    a, b = link.submit(0, OUT, 10**15), link.submit(3, OUT, 1)
    assert link.earliest() == 7
    assert finish(link) == [a, b]
    assert ends(a, b) == [7, 10]
    assert link.stats(OUT).busy_ns == 0


def test_no_bytes_land_with_the_first_byte() -> None:
    link = fair(first_byte_ns=5)
    big = link.submit(0, OUT, 100)
    none = link.submit(0, OUT, 0)
    assert link.earliest() == 5
    assert link.advance(5) == [none]
    assert link.earliest() == 105
    assert link.advance(105) == [big]


def test_equal_instants_are_ordered_by_number() -> None:
    link = fair(first_byte_ns=10)
    a, b, c = link.submit(0, IN, 45), link.submit(0, OUT, 90), link.submit(0, IN, 45)
    late = link.submit(90, IN, 0)
    assert link.advance(200) == [a, b, c, late]
    assert {t.ended for t in (late, a, b, c)} == {100}


def test_past_landings_are_reported_once() -> None:
    link = fair()
    a = link.submit(0, OUT, 10)
    b = link.submit(50, OUT, 10)  # somebody else submits: a has landed, but nobody asked
    assert a.ended == 10
    assert link.earliest() == 50
    assert link.advance(50) == [a]
    assert link.earliest() == 60
    assert link.advance(60) == [b]
    assert link.advance(60) == []


def test_large_times_and_sizes_stay_exact() -> None:
    start = 10**18 + 7  # where a float's step is 128 ns
    link = fair(bandwidth=52_000_000_001)
    a = link.submit(start, OUT, 10**13 + 1)
    b = link.submit(start, OUT, 10**13)
    finish(link)
    # Halves until b is through, after 384,615,384,607.988... ns; a then lacks seven tenths of a byte.
    assert ends(a, b) == [start + 384_615_384_609, start + 384_615_384_608]


def test_time_never_goes_back() -> None:
    link = fair()
    a = link.submit(100, OUT, 10)
    for verb in (lambda: link.advance(99), lambda: link.submit(99, OUT, 1), lambda: link.cancel(99, a)):
        with pytest.raises(ClockError, match="100 ns, not 99 ns"):
            verb()
    link.check_integrity()
    assert link.stats(OUT).submitted == 1
    assert link.advance(110) == [a]


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_wrong_arguments_change_nothing(discipline: str) -> None:
    link = make_link(LinkConfig(discipline=discipline, outward=LaneConfig(bandwidth=GB)))
    link.submit(0, OUT, 10)
    with pytest.raises(LinkError, match="nbytes must not be negative, got -1"):
        link.submit(50, OUT, -1)
    with pytest.raises(LinkError, match="pieces must be 1 or more, got 0"):
        link.submit(50, OUT, 1, pieces=0)
    for way in (2, -1):
        with pytest.raises(LinkError, match="direction must be"):
            link.submit(50, way, 1)
    with pytest.raises((LinkError, TypeError)):  # what is compiled refuses what is no number before it looks at it
        link.submit(50, "out", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        link.submit(50, OUT, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        link.submit(50.0, OUT, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        link.advance(50.5)  # type: ignore[arg-type]
    assert link.earliest() == 10
    other = make_link(link.config)
    foreign = other.submit(0, OUT, 10)
    with pytest.raises(LinkError, match="not a transfer of this link"):
        link.cancel(0, foreign)
    assert link.stats(OUT).submitted == 1
    link.check_integrity()


@pytest.mark.parametrize(
    ("factor", "message"), [(2, "I7: .* which has"), (Fraction(1, 2), "I7: a transfer at .* could move faster")]
)
def test_the_check_sees_wrong_shares(factor: int | Fraction, message: str) -> None:
    link = FairLink(LinkConfig(outward=LaneConfig(bandwidth=6 * GB)))
    flows = [link.submit(0, OUT, 1000) for _ in range(3)]
    link.advance(10)
    link.check_integrity()
    assert isinstance(flows[1], FairTransfer)
    flows[1].step = int(flows[1].step * factor)
    with pytest.raises(AssertionError, match=message):
        link.check_integrity()


def test_the_check_sees_a_lost_transfer() -> None:
    link = FairLink(LinkConfig(outward=LaneConfig(bandwidth=GB)))
    link.submit(0, OUT, 1000)
    link.advance(10)
    link._moving.clear()
    with pytest.raises(AssertionError, match="a transfer is lost"):
        link.check_integrity()
