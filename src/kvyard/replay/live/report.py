"""From a driver that has run to its report: the report of a replay, less what no client can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvyard.clock.units import MS
from kvyard.replay.live.driver import LiveDriver
from kvyard.replay.record import Record
from kvyard.replay.report.common import Observations
from kvyard.replay.report.numbers import spread
from kvyard.replay.report.report import LiveReport, Report, Share, Slo, WorkerReport, share

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
    seen = Observations(records, simulated=False, now=driver.now() if driver.interrupted else None)
    workers = [_worker(name, mine) for name, mine in sorted(seen.by_worker.items())]
    told = [record for record in records if record.cached >= 0]
    absent = list(ABSENT)
    if not told:
        absent.append("what was cached, which this endpoint doesn't say")
    if not workers:
        absent.append("workers")
    return Report(
        **seen.fields(workers, driver.gaps.columns(), label=label, trace=trace, slo=slo),
        config=dict(config) if config is not None else msgspec.to_builtins(driver.config),
        reuse=_reuse(told),
        misses={},
        missed_tokens=_computed(told),
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


def _worker(name: str, mine: Sequence[Record]) -> WorkerReport:
    return WorkerReport(
        name=name,
        requests=len(mine),
        input_tokens=sum(record.input for record in mine),
        output_tokens=sum(record.output for record in mine),
        cached_tokens=sum(record.cached for record in mine) if all(record.cached >= 0 for record in mine) else None,
        evicted_blocks=None,
    )


def _reasons(driver: LiveDriver) -> dict[str, int]:
    found = sorted(driver.errors.items(), key=lambda item: (-item[1], item[0]))
    named = dict(found[:MOST_REASONS])
    others = sum(count for _, count in found[MOST_REASONS:])
    return named | {f"{len(found) - MOST_REASONS} other reasons": others} if others else named
