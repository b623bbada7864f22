"""Both disciplines under random use, against the oracles of ``fluid.py``; I7 on what a link says it has moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.tiers.links.fluid import NS, Job, NanoModel, fluid_ends, shares

from kvyard.tiers.links import Direction, LaneConfig, LinkConfig, Transfer, make_link
from kvyard.tiers.links.fair import FairLink
from kvyard.tiers.links.sharing import ClientGroup, fill

GB = 10**9
# Whole bytes per nanosecond make instants coincide, the others make fractions.
bandwidths = st.sampled_from([1, 2, 3, 4, 6, 12]).map(lambda n: n * GB) | st.integers(GB // 3, 13 * GB)
limits = st.none() | bandwidths
DONE = 1000  # every step and size below is over by then


@st.composite
def configs(draw: st.DrawFn, finite: bool = False) -> LinkConfig:
    duplex = draw(limits)
    lanes = [
        LaneConfig(
            bandwidth=draw(bandwidths if finite else limits),
            client_bandwidth=draw(limits),
            first_byte_ns=draw(st.sampled_from([0, 0, 1, 7])),
        )
        for _ in Direction
    ]
    for i, lane in enumerate(lanes):
        if lane.bandwidth or lane.client_bandwidth or duplex:
            fields = {"piece_overhead": draw(st.sampled_from([0, 0, 3]))}
            lanes[i] = LaneConfig(**{f: getattr(lane, f) for f in lane.__struct_fields__} | fields)
    return LinkConfig(outward=lanes[0], inward=lanes[1], duplex_bandwidth=duplex)


class Submit(NamedTuple):
    way: Direction
    nbytes: int
    client: str
    pieces: int


submissions = st.builds(
    Submit,
    st.sampled_from(Direction),
    st.integers(0, 40) | st.sampled_from([12, 24]),
    st.sampled_from("xyz"),
    st.integers(1, 3),
)
# An operation: let time pass, then submit, or cancel the n-th transfer, or only look.
steps = st.tuples(st.sampled_from([0, 0, 1, 2, 3, 10]), submissions | st.integers(0, 10) | st.none())
scenarios = st.lists(steps, min_size=1, max_size=14)


def seen(transfers: list[Any]) -> list[tuple[int | None, bool]]:
    return [(transfer.ended, transfer.cancelled) for transfer in transfers]


def play(link: Any, scenario: list[Any], looks: int | None) -> tuple[list[Transfer], list[Transfer]]:
    """Run a scenario; return all transfers and those reported. ``looks``: advance in steps of so many ns; else in jumps."""
    now = 0
    made: list[Transfer] = []
    reported: list[Transfer] = []

    def pass_time(until: int) -> None:
        nonlocal now
        while looks is not None and now + looks < until:
            now += looks
            reported.extend(link.advance(now))
            link.earliest()
            link.check_integrity()
        now = until

    for passes, step in scenario:
        pass_time(now + passes)
        if isinstance(step, Submit):
            made.append(link.submit(now, *step))
        elif step is not None and step < len(made):
            link.cancel(now, made[step])
        if looks is not None:
            reported.extend(link.advance(now))
            link.check_integrity()
    pass_time(DONE)
    reported.extend(link.advance(DONE))
    link.check_integrity()
    return made, reported


@given(configs(), scenarios)
def test_fair_is_what_happens_nanosecond_by_nanosecond(config: LinkConfig, scenario: list[Any]) -> None:
    link, model = make_link(config), NanoModel(config)
    made: list[Transfer] = []
    for passes, step in scenario:
        model.advance(model.now + passes)
        if isinstance(step, Submit):
            made.append(link.submit(model.now, *step))
            model.submit(*step)
        elif step is not None and step < len(made):
            link.cancel(model.now, made[step])
            model.cancel(model.jobs[step])
        link.earliest()
        link.check_integrity()
    landings: list[Transfer] = []
    while (then := link.earliest()) is not None:
        then = max(then, model.now)  # the model may be ahead, where the last steps didn't tell the link the time
        landings += link.advance(then)
        link.check_integrity()
        model.advance(then)
        assert seen(made) == seen(model.jobs)  # so nothing landed later than it said, nor earlier
    model.advance(DONE)
    assert seen(made) == seen(model.jobs)
    assert all(job.ended is not None for job in model.jobs)
    keys = [(transfer.ended, transfer.number) for transfer in landings]
    assert keys == sorted(keys)
    assert {transfer.number for transfer in landings} == {t.number for t in made if not t.cancelled}
    event(f"{len(landings)} landed")


@given(configs(), scenarios, st.sampled_from([1, 2, 3, 5, 17]))
def test_fair_lands_the_same_however_often_one_looks(config: LinkConfig, scenario: list[Any], looks: int) -> None:
    jump, look = make_link(config), make_link(config)
    made, reported = play(jump, scenario, None)
    again, reported_again = play(look, scenario, looks)
    assert seen(made) == seen(again)
    assert [t.number for t in reported] == [t.number for t in reported_again]
    assert [(t.started, t.queued) for t in made] == [(t.started, t.queued) for t in again]
    assert all(t.queued >= 0 for t in made)
    for way in Direction:
        assert jump.stats(way) == look.stats(way)


@given(configs(), scenarios)
def test_i7_no_more_than_the_bandwidth_and_none_of_it_idle(config: LinkConfig, scenario: list[Any]) -> None:
    """In each nanosecond, hence in any interval: no limit is exceeded, and whoever could move faster has a full limit."""
    link = FairLink(config)
    now = 0
    made: list[Any] = []
    plan: dict[int, list[Any]] = defaultdict(list)
    for passes, step in scenario:
        now += passes
        plan[now].append(step)
    for now in range(200):
        link.advance(now)
        for step in plan[now]:
            if isinstance(step, Submit):
                made.append(link.submit(now, *step))
            elif step is not None and step < len(made):
                link.cancel(now, made[step])
        link.advance(now)
        before = {t: left_of(link, t) for t in made if t.ended is None and t.started <= now}
        link.advance(now + 1)
        used: dict[Hashable, Fraction] = defaultdict(Fraction)
        ended: set[Hashable] = set()
        moved = {}
        for transfer, left in before.items():
            now_left = left_of(link, transfer) if transfer.ended is None else Fraction(0)
            moved[transfer] = left - now_left
            for limit in limits_of(transfer, config):
                used[limit] += moved[transfer]
                if transfer.ended is not None:
                    ended.add(limit)
        for transfer in before:
            mine = limits_of(transfer, config)
            assert all(used[name] <= limit * NS for name, limit in mine.items())
            if transfer.ended is None:
                # Full, or full until somebody under it had nothing left to move within this nanosecond.
                assert any(used[name] == limit * NS or name in ended for name, limit in mine.items())
                # Max-min: of a limit that is full, nobody else got more.
                full = [name for name, limit in mine.items() if used[name] == limit * NS]
                assert (
                    any(
                        all(moved[t] <= moved[transfer] for t in before if name in limits_of(t, config))
                        for name in full
                    )
                    or ended
                )


def left_of(link: FairLink, transfer: Any) -> Fraction:
    """Bytes that have still to move, by the link's own account."""
    passed = max(0, link._now - link._at) if transfer.step else 0
    return Fraction(transfer.left - transfer.step * passed, transfer.scale * 10**9)


