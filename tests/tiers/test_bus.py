"""A bus that offloading shares with other traffic of the device: closed forms, and a fair link where nothing else moves."""

from __future__ import annotations

from random import Random

import pytest

from kvyard.blocks.spec import ConfigError
from kvyard.tiers.bus import BusLink
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.links import Direction, LaneConfig, LinkConfig, make_link
from kvyard.tiers.network import Flow, Network

LANE = LaneConfig(bandwidth=10**9)


class Bus:
    """A worker's link to its host and its way to another worker; a byte takes a nanosecond everywhere but where it says so."""

    def __init__(self, nic: int | None = 10**9, bus: int = 10**9, link: LinkConfig | None = None) -> None:
        self.fabric = Fabric(Network(), (nic, nic), bus_speeds=(bus, bus))
        for worker in (0, 1):
            self.fabric.join(worker)
        self.heard: list[int] = []
        self.link = BusLink(link or LinkConfig(outward=LANE, inward=LANE), self.fabric, 0, 0, self.heard.append)

    def hand_over(self, now: int, nbytes: int, **ends: bool) -> Flow:
        return self.fabric.send(now, self.fabric.ports(0, 1, **ends), nbytes, lambda flow: None)

    def run(self) -> None:
        while (at := self.fabric.due()) is not None:
            self.fabric.land(at)
            self.link.check_integrity()


def test_a_handover_and_an_offload_of_one_size_take_twice_as_long():
    bus = Bus()
    store = bus.link.submit(0, Direction.OUT, 10_000)
    flow = bus.hand_over(0, 10_000)
    bus.run()
    assert store.ended == flow.ended == 20_000 and store.queued == flow.queued == 10_000
    assert bus.heard == [20_000] and bus.link.advance(20_000) == [store]


def test_the_smaller_one_lands_first_and_the_larger_has_the_bus_to_itself_then():
    bus = Bus()
    store = bus.link.submit(0, Direction.OUT, 4_000)
    flow = bus.hand_over(0, 10_000)
    bus.run()
    assert (store.ended, flow.ended) == (8_000, 14_000)


def test_one_that_comes_later():
    bus = Bus()
    store = bus.link.submit(0, Direction.OUT, 10_000)
    bus.fabric.land(6_000)
    flow = bus.hand_over(6_000, 10_000)
    bus.run()
    assert (store.ended, flow.ended) == (14_000, 20_000)


def test_a_transfer_limited_elsewhere_leaves_its_share_to_others():
    """A network of a quarter of the bus, so three quarters are left for the offload; and the other way round."""
    bus = Bus(nic=25 * 10**7)
    store = bus.link.submit(0, Direction.OUT, 9_000)
    flow = bus.hand_over(0, 3_000)
    bus.run()
    assert store.ended == flow.ended == 12_000
    slow = LaneConfig(bandwidth=2 * 10**8)
    bus = Bus(link=LinkConfig(outward=slow, inward=slow))
    store = bus.link.submit(0, Direction.OUT, 2_000)
    flow = bus.hand_over(0, 8_000)
    bus.run()
    assert store.ended == flow.ended == 10_000


def test_a_load_comes_in_and_a_pull_from_host_passes_by():
    bus = Bus()
    load = bus.link.submit(0, Direction.IN, 10_000)
    out = bus.hand_over(0, 10_000)
    bus.run()
    assert load.ended == out.ended == 10_000
    bus = Bus()
    store = bus.link.submit(0, Direction.OUT, 10_000)
    pull = bus.hand_over(0, 10_000, from_device=False, to_device=False)
    bus.run()
    assert store.ended == pull.ended == 10_000


def test_forecasts_know_what_else_moves_there():
    bus = Bus()
    bus.hand_over(0, 4_000)
    assert bus.link.foresee(0, Direction.OUT, 10_000) == 14_000
    store = bus.link.submit(0, Direction.OUT, 10_000)
    assert bus.link.foresee_landing(store) == 14_000
    assert bus.link.earliest() == 20_000, "at the rate that it has now"
    bus.run()
    assert store.ended == 14_000


@pytest.mark.parametrize("seed", range(2))
def test_with_nothing_else_there_it_is_a_fair_link(seed):
    """Random transfers, some cancelled, pieces with overhead, both directions together limited too."""
    random = Random(seed)
    outward = LaneConfig(bandwidth=10**9, first_byte_ns=200, piece_overhead=70)
    inward = LaneConfig(bandwidth=7 * 10**8, first_byte_ns=300, piece_overhead=50)
    config = LinkConfig(outward=outward, inward=inward, duplex_bandwidth=12 * 10**8)
    bus, fair = Bus(bus=10**15, link=config), make_link(config)
    now = 0
    pairs = []
    for _ in range(30):
        now += random.choice([0, 100, 3_000])
        bus.fabric.land(now)
        fair.advance(now)
        sent = (random.choice(list(Direction)), random.randrange(5_000), "", random.randrange(1, 5))
        assert abs(bus.link.foresee(now, *sent) - fair.foresee(now, *sent)) <= 1
        pairs.append((bus.link.submit(now, *sent), fair.submit(now, *sent)))
        if random.random() < 0.2:
            one, other = random.choice(pairs)
            if one.ended is None and other.ended is None:
                assert bus.link.cancel(now, one) == fair.cancel(now, other)
    bus.run()
    fair.advance(10**9)
    # Each rounds to whole nanoseconds in its own way.
    assert all(abs(one.ended - other.ended) <= 2 for one, other in pairs)


def test_settings_that_a_bus_cannot_share_are_refused():
    fabric = Fabric(Network(), (None, None), bus_speeds=(1, 1))
    with pytest.raises(ConfigError, match="leave out discipline 'fifo'"):
        BusLink(LinkConfig(discipline="fifo"), fabric, 0, 0, print)
