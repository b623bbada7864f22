"""The part of a report that simulated and live runs have in common: all that follows from the records of their requests.

Much of it runs along time: records counted in windows, and a fleet's samples, small enough to be drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard import __version__
from kvyard.clock import MS, SECOND
from kvyard.integers import ceil_div
from kvyard.replay.record import MISSES
from kvyard.replay.records import MISS_NAMES, Records, Rows
from kvyard.replay.report.numbers import Spread, histogram, share, weighted
from kvyard.replay.report.report import TIERS, Goodput, Samples, Series, Slo, WorkerReport
from kvyard.replay.report.session_report import SessionsReport
from kvyard.replay.report.sketch import PercentileError, Values
from kvyard.replay.report.slo import judged_percentiles
from kvyard.replay.report.tenants import TierLedgers, make_tenants
from kvyard.replay.report.totals import FINISHED, RecordTotals, digest

if TYPE_CHECKING:
    from kvyard.replay.fleet import Fleet


Counts = npt.NDArray[np.int64]

WINDOWS = 120
PER_WINDOW = 8
"""Requests that a window should have on average; there are fewer windows if there are few requests."""
CELLS = 40_000
"""Values at most per quantity of all workers together; with very many workers there are fewer points in time."""
FEWEST = 40
"""But not fewer than this."""
_WHOLE = frozenset({"none", "partial_block", "unknown"})
"""Reasons that hold for all that is left of a prompt."""


def _sources(rows: Rows) -> dict[str, Counts]:
    """Return prompt tokens of admitted requests by tier (``TIERS``) or by a name of ``MISSES``; together they are their
    prompts.

    A prefix that another worker had may be short, and what follows it new: it counts as what it is, whatever ended the prefix.
    """
    parts_of = dict(zip(TIERS, (rows["cached"], *rows["loaded"].T), strict=False))
    rest = rows["input"] - sum(part.astype(np.int64) for part in parts_of.values())
    whole = np.zeros(len(rows), dtype=np.bool_)
    for name in _WHOLE:
        here = rows["miss"] == MISS_NAMES.index(name)
        parts_of[name] = np.where(here, rest, 0)
        whole |= here
    parts = {"left": rows["left"], "evicted": rows["lost"], "other_worker": rows["elsewhere"]}
    parts_of |= {name: np.where(whole, 0, part) for name, part in parts.items()}
    parts_of["never_seen"] = np.where(whole, 0, rest - rows["left"] - rows["lost"] - rows["elsewhere"])
    return parts_of


def points(wanted: int, workers: int) -> int:
    """Return the number of points in time for a quantity of ``workers`` workers."""
    return max(min(wanted, FEWEST), min(wanted, CELLS // max(1, workers)))


def make_series(records: Records, totals: RecordTotals, names: Sequence[str], start: int, end: int) -> Series:
    """Return ``records`` in windows from ``start`` to ``end``, nanoseconds. ``names`` are the workers, in order."""
    count = points(min(WINDOWS, max(FEWEST, len(records) // PER_WINDOW)), len(names))
    window = max(1, ceil_div(end - start + 1, count))

    arrived, finished = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    waits = [Values(MS, exact=totals.exact) for _ in range(count)]
    prompts: dict[str, Counts] = defaultdict(lambda: np.zeros(count, dtype=np.int64))
    numbers = {name: number for number, name in enumerate(names)}
    called = [numbers.get(name, -1) for name in totals.names]
    routed, tokens = (np.zeros((len(names), count), dtype=np.int64) for _ in range(2))
    for part in records.parts():
        rows = part.rows
        here = (rows["arrival"] - start) // window
        arrived += np.bincount(here, minlength=count)
        done = rows["status"] == FINISHED
        finished += np.bincount((rows["ended"][done] - start) // window, minlength=count)
        _add_waits(waits, here[done], (rows["first_token"] - rows["arrival"])[done])
        for which, workers in totals.involved(part, called):
            np.add.at(routed, (workers, here[which]), 1)
            np.add.at(tokens, (workers, here[which]), rows["input"][which])
        admitted = rows[rows["admitted"] >= 0]
        there = (admitted["admitted"] - start) // window
        for name, amounts in _sources(admitted).items():
            np.add.at(prompts[name], there, amounts)
    spreads = [wait.spread() for wait in waits]
    return Series(
        window_s=window / SECOND,
        arrived=arrived.tolist(),
        finished=finished.tolist(),
        ttft_p50=[spread.p50 if spread.count else None for spread in spreads],
        ttft_p99=[spread.p99 if spread.count else None for spread in spreads],
        prompts={name: prompts[name].tolist() for name in (*TIERS, *MISSES) if prompts[name].any()},
        routed=routed.tolist(),
        routed_tokens=tokens.tolist(),
    )


def _add_waits(waits: Sequence[Values], here: Counts, ttfts: Counts) -> None:
    """Note each of ``ttfts`` in the window that ``here`` says."""
    order = np.argsort(here, kind="stable")
    windows, starts = np.unique(here[order], return_index=True)
    for window, lot in zip(windows.tolist(), np.split(ttfts[order], starts[1:]), strict=False):
        waits[window].add(lot)


def make_samples(fleet: Fleet, start: int) -> Samples:
    """Return the fleet's samples, with times counted from ``start``; fewer of them where there are very many workers."""
    used = [worker.number for worker in fleet.workers if worker.began]
    count = len(fleet.timeline.times)
    columns = fleet.timeline.as_dict(used, ceil_div(count, max(1, points(count, len(used)))) or 1)
    times: list[float] = columns.pop("times_s")  # type: ignore[assignment]
    return Samples(times_s=[round(time - start / SECOND, 9) for time in times], values=columns)  # type: ignore[arg-type]


