"""The part of a report that simulated and live runs have in common: all that follows from the records of their requests.

Much of it runs along time: records counted in windows, and a fleet's samples, small enough to be drawn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvyard import __version__
from kvyard.clock import MS, SECOND
from kvyard.replay.record import MISSES, Record
from kvyard.replay.report.numbers import Spread, histogram, spread, weighted
from kvyard.replay.report.report import TIERS, Goodput, PercentileLimit, Samples, Series, Slo, WorkerReport, share

if TYPE_CHECKING:
    from kvyard.replay.fleet import Fleet


WINDOWS = 120
PER_WINDOW = 8
"""Requests that a window should have on average; there are fewer windows where there are few requests."""
CELLS = 40_000
"""Values at most per quantity of all workers together; with very many workers there are fewer points in time."""
FEWEST = 40
"""But not fewer than this."""
_WHOLE = frozenset({"none", "partial_block", "unknown"})
"""Reasons that hold for all that is left of a prompt."""


def sources(record: Record) -> dict[str, int]:
    """Prompt tokens of an admitted request by tier (``TIERS``) or by a name of ``MISSES``; together they are the prompt.

    A prefix that another worker had may be short, and what follows it new: it counts as what it is, whatever ended the prefix.
    """
    loaded = record.loaded
    found = dict(zip(TIERS, (record.cached, *loaded))) if loaded else {TIERS[0]: record.cached}
    rest = record.input - (sum(found.values()) if loaded else record.cached)
    if record.miss in _WHOLE:
        return {**found, record.miss: rest}
    lost, elsewhere = record.lost, record.elsewhere
    if record.left:
        found["left"] = record.left
        rest -= record.left
    return {**found, "evicted": lost, "other_worker": elsewhere, "never_seen": rest - lost - elsewhere}


def _workers(record: Record) -> Sequence[str]:
    """Who had anything to do with a request: one worker, or one for its prompt and one for its answer."""
    stages = record.stages
    mine = (record.worker.partition("@")[0],) if record.worker else ()
    if stages is None or not stages.prefill_worker:
        return mine
    first = stages.prefill_worker.partition("@")[0]
    return mine if mine == (first,) else (first, *mine)


def points(wanted: int, workers: int) -> int:
    """How many points in time a quantity of so many workers may have."""
    return max(min(wanted, FEWEST), min(wanted, CELLS // max(1, workers)))


def make_series(records: Sequence[Record], names: Sequence[str], start: int, end: int) -> Series:
    """``records`` in windows from ``start`` to ``end``, nanoseconds. ``names`` are the workers, in order."""
    count = points(min(WINDOWS, max(FEWEST, len(records) // PER_WINDOW)), len(names))
    window = max(1, -(-(end - start + 1) // count))

    arrived, finished = [0] * count, [0] * count
    waits: list[list[int]] = [[] for _ in range(count)]
    prompts: dict[str, list[int]] = defaultdict(lambda: [0] * count)
    numbers = {name: number for number, name in enumerate(names)}
    routed = [[0] * count for _ in names]
    tokens = [[0] * count for _ in names]
    for record in records:
        here = (record.arrival - start) // window
        arrived[here] += 1
        if record.status == "finished":
            finished[(record.ended - start) // window] += 1
            waits[here].append(record.first_token - record.arrival)
        for name in _workers(record):
            number = numbers[name]
            routed[number][here] += 1
            tokens[number][here] += record.input
        if record.admitted >= 0:
            there = (record.admitted - start) // window
            for name, part in sources(record).items():
                if part:
                    prompts[name][there] += part
    spreads = [spread(lot, MS) if lot else None for lot in waits]
    return Series(
        window_s=window / SECOND,
        arrived=arrived,
        finished=finished,
        ttft_p50=[None if one is None else one.p50 for one in spreads],
        ttft_p99=[None if one is None else one.p99 for one in spreads],
        prompts={name: prompts[name] for name in (*TIERS, *MISSES) if any(prompts[name])},
        routed=routed,
        routed_tokens=tokens,
    )


def make_samples(fleet: Fleet, start: int) -> Samples:
    """The fleet's samples, with times counted from ``start``; fewer of them where there are very many workers."""
    used = [worker.number for worker in fleet.workers if worker.began]
    count = len(fleet.timeline.times)
    columns = fleet.timeline.as_dict(used, -(-count // max(1, points(count, len(used)))) or 1)
    times: list[float] = columns.pop("times_s")  # type: ignore[assignment]
    return Samples(times_s=[round(time - start / SECOND, 9) for time in times], values=columns)  # type: ignore[arg-type]


Counts = npt.NDArray[np.int64]


class Observations:
    """The records of a run, and when it began and ended."""

    def __init__(self, records: Sequence[Record], *, simulated: bool, now: int | None) -> None:
        """``simulated``: admissions are known. ``now`` is when the run was interrupted, ``None`` where it went to its end."""
        self._simulated = simulated
        self.records = records
        self.by_worker: dict[str, list[Record]] = {}
        for record in records:
            for name in _workers(record):
                self.by_worker.setdefault(name, []).append(record)
        self.complete = now is None
        self.done = [record for record in records if record.status == "finished"]
        self.start = min((record.arrival for record in records), default=0)
        ends = [max(record.arrival, record.admitted, record.first_token, record.ended) for record in records]
        self.end = max(max(ends, default=self.start), self.start if now is None else now)

    def fields(
        self,
        workers: list[WorkerReport],
        gaps: tuple[Counts, Counts],
        *,
        label: str,
        trace: Mapping[str, object] | None,
        slo: Slo | None,
    ) -> dict[str, Any]:
        """The fields of a ``Report`` that follow from records. ``gaps`` are those between tokens, and how often each was."""
        seconds = (self.end - self.start) / SECOND
        inputs = sum([record.input for record in self.records])
        outputs = sum([record.output for record in self.records])
        amounts = {"requests": len(self.done), "input_tokens": inputs, "output_tokens": outputs}
        statuses = Counter(record.status or "unfinished" for record in self.records)
        lots = self._latencies()
        latency = {"itl": weighted(*gaps, MS)} | {name: spread(values, MS) for name, values in lots.items()}
        return {
            "made_by": __version__,
            "label": label,
            "trace": dict(trace or {}),
            "digest": self._digest(),
            "complete": self.complete,
            "duration_s": seconds,
            "requests": {"all": len(self.records), **dict(sorted(statuses.items()))},
            "input_tokens": inputs,
            "output_tokens": outputs,
            "throughput": {f"{name}_per_s": amount / seconds if seconds else 0.0 for name, amount in amounts.items()},
            "latency": latency,
            "histograms": {"itl": histogram(*gaps, MS)}
            | {name: histogram(values, None, MS) for name, values in lots.items()},
            "lengths": {
                "input": spread([record.input for record in self.done]),
                "output": spread([record.output for record in self.done]),
            },
            "goodput": None if slo is None else self._goodput(slo, seconds, latency),
            "balance": _balance(workers) if workers else {},
            "workers": workers,
            "series": make_series(self.records, [worker.name for worker in workers], self.start, self.end),
        }

    def _latencies(self) -> dict[str, Sequence[float]]:
        longer = [record for record in self.done if record.output > 1]
        found: dict[str, Sequence[float]] = {
            "ttft": [record.first_token - record.arrival for record in self.done],
            "tpot": [(record.ended - record.first_token) / (record.output - 1) for record in longer],
            "e2e": [record.ended - record.arrival for record in self.done],
        }
        if self._simulated:
            found["queue"] = [record.admitted - record.arrival for record in self.done]
        return found

    def _digest(self) -> str:
        """Of the requests' ids and lengths."""
        rows = sorted([(record.id, record.input, record.wanted) for record in self.records])
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(rows))

    def _goodput(self, slo: Slo, seconds: float, latency: Mapping[str, Spread]) -> Goodput:
        ttft, itl, e2e = (slo.limit(name) for name in ("ttft", "itl", "e2e"))

        def good(record: Record) -> bool:
            if ttft is not None and record.first_token - record.arrival > ttft * MS:
                return False
            if e2e is not None and record.ended - record.arrival > e2e * MS:
                return False
            gaps = record.output - 1
            return itl is None or gaps < 1 or (record.ended - record.first_token) / gaps <= itl * MS

        percentiles: dict[str, PercentileLimit] = {}
        for name, limit in (slo.percentiles or {}).items():
            kind, _, percentile = name.partition("_")
            value = float(getattr(latency[kind], percentile))
            percentiles[name] = PercentileLimit(limit_ms=limit, value_ms=value, met=bool(self.done) and value <= limit)

        kept = [record for record in self.done if good(record)]
        return Goodput(
            slo_ms=msgspec.convert(
                msgspec.to_builtins(slo), Slo
            ),  # whole numbers become floats, as they would when read
            requests=share(len(kept), len(self.done), "finished requests within the SLO / finished requests"),
            requests_per_s=len(kept) / seconds if seconds else 0.0,
            output_tokens_per_s=sum(record.output for record in kept) / seconds if seconds else 0.0,
            percentiles=percentiles or msgspec.UNSET,
        )


def _balance(workers: Sequence[WorkerReport]) -> dict[str, float]:
    """How evenly work was spread, among those that compute prompts."""
    computing = [worker for worker in workers if worker.role != "decode" or worker.input_tokens]
    loads = np.array([worker.input_tokens for worker in computing], dtype=np.float64)
    mean = float(loads.mean())
    found = {
        "variation": float(loads.std() / mean) if mean else 0.0,
        "max_over_mean": float(loads.max() / mean) if mean else 0.0,
    }
    busy = [worker.busy for worker in workers if worker.busy is not None]
    return found | {"busy_min": min(busy), "busy_max": max(busy)} if busy else found
