"""Engines by name: who comes, who goes, and what a bad moment of the resolver must not do."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvyard.clock import pause
from kvyard.errors import KvyardError
from kvyard.server.gateway.discovery import Address, Change, DnsWatch


class Zone:
    """A resolver whose answers are ours."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | OSError = list(addresses)
        self.asked = 0
        self.stuck: asyncio.Event | None = None

    async def __call__(self, host: str) -> list[str]:
        assert host == "engines.svc"
        self.asked += 1
        if self.stuck is not None:
            await self.stuck.wait()
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


def addresses(*hosts: str) -> tuple[Address, ...]:
    return tuple(Address(host, 8000) for host in hosts)


def watch(zone: Zone, **options: float) -> DnsWatch:
    return DnsWatch("engines.svc", 8000, resolve=zone, **options)  # type: ignore[arg-type]


def test_engines_join_and_leave() -> None:
    async def story() -> None:
        zone = Zone("10.0.0.2", "10.0.0.1", "10.0.0.1")
        dns = watch(zone)
        assert await dns.look() == Change(addresses("10.0.0.1", "10.0.0.2"))
        assert not await dns.look()
        zone.addresses = ["10.0.0.1", "10.0.0.3"]
        assert await dns.look() == Change(addresses("10.0.0.3"))
        # Gone only when three answers in a row lack it.
        assert not await dns.look()
        zone.addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert not await dns.look()
        zone.addresses = ["10.0.0.1", "10.0.0.3"]
        assert not await dns.look()
        assert not await dns.look()
        assert await dns.look() == Change((), addresses("10.0.0.2"))
        assert dns.addresses == set(addresses("10.0.0.1", "10.0.0.3"))
        zone.addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert await dns.look() == Change(addresses("10.0.0.2"))

    asyncio.run(story())


def test_a_name_that_fails_keeps_its_last_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        zone = Zone("10.0.0.1")
        dns = watch(zone)
        await dns.look()
        zone.addresses = OSError(-3, "Temporary failure in name resolution")
        for _ in range(10):
            assert not await dns.look()
        zone.addresses = []
        assert not await dns.look()
        assert dns.addresses == set(addresses("10.0.0.1"))
        assert dns.failures == 11 and dns.reason == "it has no addresses"
        zone.addresses = ["10.0.0.1"]
        assert not await dns.look()
        assert dns.reason == ""

    asyncio.run(story())
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "Temporary failure" in caplog.records[0].getMessage()


def test_a_lookup_that_hangs_is_waited_for_and_not_begun_again() -> None:
    async def story() -> None:
        zone = Zone("10.0.0.1")
        zone.stuck = asyncio.Event()
        dns = watch(zone, timeout_s=0.01)
        for _ in range(3):
            assert not await dns.look()
        assert zone.asked == 1 and dns.failures == 3 and "0.01 s" in dns.reason
        zone.stuck.set()
        await pause()
        assert await dns.look() == Change(addresses("10.0.0.1"))
        assert zone.asked == 1

    asyncio.run(story())


def test_watching_yields_changes_only() -> None:
    async def story() -> None:
        zone = Zone("10.0.0.1")
        dns = watch(zone, interval_s=0.001, patience=1)
        seen: list[Change] = []
        async for change in dns.watch():
            seen.append(change)
            if len(seen) == 1:
                zone.addresses = ["10.0.0.2"]
            else:
                break
        assert seen == [Change(addresses("10.0.0.1")), Change(addresses("10.0.0.2"), addresses("10.0.0.1"))]

    asyncio.run(story())


def test_the_systems_own_resolver() -> None:
    async def story() -> None:
        dns = DnsWatch("localhost", 8000)
        found = (await dns.look()).added
        assert {address.netloc for address in found} & {"127.0.0.1:8000", "[::1]:8000"}
        nobody = DnsWatch("no-such-host.invalid", 8000)
        assert not await nobody.look()
        assert nobody.failures == 1 and nobody.reason

    asyncio.run(story())


def test_addresses_as_in_urls_and_names_that_are_none() -> None:
    assert Address("fd00::1", 80).netloc == "[fd00::1]:80"
    for host, port in (("", 80), ("http://x", 80), ("a b", 80), ("x", 0), ("x", 70_000)):
        with pytest.raises(KvyardError):
            DnsWatch(host, port)
    with pytest.raises(KvyardError):
        DnsWatch("x", 80, patience=0)
