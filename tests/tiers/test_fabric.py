"""Which ports a flow between workers goes through, and what it takes alone."""

from __future__ import annotations

from kvyard.tiers.fabric import Fabric
from kvyard.tiers.network import Network

GB = 10**9


def test_ports_of_a_flow() -> None:
    fabric = Fabric(Network(0), (GB, GB), (4 * GB, 4 * GB), 2, (2 * GB, 2 * GB))
    assert fabric.ports(1, 1) == []
    assert fabric.ports(0, 1) == [("out", 0), ("in", 1), ("bus out", 0), ("bus in", 1)]
    assert fabric.ports(0, 1, from_device=False) == [("out", 0), ("in", 1), ("bus in", 1)]
    assert fabric.ports(0, 1, to_device=False) == [("out", 0), ("in", 1), ("bus out", 0)]
    assert fabric.ports(1, 2)[4:] == [("node out", 0), ("node in", 1)]


def test_alone_it_takes_what_the_narrowest_port_lets_through() -> None:
    assert Fabric(Network(2_000_000), (GB, 2 * GB), (GB // 2, None), 8).alone_ms(GB) == 2 + 2_000
    assert Fabric(Network(2_000_000), (None, None)).alone_ms(GB) == 2.0