def limits_of(transfer: Transfer, config: LinkConfig) -> dict[Hashable, int]:
    return Job(config, 0, transfer.direction, 0, transfer.client, 1).limits(config)


@given(configs(finite=True), st.lists(submissions, min_size=1, max_size=6))
def test_fair_is_within_a_nanosecond_per_landing_of_continuous_time(config: LinkConfig, given_: list[Submit]) -> None:
    """Shares change at whole nanoseconds. What that costs is less than a nanosecond for each that lands before."""
    link = make_link(config)
    made = [link.submit(0, *submission) for submission in given_]
    link.advance(DONE)
    for way in Direction:
        # Only where nobody starts while others move: a later start would stretch what was lost.
        if config.lanes[way].first_byte_ns != config.outward.first_byte_ns:
            return
    exact = fluid_ends([Job(config, 0, *submission) for submission in given_], config)
    order = sorted(exact)
    for transfer, end in zip(made, exact, strict=False):
        assert transfer.ended is not None
        assert ceil(end) <= transfer.ended <= ceil(end) + order.index(end)


@given(configs(finite=True), st.lists(submissions, min_size=1, max_size=8))
def test_fill_is_progressive_filling(config: LinkConfig, given_: list[Submit]) -> None:
    jobs = [Job(config, 0, *submission) for submission in given_]
    expected = shares(jobs, config)
    groups: list[dict[str, ClientGroup[Job]]] = [{}, {}]
    for job in jobs:
        cap = config.lanes[job.way].client_bandwidth
        key = job.client if cap is not None else ""
        groups[job.way].setdefault(key, ClientGroup(key, cap)).members.append(job)
    fill(
        [(lane.bandwidth, list(g.values())) for lane, g in zip(config.lanes, groups, strict=False)],
        config.duplex_bandwidth,
    )
    for named in groups:
        for group in named.values():
            for job in group.members:
                assert Fraction(group.num, group.den) == expected[job]


