"""From a fleet that has run to its report. Reads, counts, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.clock import MS, SECOND
from kvyard.events.tier import LOWER_TIERS, reported_tiers
from kvyard.files import encode_json
from kvyard.replay.record import MISSES
from kvyard.replay.report.common import Observations, make_samples
from kvyard.replay.report.fleet_report import FlowReport, HeldRequest, LinkUse, PullReport, TierReport, TransferReport
from kvyard.replay.report.handovers import make_handovers
from kvyard.replay.report.idle import IdleFleet
from kvyard.replay.report.numbers import Share, share, spread
from kvyard.replay.report.ranges import make_ranges
from kvyard.replay.report.report import MOVES, Report, RouterReport, Series, Slo, TimingReport, WorkerReport
from kvyard.replay.report.scaling import make_scaling
from kvyard.replay.report.session_report import SessionsReport
from kvyard.replay.report.sessions import make_sessions
from kvyard.replay.report.tenants import make_residency
from kvyard.replay.report.totals import RecordTotals, WorkerSums
from kvyard.replay.report.waterfall import make_waterfall
from kvyard.router.pace import engine_pace
from kvyard.tiers.copies import LinkedTier
from kvyard.tiers.copy_totals import CopyTotals
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

_NOTHING = WorkerSums()


def make_report(
    fleet: Fleet,
    *,
    label: str = "",
    trace: Mapping[str, object] | None = None,
    bounds: Mapping[str, Share] | None = None,
    slo: Slo | None = None,
) -> Report:
    """Make the report of ``fleet`` once it has run. ``bounds`` are those of ``make_bounds``, which reads the trace a second
    time."""
    size = min(spec.block_size for spec in fleet.config.workers[0].engine.specs)
    now = fleet.now if fleet.interrupted else None
    seen = Observations(fleet.records, simulated=True, now=now, slo=slo, block_size=size)
    totals = seen.totals
    duration = max(1, seen.end - seen.start)
    workers = [_worker(worker, seen.by_worker.get(worker.name, _NOTHING), duration) for worker in fleet.used]
    sessions = _sessions(fleet, seen.end, duration)
    residency = make_residency(fleet, seen.end)
    fields = seen.fields(
        workers, fleet.gaps.columns(), label=label, trace=trace, sessions=sessions, residency=residency
    )
    reuse, router = _reuse(totals), _router(fleet.config, totals, size)
    rate = engine_pace(fleet.config.workers[0].engine).per_token if bounds else None
    timing, loading = make_timings(fleet.config), totals.latency["loading"].spread()
    return Report(
        **fields,
        config=msgspec.json.decode(encode_json(fleet.config)),
        timing=timing,
        ranges=make_ranges(timing, fields["latency"], fields["throughput"], loading),
        reuse=reuse,
        misses=_misses(totals),
        missed_tokens=_missed_tokens(fields["series"], totals),
        router=router,
        preemptions=totals.all["preemptions"],
        tiers=make_tiers(fleet, duration),
        transfers=make_transfers(fleet),
        loading=loading,
        **make_left(fleet),
        scaling=make_scaling(fleet, totals, seen.end, len(fields["series"].arrived), slo),
        pulls=make_pulls(fleet, totals),
        handovers=make_handovers(fleet, totals, duration),
        flow=_flow(fleet, totals.count, seen.start),
        cache_time={tier: of.report() for tier, of in residency.items()} or msgspec.UNSET,
        bounds=dict(bounds or {}),
        waterfall=make_waterfall(fleet.config, bounds or {}, router, reuse["all"], rate),
        prefill_ms_per_token=rate,
        timeline=make_samples(fleet, seen.start),
    )


def _sessions(fleet: Fleet, end: int, duration: int) -> SessionsReport | None:
    """Report on sessions; ``None`` in a run without any."""
    records = fleet.records
    if not records.sessions.names:
        return None
    timeline = fleet.timeline
    timeline.add_up(end, fleet.workers)
    seconds = {
        "pool": sum(worker.capacity for worker in fleet.used) * duration / SECOND,
        "held": timeline.held / SECOND,
        "idle": timeline.cached / SECOND,
    }
    return make_sessions(records, IdleFleet(fleet, records.workers.names), seconds)


def _flow(fleet: Fleet, requests: int, first: int) -> FlowReport | msgspec.UnsetType:
    """Report on flow control."""
    flow, most = fleet.flow, fleet.config.engine_requests
    if flow is None or most is None:
        return msgspec.UNSET
    return FlowReport(
        policy=fleet.config.flow.policy,
        engine_requests=most,
        held=share(len(flow.waited), requests, "requests that waited before the router / requests"),
        waited=spread(flow.waited, MS),
        longest=flow.longest,
        overtaken=flow.overtaken,
        refused=dict(sorted(flow.refused.items())),
        longest_waits=[
            HeldRequest(
                id=record.id,
                session=record.request.root or record.request.session or "",
                tenant=record.tenant,
                arrival_s=(record.arrival - first) / SECOND,
                waited_ms=wait.waited_ms,
                ahead=wait.ahead,
                overtaken=wait.overtaken,
                why=wait.why,
            )
            for _, _, record, wait in sorted(flow.longest_waits, key=lambda entry: entry[:2], reverse=True)
        ],
    )


def make_timings(config: ReplayConfig) -> list[TimingReport]:
    """Return the sources of a fleet's times, a line for each of its timings."""
    by_source: dict[str, TimingReport] = {}
    for kind in config.workers:
        timing = kind.engine.timing
        source, faster = timing.describe(), timing.speedup_ratio
        if faster != 1:
            source += f", divided by {faster:g}"
        workers = kind.count + (by_source[source].workers if source in by_source else 0)
        tag = str(timing.__struct_config__.tag)
        by_source[source] = TimingReport(
            kind=tag,
            source=source,
            error=timing.error(),
            held_out=dict(timing.held_out()),
            run_class=timing.run_class(kind.engine.backend),
            workers=workers,
        )
    return list(by_source.values())


