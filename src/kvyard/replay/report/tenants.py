"""Tenants of a run: requests, reuse, cost and latencies by tenant, from the rows of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvyard.blocks.pool import Pool
from kvyard.clock import MS, SECOND
from kvyard.events.tier import Tier
from kvyard.replay.fleet import Fleet
from kvyard.replay.records import Records
from kvyard.replay.report.fleet_report import CacheTime, TenantReport
from kvyard.replay.report.numbers import share
from kvyard.replay.report.sketch import MOST_EXACT, Values
from kvyard.replay.report.totals import FINISHED, REJECTED_STATUS

MOST_TENANTS = 50
"""Tenants that a report names; the others are put together."""
OTHERS = "(others)"
_SUMS = ("requests", "finished", "rejected", "input", "output", "admitted", "found", "held", "waited")


class TierLedgers:
    """The ledgers of one tier, all workers together."""

    def __init__(self) -> None:
        self.pool_s = 0.0
        """Token-seconds of the pools, from when their ledgers were opened."""
        self.token_s: defaultdict[str, float] = defaultdict(float)
        """By tenant, requests that name none included."""
        self.lost: defaultdict[str, int] = defaultdict(int)
        """Cached tokens by tenant that were evicted for another tenant."""

    def add(self, pool: Pool, page_tokens: int, end: int) -> None:
        """Add the ledger of ``pool``, whose blocks hold ``page_tokens`` tokens each, up to ``end``."""
        ledger = pool.ledger
        if ledger is None:
            return
        until = max(end, ledger.latest)
        scale = page_tokens / SECOND
        self.pool_s += (pool.num_blocks - 1) * (until - ledger.opened) * scale
        for account, name in enumerate(ledger.names):
            self.token_s[name] += ledger.block_ns(account, until) * scale
            self.lost[name] += ledger.lost[account] * page_tokens

    def report(self) -> CacheTime:
        held = sum(self.token_s.values())
        return CacheTime(pool_token_s=self.pool_s, held_token_s=held, empty_token_s=self.pool_s - held)


def make_residency(fleet: Fleet, end: int) -> Mapping[str, TierLedgers]:
    """By tier, closest to the device first; empty where no request named a tenant."""
    residency: dict[str, TierLedgers] = {}
    seen: set[int] = set()
    for tier, pool, page_tokens in _pools(fleet):
        if pool.ledger is not None and id(pool) not in seen:
            seen.add(id(pool))
            residency.setdefault(tier.label, TierLedgers()).add(pool, page_tokens, end)
    return residency


def _pools(fleet: Fleet) -> Iterator[tuple[Tier, Pool, int]]:
    for worker in fleet.used:
        for core in worker.cores:
            yield Tier.G1, core.scheduler.manager.pool, worker.block_size
            if core.offload is not None:
                page = worker.block_size * core.offload.layout.chunk
                for tier in core.offload.tiers:
                    yield tier.store.tier, tier.store.pool, page


def make_tenants(
    records: Records, residency: Mapping[str, TierLedgers] | None = None
) -> dict[str, TenantReport] | None:
    """Return the tenants of ``records``, the one with the most tokens first; ``None`` where no request names one.
    ``residency``: what each had of the tiers.
    """
    names = records.tenants.names
    if len(names) == 1:
        return None
    sums = _sums_of(records)
    order = np.lexsort((np.arange(len(names)), -(sums["input"] + sums["output"])))
    present = [number for number in order.tolist() if sums["requests"][number]]
    groups = {names[number]: [number] for number in present[:MOST_TENANTS]}
    others = present[MOST_TENANTS:]
    if others:
        groups[OTHERS] = others
    reports: dict[str, TenantReport] = {}
    for (name, numbers), (ttft, e2e) in zip(groups.items(), _latencies(records, list(groups.values())), strict=True):
        total = {of: float(values[numbers].sum()) for of, values in sums.items()}
        own = [*([OTHERS] if numbers is others else []), *(names[number] for number in numbers)]
        reports[name] = TenantReport(
            resident_token_s={tier: sum([of.token_s[name] for name in own]) for tier, of in (residency or {}).items()},
            lost_tokens={tier: sum([of.lost[name] for name in own]) for tier, of in (residency or {}).items()},
            requests=int(total["requests"]),
            finished=int(total["finished"]),
            rejected=int(total["rejected"]),
            input_tokens=int(total["input"]),
            output_tokens=int(total["output"]),
            computed_tokens=int(total["admitted"] - total["found"] + total["output"]),
            reused=share(
                int(total["found"]),
                int(total["admitted"]),
                "prompt tokens not computed thanks to any tier / prompt tokens of the tenant's admitted requests",
            ),
            held_token_s=total["held"] / SECOND,
            waited_ms=total["waited"] / max(1.0, total["requests"]) / MS,
            ttft=ttft.spread(),
            e2e=e2e.spread(),
        )
    return reports


def _sums_of(records: Records) -> dict[str, npt.NDArray[np.float64]]:
    """Return sums over requests, each by the tenant's number."""
    count = len(records.tenants.names)
    sums = {name: np.zeros(count, dtype=np.float64) for name in _SUMS}
    for part in records.parts():
        rows, tenant = part.rows, part.rows["tenant"]
        admitted = rows["admitted"] >= 0
        done = rows["status"] == FINISHED
        reused = np.maximum(rows["cached"], 0) + np.maximum(rows["loaded"], 0).sum(axis=1)
        answered = np.where(done, (rows["ended"] - rows["first_token"]) * (rows["output"] / 2), 0)
        prompt = np.where(admitted & (rows["ended"] >= 0), (rows["ended"] - rows["admitted"]) * rows["input"], 0)
        for name, values in {
            "requests": np.ones(len(rows)),
            "finished": done,
            "rejected": rows["status"] == REJECTED_STATUS,
            "input": rows["input"],
            "output": rows["output"],
            "admitted": np.where(admitted, rows["input"], 0),
            "found": np.where(admitted, reused, 0),
            "held": prompt + answered,
            "waited": np.maximum(rows["waited"], 0),
        }.items():
            np.add.at(sums[name], tenant, values)
    return sums


def _latencies(records: Records, groups: Sequence[Sequence[int]]) -> list[tuple[Values, Values]]:
    """Return times to first token and to the end of finished requests, for each group of tenants."""
    group_of = np.zeros(len(records.tenants.names), dtype=np.int64)
    for index, numbers in enumerate(groups):
        group_of[numbers] = index
    exact = len(records) <= MOST_EXACT
    latencies = [(Values(MS, exact=exact), Values(MS, exact=exact)) for _ in groups]
    for part in records.parts():
        rows = part.rows[part.rows["status"] == FINISHED]
        indices = group_of[rows["tenant"]]
        for index in np.unique(indices).tolist():
            here = rows[indices == index]
            latencies[index][0].add(here["first_token"] - here["arrival"])
            latencies[index][1].add(here["ended"] - here["arrival"])
    return latencies