def queue(config: LinkConfig, scenario: list[Any]) -> tuple[list[tuple[int | None, bool]], list[int]]:
    """A fifo link by its formula, with fractions."""
    tails: dict[Direction, Fraction] = defaultdict(Fraction)
    now = 0
    jobs: list[tuple[int, bool]] = []
    for passes, step in scenario:
        now += passes
        if isinstance(step, Submit):
            lane = config.lanes[step.way]
            ready = now + lane.first_byte_ns
            tail = max(tails[step.way], Fraction(ready))
            if lane.bandwidth is not None:
                tail += (step.nbytes + step.pieces * lane.piece_overhead) / (lane.bandwidth * NS)
            tails[step.way] = tail
            jobs.append((ceil(tail), False))
        elif step is not None and step < len(jobs) and not jobs[step][1] and jobs[step][0] > now:
            jobs[step] = (now, True)
    order = sorted(range(len(jobs)), key=lambda n: (jobs[n][0], n))
    return list(jobs), [n for n in order if not jobs[n][1]]


@given(configs(), scenarios, st.sampled_from([None, 1, 3]))
def test_fifo_is_its_formula(config: LinkConfig, scenario: list[Any], looks: int | None) -> None:
    lanes = []
    for lane in config.lanes:
        overhead = lane.piece_overhead if lane.bandwidth else 0
        lanes.append(LaneConfig(bandwidth=lane.bandwidth, first_byte_ns=lane.first_byte_ns, piece_overhead=overhead))
    config = LinkConfig(discipline="fifo", outward=lanes[0], inward=lanes[1])
    made, reported = play(make_link(config), scenario, looks)
    ends, order = queue(config, scenario)
    assert seen(made) == ends
    assert [t.number for t in reported] == order
    assert all(t.queued >= 0 for t in made)


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_a_long_busy_time_ends_no_later_than_its_bytes_need(discipline: str) -> None:
    """A thousand transfers back to back: the bandwidth lost at landings is less than a nanosecond each, in fifo none."""
    lane = LaneConfig(bandwidth=7 * GB // 3)
    link = make_link(LinkConfig(discipline=discipline, outward=lane))
    sizes = [1 + 37 * n % 101 for n in range(1000)]
    for n, size in enumerate(sizes):
        link.submit(n // 7, Direction.OUT, size)
    link.advance(10**6)
    need = -(-sum(sizes) * 10**9 // (7 * GB // 3))
    stats = link.stats(Direction.OUT)
    assert stats.landed == 1000
    assert stats.bytes == sum(sizes)
    if discipline == "fifo":
        assert need - 1 <= stats.busy_ns <= need
    else:
        assert need <= stats.busy_ns < need + 101  # as many instants as there are sizes, at most