def _reuse(totals: RecordTotals) -> dict[str, Share]:
    sums = totals.admitted
    parts = {"device": sums["cached"]}
    words = {"device": "prompt tokens found on the device at first admission"}
    for tier in reported_tiers(totals.levels):
        parts[tier.label] = sums[tier.label]
        words[tier.label] = f"prompt tokens loaded from {tier.place} before it"
    parts["all"] = sum(parts.values())
    words["all"] = "prompt tokens not computed thanks to any tier"
    return {name: share(part, sums["input"], f"{words[name]} / {ADMITTED}") for name, part in parts.items()}


def _misses(totals: RecordTotals) -> dict[str, Share]:
    counts = totals.misses
    of = "requests whose cached prefix ended for this reason / admitted requests"
    return {name: share(counts[name], totals.admitted["requests"], of) for name in MISSES if counts[name]}


def _missed_tokens(series: Series, totals: RecordTotals) -> dict[str, Share]:
    tokens = {name: sum(counts) for name, counts in series.prompts.items()}
    of = f"prompt tokens computed for this reason / {ADMITTED}"
    return {name: share(tokens[name], totals.admitted["input"], of) for name in MISSES if tokens.get(name)}


def _router(config: ReplayConfig, totals: RecordTotals, size: int) -> RouterReport:
    sums = totals.all
    return RouterReport(
        policy=config.router.policy,
        decisions=totals.count,
        retries=sums["retries"],
        regret=share(
            sums["best_overlap"] - sums["overlap"],
            sums["best_overlap"],
            "blocks of prefix that another worker had beyond the chosen one / blocks that the best worker had",
        ),
        best=share(
            sums["best"],
            sums["informed"],
            "requests sent to a worker with the longest prefix / requests of which any worker had a prefix",
        ),
        belief=share(
            totals.admitted["believed_found"],
            totals.admitted["overlap"] * size,
            "prompt tokens of those that were found at admission / prompt tokens the router believed the chosen worker to have",
        ),
    )


