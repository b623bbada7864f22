"""The part of a report on caches and what moved between them. All workers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvyard.clock.units import MS, SECOND
from kvyard.events.types import LOWER_TIERS
from kvyard.replay.record import Record
from kvyard.replay.report.numbers import Spread, spread
from kvyard.replay.report.report import MOVES, LinkUse, TierReport, TransferReport, share
from kvyard.tiers.copies import LinkedTier
from kvyard.tiers.counters import CopyTotals
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
    engines = [core.offload for core in cores if core.offload is not None]
    for level, tier in enumerate(LOWER_TIERS):
        found = dict.fromkeys(engine.tiers[level] for engine in engines if level < len(engine.tiers))
        if found:  # a shared one counts once
            tiers[tier.label] = _tier(list(found), engines[0].layout.chunk, duration)
    return tiers


def _tier(tiers: Sequence[LinkedTier], chunk: int, duration: int) -> TierReport:
    links = [tier.link for tier in tiers]
    return TierReport(
        capacity_blocks=sum(tier.store.num_pages for tier in tiers) * chunk,
        evicted_blocks=sum(tier.store.evicted for tier in tiers) * chunk,
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


def make_transfers(fleet: Fleet) -> dict[str, TransferReport]:
    """What moved, by kind; kinds that can't occur are left out."""
    totals: dict[str, list[CopyTotals]] = {}
    for core in _cores(fleet):
        tiers = core.offload.counters.tiers if core.offload is not None else []
        for name, total in zip(MOVES, (way for tier in tiers for way in (tier.stores, tier.loads))):
            totals.setdefault(name, []).append(total)
    return {
        name: TransferReport(
            transfers=sum(one.landed for one in found),
            blocks=sum(one.blocks for one in found),
            bytes=sum(one.bytes for one in found),
            waiting_ms=sum(one.queued_ns for one in found) / MS,
        )
        for name, found in totals.items()
    }


def make_loading(records: Iterable[Record]) -> Spread:
    """How long requests waited for loads, of those that did."""
    return spread([record.loading for record in records if record.loading], MS)


def _cores(fleet: Fleet) -> list[EngineCore]:
    return [core for worker in fleet.workers for core in worker.cores]
