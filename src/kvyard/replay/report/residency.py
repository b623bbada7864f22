"""Residency: the token-seconds of cache that each tenant had, from the ledgers of all pools of a fleet."""

from collections.abc import Iterator, Mapping

from kvyard.blocks.pool import Pool
from kvyard.events.tier import Tier
from kvyard.replay.fleet import Fleet
from kvyard.replay.report.tenants import Residency


def make_residency(fleet: Fleet, end: int) -> Mapping[str, Residency]:
    """By tier, closest to the device first; empty where no request named a tenant."""
    residency: dict[str, Residency] = {}
    seen: set[int] = set()
    for tier, pool, page_tokens in _pools(fleet):
        if pool.ledger is not None and id(pool) not in seen:
            seen.add(id(pool))
            residency.setdefault(tier.label, Residency()).add(pool, page_tokens, end)
    return residency


def _pools(fleet: Fleet) -> Iterator[tuple[Tier, Pool, int]]:
    for worker in fleet.used:
        for core in worker.cores:
            yield Tier.G1, core.scheduler.manager.pool, worker.block_size
            if core.offload is not None:
                page = worker.block_size * core.offload.layout.chunk
                for tier in core.offload.tiers:
                    yield tier.store.tier, tier.store.pool, page
