"""From a fleet that has run to its report. Reads, counts, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.clock import MS, SECOND
from kvyard.events.types import LOWER_TIERS
from kvyard.replay.gaps import together
from kvyard.replay.record import MISSES, Record
from kvyard.replay.report.common import Observations, make_samples
from kvyard.replay.report.handovers import make_handovers
from kvyard.replay.report.numbers import Spread, spread
from kvyard.replay.report.report import (
    MOVES,
    LinkUse,
    PullReport,
    Report,
    RouterReport,
    Series,
    Share,
    Slo,
    TierReport,
    TimingReport,
    TransferReport,
    WorkerReport,
    share,
)
from kvyard.replay.report.scaling import make_scaling
from kvyard.replay.report.waterfall import make_waterfall
from kvyard.replay.split_fleet import SplitFleet
from kvyard.router.pace import engine_pace
from kvyard.tiers.copies import LinkedTier
from kvyard.tiers.counters import CopyTotals
from kvyard.tiers.links import Direction, Link

if TYPE_CHECKING:
    from kvyard.engine.core import EngineCore
    from kvyard.replay.config import ReplayConfig
    from kvyard.replay.fleet import Fleet
    from kvyard.replay.worker import Worker


ADMITTED = "prompt tokens of admitted requests"
REPORTED = frozenset(
    {
        "hits",
        "hit_tokens",
        *(f"{tier.label}_tokens" for tier in LOWER_TIERS[1:]),
        "refused",
        "dropped_blocks",
        "wasted_loads",
        "cross_worker_blocks",
        *(f"no_{tier.label}_room" for tier in LOWER_TIERS[1:]),
    }
)
"""Counters of lower tiers that belong in a report. The others count questions, and a plan asks fewer than single steps do."""


def make_report(
    fleet: Fleet,
    *,
    label: str = "",
    trace: Mapping[str, object] | None = None,
    bounds: Mapping[str, Share] | None = None,
    slo: Slo | None = None,
) -> Report:
    """What ``fleet`` did, once it has run. ``bounds`` are those of ``make_bounds``, which takes a second look at the trace."""
    records = list(fleet.records.values())
    seen = Observations(records, simulated=True, now=fleet.now if fleet.interrupted else None)
    admitted = [record for record in records if record.admitted >= 0]
    duration = max(1, seen.end - seen.start)
    workers = [_worker(worker, seen.by_worker.get(worker.name, []), duration) for worker in fleet.used]
    gaps = together([recorder.gaps for worker in fleet.workers for recorder in worker.recorders])
    fields = seen.fields(workers, gaps, label=label, trace=trace, slo=slo)
    reuse, router = _reuse(admitted), _router(fleet, records)
    rate = engine_pace(fleet.config.workers[0].engine).per_token if bounds else None
    return Report(
        **fields,
        config=msgspec.json.decode(msgspec.json.encode(fleet.config)),
        timing=make_timings(fleet.config),
        reuse=reuse,
        misses=_misses(admitted),
        missed_tokens=_missed_tokens(fields["series"], admitted),
        router=router,
        preemptions=sum(record.preemptions for record in records),
        tiers=make_tiers(fleet, duration),
        transfers=make_transfers(fleet),
        loading=make_loading(records),
        **make_left(fleet),
        scaling=make_scaling(fleet, duration),
        pulls=make_pulls(fleet, admitted),
        handovers=make_handovers(fleet, duration) if isinstance(fleet, SplitFleet) else None,
        bounds=dict(bounds or {}),
        waterfall=make_waterfall(fleet.config, bounds or {}, router, reuse["all"], rate),
        prefill_ms_per_token=rate,
        timeline=make_samples(fleet, seen.start),
    )


def make_timings(config: ReplayConfig) -> list[TimingReport]:
    """Where the times of a fleet come from, a line for each of its timings."""
    found: dict[str, TimingReport] = {}
    for kind in config.workers:
        timing = kind.engine.timing
        source, faster = timing.describe(), timing.speedup_ratio
        if faster != 1:
            source += f", divided by {faster:g}"
        workers = kind.count + (found[source].workers if source in found else 0)
        tag = str(timing.__struct_config__.tag)
        found[source] = TimingReport(kind=tag, source=source, error=timing.error(), workers=workers)
    return list(found.values())


def _reuse(admitted: Sequence[Record]) -> dict[str, Share]:
    whole = sum(record.input for record in admitted)
    parts = {"device": sum(record.cached for record in admitted)}
    words = {"device": "prompt tokens found on the device at first admission"}
    for level, tier in enumerate(LOWER_TIERS):
        parts[tier.label] = sum(record.loaded[level] for record in admitted if level < len(record.loaded))
        words[tier.label] = f"prompt tokens loaded from {tier.place} before it"
    parts["all"] = sum(parts.values())
    words["all"] = "prompt tokens not computed thanks to any tier"
    return {name: share(part, whole, f"{words[name]} / {ADMITTED}") for name, part in parts.items()}


def _misses(admitted: Sequence[Record]) -> dict[str, Share]:
    counts = Counter(record.miss for record in admitted)
    of = "requests whose cached prefix ended for this reason / admitted requests"
    return {name: share(counts[name], len(admitted), of) for name in MISSES if counts[name]}


def _missed_tokens(series: Series, admitted: Sequence[Record]) -> dict[str, Share]:
    tokens = {name: sum(counts) for name, counts in series.prompts.items()}
    whole = sum(record.input for record in admitted)
    of = f"prompt tokens computed for this reason / {ADMITTED}"
    return {name: share(tokens[name], whole, of) for name in MISSES if tokens.get(name)}


def _router(fleet: Fleet, records: Sequence[Record]) -> RouterReport:
    size = min(spec.block_size for spec in fleet.config.workers[0].engine.specs)
    best = sum(record.best_overlap for record in records)
    informed = [record for record in records if record.best_overlap]
    admitted = [record for record in records if record.admitted >= 0]
    believed = sum(record.overlap for record in admitted) * size
    found = sum(min(record.overlap * size, record.cached + sum(record.loaded)) for record in admitted)
    return RouterReport(
        policy=fleet.config.router.policy,
        decisions=len(records),
        retries=sum(record.retries for record in records),
        regret=share(
            sum(record.best_overlap - record.overlap for record in records),
            best,
            "blocks of prefix that another worker had beyond the chosen one / blocks that the best worker had",
        ),
        best=share(
            sum(record.overlap == record.best_overlap for record in informed),
            len(informed),
            "requests sent to a worker with the longest prefix / requests of which any worker had a prefix",
        ),
        belief=share(
            found,
            believed,
            "prompt tokens of those that were found at admission / prompt tokens the router believed the chosen worker to have",
        ),
    )


def _worker(worker: Worker, mine: Sequence[Record], duration: int) -> WorkerReport:
    # Of a request that was handed over, one worker has the prompt and one the answer.
    prompts = [record for record in mine if record.stages is None or _is(record.stages.prefill_worker, worker)]
    answers = [record for record in mine if _is(record.worker, worker)]
    return WorkerReport(
        name=worker.name,
        role=worker.role,
        requests=len(mine),
        input_tokens=sum(record.input for record in prompts),
        output_tokens=sum(record.output for record in answers),
        cached_tokens=sum(record.cached for record in prompts),
        loaded_tokens=sum(sum(record.loaded) for record in prompts),
        computed_tokens=sum(recorder.computed for recorder in worker.recorders),
        busy=max(core.busy_ns for core in worker.cores) / duration,
        preemptions=sum(core.scheduler.jobs.preemptions for core in worker.cores),
        passes=sum(core.passes for core in worker.cores),
        evicted_blocks=sum(core.scheduler.manager.pool.evicted for core in worker.cores),
        tiers={name: count for name, count in worker.tier_counters().items() if name in REPORTED},
    )


def _is(name: str, worker: Worker) -> bool:
    """Whether ``name`` is that of a rank of ``worker``."""
    return name.partition("@")[0] == worker.name


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
        links={"outward": _use(links, Direction.OUT, duration), "inward": _use(links, Direction.IN, duration)},
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
        if fleet.pulls is not None and core.offload is not None:
            pulled = core.offload.counters.pulls
            totals.setdefault("pulls", []).append(
                CopyTotals(pulled.begun, pulled.landed, pulled.blocks, pulled.bytes, pulled.queued_ns)
            )
    return {
        name: TransferReport(
            transfers=sum(one.landed for one in found),
            blocks=sum(one.blocks for one in found),
            bytes=sum(one.bytes for one in found),
            waiting_ms=sum(one.queued_ns for one in found) / MS,
        )
        for name, found in totals.items()
    }


def make_left(fleet: Fleet) -> dict[str, Any]:
    """What load policies left in lower tiers, as fields of a report."""
    counters = [core.offload.counters for worker in fleet.workers for core in worker.cores if core.offload is not None]
    tokens: Counter[str] = Counter()
    for one in counters:
        tokens.update(one.left_tokens)
    return {"left_requests": sum(one.left_requests for one in counters), "left_tokens": dict(sorted(tokens.items()))}


def make_pulls(fleet: Fleet, admitted: Sequence[Record]) -> PullReport | None:
    """What workers pulled from each other; ``None`` where they may not."""
    config = fleet.config.peer_pull
    if config is None:
        return None
    found = [core.offload.counters.pulls for core in _cores(fleet) if core.offload is not None]
    refused: Counter[str] = Counter()
    for one in found:
        refused.update(one.refused)
    landed = sum(one.landed for one in found)
    return PullReport(
        source=config.source,
        tokens=share(
            sum(record.pulled for record in admitted),
            sum(record.input for record in admitted),
            f"prompt tokens pulled from another worker / {ADMITTED}",
        ),
        begun=sum(one.begun for one in found),
        landed=landed,
        ms=sum(one.ns for one in found) / max(1, landed) / MS,
        gone=sum(one.gone for one in found),
        failed=sum(one.failed for one in found),
        busy=sum(one.busy for one in found),
        no_room=sum(one.no_room for one in found),
        refused=dict(sorted(refused.items())),
    )


def make_loading(records: Iterable[Record]) -> Spread:
    """How long requests waited for loads, of those that did."""
    return spread([record.loading for record in records if record.loading], MS)


def _cores(fleet: Fleet) -> list[EngineCore]:
    return [core for worker in fleet.used for core in worker.cores]