def _worker(worker: Worker, mine: WorkerSums, duration: int) -> WorkerReport:
    return WorkerReport(
        name=worker.name,
        role=worker.role,
        requests=mine.requests,
        input_tokens=mine.input,
        output_tokens=mine.output,
        cached_tokens=mine.cached,
        loaded_tokens=mine.loaded,
        computed_tokens=sum(recorder.computed for recorder in worker.recorders),
        busy=max(core.busy_ns for core in worker.cores) / duration,
        preemptions=sum(core.scheduler.jobs.preemptions for core in worker.cores),
        passes=sum(core.passes for core in worker.cores),
        evicted_blocks=sum(core.scheduler.manager.pool.evicted for core in worker.cores),
        tiers={name: count for name, count in worker.tier_counters().items() if name in REPORTED},
    )


def make_tiers(fleet: Fleet, duration: int) -> dict[str, TierReport]:
    """Return every tier there is. ``duration`` is the run's, in nanoseconds."""
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
        distinct = dict.fromkeys(engine.tiers[level] for engine in engines if level < len(engine.tiers))
        if distinct:  # a shared one counts once
            tiers[tier.label] = _tier(list(distinct), engines[0].layout.chunk, duration)
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
    moved = sum(lane.bytes for lane in stats)
    speeds = [_speed(link, direction) for link in links]
    limits = [speed for speed in speeds if speed is not None]
    return LinkUse(
        links=len(links),
        bytes=moved,
        busy=share(
            sum(lane.busy_ns for lane in stats),
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
    """Return transfers by kind; kinds that can't occur are left out."""
    totals: dict[str, list[CopyTotals]] = {}
    for core in _cores(fleet):
        tiers = core.offload.counters.tiers if core.offload is not None else []
        for name, total in zip(MOVES, (way for tier in tiers for way in (tier.stores, tier.loads)), strict=False):
            totals.setdefault(name, []).append(total)
        if fleet.pulls is not None and core.offload is not None:
            pulled = core.offload.counters.pulls
            totals.setdefault("pulls", []).append(
                CopyTotals(pulled.begun, pulled.landed, pulled.blocks, pulled.bytes, pulled.queued_ns)
            )
    return {
        name: TransferReport(
            transfers=sum(total.landed for total in copies),
            blocks=sum(total.blocks for total in copies),
            bytes=sum(total.bytes for total in copies),
            waiting_ms=sum(total.queued_ns for total in copies) / MS,
        )
        for name, copies in totals.items()
    }


def make_left(fleet: Fleet) -> dict[str, Any]:
    """Return the tokens that load policies left in lower tiers, as fields of a report."""
    counters = [core.offload.counters for worker in fleet.workers for core in worker.cores if core.offload is not None]
    tokens: Counter[str] = Counter()
    for counter in counters:
        tokens.update(counter.left_tokens)
    return {
        "left_requests": sum(counter.left_requests for counter in counters),
        "left_tokens": dict(sorted(tokens.items())),
    }


def make_pulls(fleet: Fleet, totals: RecordTotals) -> PullReport | None:
    """Report on pulls between workers; ``None`` if they don't pull."""
    config = fleet.config.peer_pull
    if config is None:
        return None
    counters = [core.offload.counters.pulls for core in _cores(fleet) if core.offload is not None]
    refused: Counter[str] = Counter()
    for pulls in counters:
        refused.update(pulls.refused)
    landed = sum(pulls.landed for pulls in counters)
    return PullReport(
        source=config.source,
        tokens=share(
            totals.admitted["pulled"],
            totals.admitted["input"],
            f"prompt tokens pulled from another worker / {ADMITTED}",
        ),
        begun=sum(pulls.begun for pulls in counters),
        landed=landed,
        ms=sum(pulls.ns for pulls in counters) / max(1, landed) / MS,
        gone=sum(pulls.gone for pulls in counters),
        failed=sum(pulls.failed for pulls in counters),
        busy=sum(pulls.busy for pulls in counters),
        no_room=sum(pulls.no_room for pulls in counters),
        refused=dict(sorted(refused.items())),
    )


def _cores(fleet: Fleet) -> list[EngineCore]:
    return [core for worker in fleet.used for core in worker.cores]