class Observations:
    """The records of a run, and when it began and ended."""

    def __init__(
        self, records: Records, *, simulated: bool, now: int | None, slo: Slo | None = None, block_size: int = 0
    ) -> None:
        """``simulated``: admissions are known. ``now`` is when the run was interrupted, ``None`` if it went to its end.
        ``block_size`` is the router's.
        """
        self._simulated = simulated
        self._slo = slo
        self.records = records
        self.totals = totals = RecordTotals(records, block_size=block_size, slo=slo)
        self.by_worker = totals.workers()
        self.complete = now is None
        self.start = totals.start
        self.end = max(totals.end, self.start if now is None else now)

    def fields(
        self,
        workers: list[WorkerReport],
        gaps: tuple[Counts, Counts],
        *,
        label: str,
        trace: Mapping[str, object] | None,
        sessions: SessionsReport | None,
        residency: Mapping[str, TierLedgers] | None = None,
    ) -> dict[str, Any]:
        """Return the fields of a ``Report`` that follow from records. ``gaps`` are those between tokens, and how often each
        was.
        """
        totals = self.totals
        tenants = make_tenants(self.records, residency)
        seconds = (self.end - self.start) / SECOND
        inputs, outputs = totals.all["input"], totals.all["output"]
        amounts = {"requests": totals.statuses["finished"], "input_tokens": inputs, "output_tokens": outputs}
        statuses = {name: count for name, count in sorted(totals.statuses.items()) if count}
        lots = {name: totals.latency[name] for name in ("ttft", "tpot", "e2e", "queue")}
        if not self._simulated:
            del lots["queue"]
        latency = {"itl": weighted(*gaps, MS)} | {name: values.spread() for name, values in lots.items()}
        return {
            "made_by": __version__,
            "label": label,
            "trace": dict(trace or {}),
            "digest": digest(self.records),
            "complete": self.complete,
            "duration_s": seconds,
            "requests": {"all": totals.count, **statuses},
            "input_tokens": inputs,
            "output_tokens": outputs,
            "throughput": {f"{name}_per_s": amount / seconds if seconds else 0.0 for name, amount in amounts.items()},
            "latency": latency,
            "percentiles": msgspec.UNSET if totals.exact else PercentileError(),
            "histograms": {"itl": histogram(*gaps, MS)} | {name: values.histogram() for name, values in lots.items()},
            "lengths": {name: values.spread() for name, values in totals.lengths.items()},
            "sessions": msgspec.UNSET if sessions is None else sessions,
            "tenants": msgspec.UNSET if tenants is None else tenants,
            "goodput": None if self._slo is None else self._goodput(self._slo, seconds, latency, sessions),
            "balance": _balance(workers) if workers else {},
            "workers": workers,
            "series": make_series(self.records, totals, [worker.name for worker in workers], self.start, self.end),
        }

    def _goodput(
        self, slo: Slo, seconds: float, latency: Mapping[str, Spread], sessions: SessionsReport | None
    ) -> Goodput:
        done, kept = self.totals.statuses["finished"], self.totals.good
        count = self.totals.count
        rejected = self.totals.statuses.get("rejected", 0) / max(1, count)
        completion = None if sessions is None else sessions.completion
        percentiles = judged_percentiles(slo, latency, done, rejected, completion)
        return Goodput(
            slo_ms=msgspec.convert(
                msgspec.to_builtins(slo), Slo
            ),  # whole numbers become floats, as they would when read
            requests=share(kept["requests"], count, "requests within the SLO / all requests, rejected ones included"),
            rejected=rejected,
            requests_per_s=kept["requests"] / seconds if seconds else 0.0,
            output_tokens_per_s=kept["output"] / seconds if seconds else 0.0,
            percentiles=percentiles or msgspec.UNSET,
        )


def _balance(workers: Sequence[WorkerReport]) -> dict[str, float]:
    """Return the balance of work among workers that compute prompts."""
    computing = [worker for worker in workers if worker.role != "decode" or worker.input_tokens]
    loads = np.array([worker.input_tokens for worker in computing], dtype=np.float64)
    mean = float(loads.mean())
    balance = {
        "variation": float(loads.std() / mean) if mean else 0.0,
        "max_over_mean": float(loads.max() / mean) if mean else 0.0,
    }
    busy = [worker.busy for worker in workers if worker.busy is not None]
    return balance | {"busy_min": min(busy), "busy_max": max(busy)} if busy else balance
