"""From a driver that has run to its report: the report of a replay, less what no client can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvyard import __version__
from kvyard.clock.units import MS, SECOND
from kvyard.replay.live.driver import LiveDriver
from kvyard.replay.record import Record
from kvyard.replay.report.make import digest_of, make_balance, make_goodput, make_lengths, make_throughput, statuses
from kvyard.replay.report.numbers import Histogram, Spread, histogram, spread, weighted
from kvyard.replay.report.report import LiveReport, Report, Share, Slo, WorkerReport, share
from kvyard.replay.report.series import make_series

ABSENT = ("queue time", "why prefixes ended", "preemptions", "tiers and transfers", "what the router saw")
ANSWERED = "prompt tokens of requests whose answer says what was cached"
MOST_REASONS = 20
"""Different reasons for errors that a report names; the others are put together."""


def make_live_report(
    driver: LiveDriver,
    *,
    endpoint: str,
    model: str | None,
    label: str = "",
    trace: Mapping[str, object] | None = None,
    slo: Slo | None = None,
    config: Mapping[str, object] | None = None,
) -> Report:
    """What ``driver`` saw. ``config`` is what was set, where it is more than the driver's own settings."""
    records = list(driver.records.values())
    done = [record for record in records if record.status == "finished"]
    start = min((record.arrival for record in records), default=0)
    end = max((max(record.arrival, record.first_token, record.ended) for record in records), default=start)
    if driver.interrupted:
        end = max(end, driver.now())
    seconds = (end - start) / SECOND
    inputs = sum(record.input for record in records)
    outputs = sum(record.output for record in records)
    latency, histograms = _latency(driver, done)
    workers = _workers(records)
    told = [record for record in records if record.cached >= 0]
    absent = list(ABSENT)
    if not told:
        absent.append("what was cached, which this endpoint doesn't say")
    if not workers:
        absent.append("workers")
    return Report(
        made_by=__version__,
        label=label,
        trace=dict(trace or {}),
        digest=digest_of(records),
        config=dict(config) if config is not None else msgspec.to_builtins(driver.config),
        complete=not driver.interrupted,
        duration_s=seconds,
        requests=statuses(records),
        input_tokens=inputs,
        output_tokens=outputs,
        throughput=make_throughput(len(done), inputs, outputs, seconds),
        latency=latency,
        histograms=histograms,
        lengths=make_lengths(done),
        reuse=_reuse(told),
        misses={},
        missed_tokens=_computed(told),
        goodput=make_goodput(done, slo, seconds) if slo is not None else None,
        balance=make_balance(workers) if workers else {},
        workers=workers,
        series=make_series(records, [worker.name for worker in workers], start, end),
        live=LiveReport(
            endpoint=endpoint,
            model=model,
            speed=driver.config.speed,
            lateness=spread(driver.lateness, MS),
            errors=_reasons(driver),
            inexact=driver.inexact,
            absent=absent,
        ),
    )


def _latency(driver: LiveDriver, done: Sequence[Record]) -> tuple[dict[str, Spread], dict[str, Histogram]]:
    longer = [record for record in done if record.output > 1]
    lots: dict[str, Sequence[float]] = {
        "ttft": [record.first_token - record.arrival for record in done],
        "tpot": [(record.ended - record.first_token) / (record.output - 1) for record in longer],
        "e2e": [record.ended - record.arrival for record in done],
    }
    gaps, counts = driver.gaps.columns()
    spreads = {"itl": weighted(gaps, counts, MS)} | {name: spread(values, MS) for name, values in lots.items()}
    drawn = {"itl": histogram(gaps, counts, MS)} | {name: histogram(values, None, MS) for name, values in lots.items()}
    return spreads, drawn


def _reuse(told: Sequence[Record]) -> dict[str, Share]:
    if not told:
        return {}
    part, whole = sum(record.cached for record in told), sum(record.input for record in told)
    of = f"prompt tokens that the endpoint says were cached / {ANSWERED}"
    return {"cached": share(part, whole, of), "all": share(part, whole, of)}


def _computed(told: Sequence[Record]) -> dict[str, Share]:
    if not told:
        return {}
    whole = sum(record.input for record in told)
    part = whole - sum(record.cached for record in told)
    return {"unknown": share(part, whole, f"prompt tokens that were computed / {ANSWERED}")}


def _workers(records: Sequence[Record]) -> list[WorkerReport]:
    """Who served what, where the endpoint said so of any request."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        if record.worker:
            by_name.setdefault(record.worker.partition("@")[0], []).append(record)
    return [
        WorkerReport(
            name=name,
            requests=len(mine),
            input_tokens=sum(record.input for record in mine),
            output_tokens=sum(record.output for record in mine),
            cached_tokens=sum(record.cached for record in mine) if all(record.cached >= 0 for record in mine) else None,
            evicted_blocks=None,
        )
        for name, mine in sorted(by_name.items())
    ]


def _reasons(driver: LiveDriver) -> dict[str, int]:
    found = sorted(driver.errors.items(), key=lambda item: (-item[1], item[0]))
    named = dict(found[:MOST_REASONS])
    others = sum(count for _, count in found[MOST_REASONS:])
    return named | {f"{len(found) - MOST_REASONS} other reasons": others} if others else named
