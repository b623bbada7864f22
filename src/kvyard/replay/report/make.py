"""From a fleet that has run to its report. Reads, counts, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvyard import __version__
from kvyard.clock.units import MS, SECOND
from kvyard.events.types import LOWER_TIERS
from kvyard.replay.gaps import together
from kvyard.replay.record import MISSES, Record
from kvyard.replay.report.numbers import Histogram, Spread, histogram, spread, weighted
from kvyard.replay.report.report import Goodput, Report, RouterReport, Series, Share, Slo, WorkerReport, share
from kvyard.replay.report.series import make_samples, make_series
from kvyard.replay.report.tiers import make_loading, make_tiers, make_transfers

if TYPE_CHECKING:
    from kvyard.replay.fleet import Fleet

ADMITTED = "prompt tokens of admitted requests"
DEEDS = frozenset(
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
    done = [record for record in records if record.status == "finished"]
    start = min((record.arrival for record in records), default=0)
    end = max((max(record.arrival, record.admitted, record.ended) for record in records), default=start)
    if fleet.interrupted:
        end = max(end, fleet.now)
    seconds = (end - start) / SECOND
    inputs = sum(record.input for record in records)
    outputs = sum(record.output for record in records)
    admitted = [record for record in records if record.admitted >= 0]
    latency, histograms = _latency(fleet, done)
    duration = max(1, end - start)
    workers = _workers(fleet, records, duration)
    series = make_series(records, [worker.name for worker in fleet.workers], start, end)
    return Report(
        made_by=__version__,
        label=label,
        trace=dict(trace or {}),
        digest=digest_of(records),
        config=msgspec.json.decode(msgspec.json.encode(fleet.config)),
        complete=not fleet.interrupted,
        duration_s=seconds,
        requests=statuses(records),
        input_tokens=inputs,
        output_tokens=outputs,
        throughput=make_throughput(len(done), inputs, outputs, seconds),
        latency=latency,
        histograms=histograms,
        lengths=make_lengths(done),
        reuse=_reuse(admitted),
        misses=_misses(admitted),
        missed_tokens=_missed_tokens(series, admitted),
        goodput=make_goodput(done, slo, seconds) if slo is not None else None,
        balance=make_balance(workers),
        router=_router(fleet, records),
        preemptions=sum(record.preemptions for record in records),
        tiers=make_tiers(fleet, duration),
        transfers=make_transfers(fleet),
        loading=make_loading(records),
        bounds=dict(bounds or {}),
        workers=workers,
        series=series,
        timeline=make_samples(fleet, start),
    )


def digest_of(records: Sequence[Record]) -> str:
    """Of the requests' ids and lengths."""
    rows = sorted((record.id, record.input, record.wanted) for record in records)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(rows))


def make_throughput(requests: int, inputs: int, outputs: int, seconds: float) -> dict[str, float]:
    """Requests finished and tokens, by second; nothing where no time passed."""
    amounts = {"requests_per_s": requests, "input_tokens_per_s": inputs, "output_tokens_per_s": outputs}
    return {name: amount / seconds if seconds else 0.0 for name, amount in amounts.items()}


def make_lengths(done: Sequence[Record]) -> dict[str, Spread]:
    """How long prompts and answers were."""
    return {
        "input": spread([record.input for record in done]),
        "output": spread([record.output for record in done]),
    }


def statuses(records: Sequence[Record]) -> dict[str, int]:
    """How many ended which way."""
    counts = Counter(record.status or "unfinished" for record in records)
    return {"all": len(records), **dict(sorted(counts.items()))}


def _latency(fleet: Fleet, done: Sequence[Record]) -> tuple[dict[str, Spread], dict[str, Histogram]]:
    longer = [record for record in done if record.output > 1]
    lots: dict[str, Sequence[float]] = {
        "ttft": [record.first_token - record.arrival for record in done],
        "tpot": [(record.ended - record.first_token) / (record.output - 1) for record in longer],
        "e2e": [record.ended - record.arrival for record in done],
        "queue": [record.admitted - record.arrival for record in done],
    }
    gaps, counts = _gaps(fleet)
    spreads = {"itl": weighted(gaps, counts, MS)} | {name: spread(values, MS) for name, values in lots.items()}
    drawn = {"itl": histogram(gaps, counts, MS)} | {name: histogram(values, None, MS) for name, values in lots.items()}
    return spreads, drawn


def _gaps(fleet: Fleet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every gap between two tokens, and how many requests had it."""
    return together([recorder.gaps for worker in fleet.workers for recorder in worker.recorders])


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


def make_goodput(done: Sequence[Record], slo: Slo, seconds: float) -> Goodput:
    """What of ``done`` was within ``slo``, in a run of ``seconds``."""

    def good(record: Record) -> bool:
        if slo.ttft is not None and record.first_token - record.arrival > slo.ttft * MS:
            return False
        if slo.e2e is not None and record.ended - record.arrival > slo.e2e * MS:
            return False
        gaps = record.output - 1
        return slo.itl is None or gaps < 1 or (record.ended - record.first_token) / gaps <= slo.itl * MS

    kept = [record for record in done if good(record)]
    return Goodput(
        slo_ms=msgspec.convert(msgspec.to_builtins(slo), Slo),  # whole numbers become floats, as they would when read
        requests=share(len(kept), len(done), "finished requests within the SLO / finished requests"),
        requests_per_s=len(kept) / seconds if seconds else 0.0,
        output_tokens_per_s=sum(record.output for record in kept) / seconds if seconds else 0.0,
    )


def make_balance(workers: Sequence[WorkerReport]) -> dict[str, float]:
    """How evenly work was spread."""
    loads = np.array([worker.input_tokens for worker in workers], dtype=np.float64)
    mean = float(loads.mean())
    found = {
        "variation": float(loads.std() / mean) if mean else 0.0,
        "max_over_mean": float(loads.max() / mean) if mean else 0.0,
    }
    busy = [worker.busy for worker in workers if worker.busy is not None]
    return found | {"busy_min": min(busy), "busy_max": max(busy)} if busy else found


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


def _workers(fleet: Fleet, records: Sequence[Record], duration: int) -> list[WorkerReport]:
    by_name: dict[str, list[Record]] = {worker.name: [] for worker in fleet.workers}
    for record in records:
        if record.worker:
            by_name[record.worker.partition("@")[0]].append(record)
    out = []
    for worker in fleet.workers:
        mine = by_name[worker.name]
        out.append(
            WorkerReport(
                name=worker.name,
                role=worker.role,
                requests=len(mine),
                input_tokens=sum(record.input for record in mine),
                output_tokens=sum(record.output for record in mine),
                cached_tokens=sum(record.cached for record in mine),
                loaded_tokens=sum(sum(record.loaded) for record in mine),
                computed_tokens=sum(recorder.computed for recorder in worker.recorders),
                busy=max(core.busy_ns for core in worker.cores) / duration,
                preemptions=sum(core.scheduler.preemptions for core in worker.cores),
                passes=sum(core.passes for core in worker.cores),
                evicted_blocks=sum(core.scheduler.manager.pool.evicted for core in worker.cores),
                tiers={name: count for name, count in worker.tier_counters().items() if name in DEEDS},
            )
        )
    return out
