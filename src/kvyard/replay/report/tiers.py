"""The part of a report on caches and what moved between them. All workers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvyard.clock.units import MS, SECOND
from kvyard.replay.record import Record
from kvyard.replay.report.numbers import Spread, spread
from kvyard.replay.report.report import MOVES, Flow, LinkUse, TierReport, share
from kvyard.tiers.depot import Depot
from kvyard.tiers.links import Direction, Link

if TYPE_CHECKING:
    from kvyard.engine.core import EngineCore
    from kvyard.replay.fleet import Fleet


def make_tiers(fleet: Fleet, duration: int) -> dict[str, TierReport]:
    """Every tier there is. ``duration`` is the run's, in nanoseconds."""
    cores = _cores(fleet)
    pools = [core.scheduler.manager.pool for core in cores]
    tiers = {
        "device": TierReport(
            capacity_blocks=sum(pool.num_blocks - 1 for pool in pools),
            evicted_blocks=sum(pool.evicted for pool in pools),
        )
    }
    sites = [core.offload.site for core in cores if core.offload is not None]
    for name, depots in (
        ("host", [site.host for site in sites]),
        ("storage", [site.storage for site in sites if site.storage is not None]),
    ):
        if depots:
            chunk = sites[0].layout.chunk
            tiers[name] = _tier(list(dict.fromkeys(depots)), chunk, duration)  # a shared one counts once
    return tiers


def _tier(depots: Sequence[Depot], chunk: int, duration: int) -> TierReport:
    links = [depot.link for depot in depots]
    return TierReport(
        capacity_blocks=sum(depot.store.num_pages for depot in depots) * chunk,
        evicted_blocks=sum(depot.store.evicted for depot in depots) * chunk,
        links={
            "outward": _use(links, Direction.OUT, duration),
            "inward": _use(links, Direction.IN, duration),
        },
    )


def _use(links: Sequence[Link], direction: Direction, duration: int) -> LinkUse:
    stats = [link.stats(direction) for link in links]
    moved = sum(one.bytes for one in stats)
    speeds = [_speed(link, direction) for link in links]
    limits = [speed for speed in speeds if speed is not None]
    return LinkUse(
        links=len(links),
        bytes=moved,
        busy=share(
            sum(one.busy_ns for one in stats),
            duration * len(links),
            "nanoseconds in which anything moved / nanoseconds of the run, times links",
        ),
        bandwidth=share(moved, sum(limits) * duration // SECOND, "bytes moved / bytes that could have moved in the run")
        if len(limits) == len(links)
        else None,
    )


def _speed(link: Link, direction: Direction) -> int | None:
    config = link.config
    limits = (config.lanes[direction].bandwidth, config.duplex_bandwidth)
    return min((limit for limit in limits if limit is not None), default=None)


def make_transfers(fleet: Fleet) -> dict[str, Flow]:
    """What moved, by kind; kinds that can't occur are left out."""
    counters = [core.offload.counters for core in _cores(fleet) if core.offload is not None]
    if not counters:
        return {}
    found = {}
    for name in MOVES:
        flows = [getattr(one, name) for one in counters]
        found[name] = Flow(
            transfers=sum(flow.landed for flow in flows),
            blocks=sum(flow.blocks for flow in flows),
            bytes=sum(flow.bytes for flow in flows),
            waiting_ms=sum(flow.queued_ns for flow in flows) / MS,
        )
    if not any(core.offload is not None and core.offload.storage is not None for core in _cores(fleet)):
        del found["spills"], found["fetches"]
    return found


def make_loading(records: Iterable[Record]) -> Spread:
    """How long requests waited for loads, of those that did."""
    return spread([record.loading for record in records if record.loading], MS)


def _cores(fleet: Fleet) -> list[EngineCore]:
    return [core for worker in fleet.workers for core in worker.cores]
