"""The runs of independent pools as one: their requests on one clock, and one report on all of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvyard.clock import SECOND
from kvyard.events.types import Tier
from kvyard.lab.pools.shard import PoolRun
from kvyard.replay.record import MISSES, Record
from kvyard.replay.records import Records
from kvyard.replay.report import Report, Slo
from kvyard.replay.report.common import Observations
from kvyard.replay.report.fleet_report import LinkUse, TierReport, TransferReport
from kvyard.replay.report.numbers import Share, share
from kvyard.replay.report.ranges import make_ranges
from kvyard.replay.report.report import MOVES, RouterReport, TimingReport, WorkerReport
from kvyard.replay.report.sessions import make_sessions


def levels_of(runs: Mapping[str, PoolRun]) -> int:
    """Return number of lower tiers of the pool that has the most."""
    return max((run.records.levels for run in runs.values()), default=0)


def merged_records(runs: Mapping[str, PoolRun], sink: Callable[[list[Record]], object] | None = None) -> Records:
    """Return all records in the order in which requests came, workers called by pool and name. ``sink`` is given them, too."""
    records = Records(levels_of(runs))
    if sink is not None:
        records.stream(sink)
    lots = [_of_pool(name, run) for name, run in runs.items()]
    for record in merge(*lots, key=lambda record: record.arrival):
        records.begin(record)
        records.close(record.id)
    records.finish()
    return records


def _of_pool(pool: str, run: PoolRun) -> Iterator[Record]:
    for record in Records.unpacked(run.records).values():
        if record.worker:
            record.worker = f"{pool}/{record.worker}"
        if record.stages is not None and record.stages.prefill_worker:
            record.stages.prefill_worker = f"{pool}/{record.stages.prefill_worker}"
        yield record


def merged_report(
    runs: Mapping[str, PoolRun],
    records: Records,
    *,
    label: str = "",
    trace: Mapping[str, object] | None = None,
    slo: Slo | None = None,
) -> Report:
    """Return one report on all of ``runs``. What only makes sense for one fleet is in the reports of its pools alone."""
    reports = {name: run.report for name, run in runs.items()}
    every = list(reports.values())
    seen = Observations(records, simulated=True, now=None, slo=slo)
    seconds = max(1, seen.end - seen.start) / SECOND
    workers = [
        _worker(name, worker, report.duration_s / seconds)
        for name, report in reports.items()
        for worker in report.workers
    ]
    gaps = [run.gaps for run in runs.values()]
    columns = np.concatenate([column for column, _ in gaps]), np.concatenate([column for _, column in gaps])
    sessions = make_sessions(records, None)  # what they take alone is in the reports of their pools
    fields = seen.fields(workers, columns, label=label, trace=trace, sessions=sessions)
    timing, loading = _timings(every), seen.totals.latency["loading"].spread()
    return Report(
        **fields,
        pools={name: replace(report, trace={}) for name, report in reports.items()},
        config={"pools": {name: report.config for name, report in reports.items()}},
        timing=timing,
        ranges=make_ranges(timing, fields["latency"], fields["throughput"], loading),
        reuse=_shares([report.reuse for report in every], [*(tier.label for tier in Tier), "all"]),
        misses=_shares([report.misses for report in every], MISSES),
        missed_tokens=_shares([report.missed_tokens for report in every], MISSES),
        router=_router([report.router for report in every if report.router is not None]),
        preemptions=sum(report.preemptions or 0 for report in every),
        tiers=_tiers([report.tiers for report in every]),
        transfers=_transfers([report.transfers for report in every]),
        loading=loading,
        left_requests=sum(report.left_requests for report in every),
        left_tokens=dict(sorted(sum((Counter(report.left_tokens) for report in every), Counter[str]()).items())),
    )


def _worker(pool: str, worker: WorkerReport, part: float) -> WorkerReport:
    """``worker``, called by its pool too; its pool took ``part`` of the whole time."""
    return replace(worker, name=f"{pool}/{worker.name}", busy=None if worker.busy is None else worker.busy * part)


def _timings(reports: Iterable[Report]) -> list[TimingReport]:
    by_source: dict[str, TimingReport] = {}
    for timed in (timing for report in reports for timing in report.timing):
        before = by_source[timed.source].workers if timed.source in by_source else 0
        by_source[timed.source] = replace(timed, workers=timed.workers + before)
    return list(by_source.values())


def _added(shares: Iterable[Share]) -> Share:
    parts = list(shares)
    return share(sum(part.part for part in parts), sum(part.whole for part in parts), parts[0].of)


def _shares(lots: Sequence[Mapping[str, Share]], names: Iterable[str]) -> dict[str, Share]:
    """Parts of one whole each: one that a pool has nothing of is a part of its whole all the same."""
    shares: dict[str, Share] = {}
    for name in names:
        here = [lot[name] for lot in lots if name in lot]
        if here:
            whole = sum(next(iter(lot.values())).whole for lot in lots if lot)
            shares[name] = share(sum(counted.part for counted in here), whole, here[0].of)
    return shares


def _router(routers: Sequence[RouterReport]) -> RouterReport:
    return RouterReport(
        policy=", ".join(dict.fromkeys(router.policy for router in routers)),
        decisions=sum(router.decisions for router in routers),
        retries=sum(router.retries for router in routers),
        regret=_added(router.regret for router in routers),
        best=_added(router.best for router in routers),
        belief=_added(router.belief for router in routers),
    )


def _tiers(lots: Sequence[Mapping[str, TierReport]]) -> dict[str, TierReport]:
    reports: dict[str, TierReport] = {}
    for tier in Tier:
        here = [lot[tier.label] for lot in lots if tier.label in lot]
        if here:
            ways = dict.fromkeys(way for tier_report in here for way in tier_report.links)
            reports[tier.label] = TierReport(
                capacity_blocks=sum(tier_report.capacity_blocks for tier_report in here),
                evicted_blocks=sum(tier_report.evicted_blocks for tier_report in here),
                links={
                    way: _links([tier_report.links[way] for tier_report in here if way in tier_report.links])
                    for way in ways
                },
            )
    return reports


def _links(links: Sequence[LinkUse]) -> LinkUse:
    limited = [link.bandwidth for link in links if link.bandwidth is not None]
    return LinkUse(
        links=sum(link.links for link in links),
        bytes=sum(link.bytes for link in links),
        busy=_added(link.busy for link in links),
        bandwidth=_added(limited) if len(limited) == len(links) else None,
    )


def _transfers(lots: Sequence[Mapping[str, TransferReport]]) -> dict[str, TransferReport]:
    reports: dict[str, TransferReport] = {}
    for name in MOVES:
        here = [lot[name] for lot in lots if name in lot]
        if here:
            sums: dict[str, Any] = {
                field: sum(getattr(transfer, field) for transfer in here) for field in TransferReport.__struct_fields__
            }
            reports[name] = TransferReport(**sums)
    return reports
