"""Flows through shared ports: closed forms, a slow model that moves nanosecond by nanosecond, and what never changes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.blocks.spec import ConfigError
from kvyard.clock import ClockError
from kvyard.tiers.network import Flow, Network

GB = 10**9
MS = 10**6


def network(latency: int = 0, *, shared: bool = True, **limits: int | None) -> Network:
    made = Network(latency, shared=shared)
    for port, limit in limits.items():
        made.add_port(port, limit)
    return made


def run(made: Network) -> dict[int, int]:
    """Number and landing of all flows, by instants as the network names them."""
    landed = {}
    while (at := made.earliest()) is not None:
        for flow in made.advance(at):
            assert flow.ended is not None
            landed[flow.number] = flow.ended
        made.check_integrity()
    return landed


def test_one_flow_takes_its_bytes_over_the_narrowest_port():
    made = network(out=50 * GB, into=25 * GB)
    flow = made.submit(0, ("out", "into"), GB)
    assert run(made) == {0: 40 * MS}
    assert flow.queued == 0
    assert made.busy_ns("out") == 40 * MS and made.ports["into"].bytes == GB


def test_two_hand_overs_on_one_nic_each_have_half():
    made = network(out=50 * GB, a=50 * GB, b=50 * GB)
    flows = [made.submit(0, ("out", "a"), GB), made.submit(0, ("out", "b"), GB)]
    assert run(made) == {0: 40 * MS, 1: 40 * MS}
    assert [flow.queued for flow in flows] == [20 * MS, 20 * MS]


def test_a_second_one_that_comes_later_slows_what_is_left_of_the_first():
    made = network(out=50 * GB)
    made.submit(0, ("out",), GB)  # 20 ms alone
    made.submit(10 * MS, ("out",), GB)  # half of the first is left: both at 25 GB/s
    assert run(made) == {0: 30 * MS, 1: 40 * MS}


def test_three_of_different_size_land_one_after_the_other():
    """On 60 GB/s: 20 each until 1 GB is there, 30 each for the next 1.5 GB, then all 60 for the last 0.6 GB."""
    made = network(out=60 * GB)
    for size in (1000, 2500, 3100):
        made.submit(0, ("out",), size * MS)
    assert run(made) == {0: 50 * MS, 1: 100 * MS, 2: 110 * MS}


def test_a_flow_limited_elsewhere_leaves_its_share_to_others():
    """a to c and a to d share the way out of a, b to c the way into c: the classic of max-min fairness."""
    made = network(a=90 * GB, b=90 * GB, c=30 * GB, d=90 * GB)
    first, second, third = (made.submit(0, ports, 100 * GB) for ports in (("a", "c"), ("a", "d"), ("b", "c")))
    assert (first.rate, second.rate, third.rate) == (15 * GB, 75 * GB, 15 * GB)


def test_latency_passes_without_using_the_port():
    made = network(latency=10_000, out=50 * GB)
    made.submit(0, ("out",), GB)
    made.submit(5_000, ("out",), 0)  # lands in the middle, with nothing to move
    assert run(made) == {1: 15_000, 0: 20 * MS + 10_000}


def test_a_flow_without_a_limit_lands_at_once():
    made = network(out=None)
    assert not made.takes_time(("out",))
    made.submit(7, ("out",), GB)
    assert run(made) == {0: 7}


def test_not_shared_each_has_the_port_to_itself():
    made = network(shared=False, out=50 * GB)
    for _ in range(3):
        made.submit(0, ("out",), GB)
    assert run(made) == {0: 20 * MS, 1: 20 * MS, 2: 20 * MS}


def test_a_cancelled_flow_gives_its_share_back():
    made = network(out=50 * GB)
    kept, given_up = made.submit(0, ("out",), GB), made.submit(0, ("out",), GB)
    assert made.cancel(20 * MS, given_up)
    assert not made.cancel(20 * MS, given_up)
    assert run(made) == {kept.number: 30 * MS}  # half is left after 20 ms
    assert not given_up.landed
    waiting = network(latency=100, out=GB)
    assert waiting.cancel(50, waiting.submit(0, ("out",), 10))
    assert waiting.earliest() is None


def test_refusals():
    with pytest.raises(ConfigError, match="the bandwidth of out must be more than 0"):
        network(out=0)
    with pytest.raises(ConfigError, match="latency of a network must not be negative"):
        Network(-1)
    made = network(out=1)
    made.advance(5)
    with pytest.raises(ClockError, match="at 5 ns, not 4"):
        made.submit(4, ("out",), 1)


# -- against a slow model ---------------------------------------------------------------------------------------------

PORTS = {"a": 7, "b": 3, "c": 11, "d": None}


def slow(flows: list[tuple[int, tuple[str, ...], int]]) -> dict[int, int]:
    """Landings by stepping from event to event, with shares found by raising all rates alike in tiny exact steps."""
    left = {number: Fraction(size) for number, (_, _, size) in enumerate(flows)}
    landed: dict[int, int] = {}
    now = 0
    while len(landed) < len(flows):
        moving = [n for n, (start, _, _) in enumerate(flows) if start <= now and n not in landed]
        for number in list(moving):
            if left[number] <= 0 or all(PORTS[port] is None for port in flows[number][1]):
                landed[number] = now
                moving.remove(number)
        rates = dict.fromkeys(moving, Fraction(0))
        rising = set(moving)
        while rising:
            room = []
            for port, limit in PORTS.items():
                users = [n for n in rising if port in flows[n][1]]
                if limit is not None and users:
                    used = sum(rates[n] for n in moving if port in flows[n][1])
                    room.append(((limit * GB - used) / len(users), port))
            step, full = min(room)
            for number in rising:
                rates[number] += step
            rising -= {n for n in rising if full in flows[n][1]}
        starts = [start for start, _, _ in flows if start > now]
        ends = [now - (-left[n] * GB // rates[n]) for n in moving]
        if not starts and not ends:
            continue
        then = min([*starts, *ends])
        for number in moving:
            left[number] -= rates[number] * (then - now) / GB
        now = then
    return landed


@st.composite
def traffic(draw):
    count = draw(st.integers(1, 7))
    return [
        (
            draw(st.integers(0, 40)),
            tuple(draw(st.sets(st.sampled_from(sorted(PORTS)), min_size=1, max_size=3))),
            draw(st.integers(0, 300)),
        )
        for _ in range(count)
    ]


@settings(max_examples=60)
@given(traffic(), st.lists(st.integers(0, 60), max_size=6))
def test_landings_equal_a_slow_model_for_any_sequence_of_advances(flows, told):
    """Submissions in order of time, with time told in between: the landings are the same."""
    made = Network()
    for port, limit in PORTS.items():
        made.add_port(port, None if limit is None else limit * GB)
    order = sorted(range(len(flows)), key=lambda n: (flows[n][0], n))
    numbers: dict[int, int] = {}
    found: dict[int, int] = {}

    def note(landed: list[Flow]) -> None:
        for flow in landed:
            assert flow.ended is not None
            found[numbers[flow.number]] = flow.ended

    moments = sorted([(flows[n][0], 1, n) for n in order] + [(at, 0, -1) for at in told])
    for at, kind, n in moments:
        note(made.advance(at))
        if kind:
            flow = made.submit(at, flows[n][1], flows[n][2])
            numbers[flow.number] = n
        made.check_integrity()
    while (at := made.earliest()) is not None:
        note(made.advance(at))
    assert found == slow(flows)
