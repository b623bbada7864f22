"""The ranges that a report states for its own figures, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvyard.engine.timing.error_range import KNEE, Load, error_range
from kvyard.replay.report.numbers import Spread
from kvyard.replay.report.report import StatedRange, TimingReport

RANGED = ("ttft", "itl", "tpot", "e2e")
"""Latencies that have ranges."""
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("requests_per_s", "output_tokens_per_s")
PUBLISHED, HELD_OUT, PASSES = "published", "held-out", "passes"
"""Basis of a range: published runs, a run's own time that was held out of a fit, errors of single passes."""


def make_ranges(
    timings: Sequence[TimingReport], latency: Mapping[str, Spread], throughput: Mapping[str, float], loading: Spread
) -> dict[str, StatedRange]:
    """Return the ranges of a run's figures by metric. A metric without evidence for one of the run's timings has none."""
    if not timings:
        return {}
    load = load_of(latency, loading)
    ranges = {}
    for metric, value in _figures(latency, throughput):
        parts = [_one(metric, value, timing, load) for timing in timings]
        stated = [part for part in parts if part is not None]
        if len(stated) == len(parts):
            widest = max(
                stated,
                key=lambda stated_range: stated_range.high / stated_range.low if stated_range.low else float("inf"),
            )
            ranges[metric] = StatedRange(
                low=min(part.low for part in stated),
                high=max(part.high for part in stated),
                basis=widest.basis,
                of=widest.of,
                runs=widest.runs,
                sources=widest.sources,
            )
    return ranges


def load_of(latency: Mapping[str, Spread], loading: Spread) -> Load:
    """Return whether requests wait long enough for the load to be above the knee."""
    queue, first, whole = (latency.get(name) for name in ("queue", "ttft", "e2e"))
    if queue is None or first is None or whole is None or not whole.count or not first.mean:
        return "below"
    loads = min(queue.mean, loading.mean * loading.count / whole.count)
    return "above" if queue.mean - loads >= KNEE * first.mean else "below"


def _figures(latency: Mapping[str, Spread], throughput: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    for name in RANGED:
        spread = latency.get(name)
        if spread is not None and spread.count:
            yield from ((f"{name}_{statistic}", getattr(spread, statistic)) for statistic in STATISTICS)
    yield from ((name, throughput[name]) for name in RATES if throughput.get(name))


def _one(metric: str, value: float, timing: TimingReport, load: Load) -> StatedRange | None:
    kind = metric.partition("_")[0]
    error = timing.held_out.get("tpot" if kind == "itl" else kind)
    if error is not None or (timing.error is not None and kind in RANGED):
        share = error if error is not None else timing.error or 0.0
        low, high = value * max(0.0, 1 - share), value * (1 + share)
        return StatedRange(low=low, high=high, basis=PASSES if error is None else HELD_OUT)
    if timing.run_class is None:
        return None
    of = timing.run_class
    published = error_range(
        metric, card=of.card, dtype=of.dtype, model_class=of.model_class, engine=of.engine, load=load
    )
    if published is None:
        return None
    low, high = published.around(value)
    return StatedRange(
        low=low, high=high, basis=PUBLISHED, of=published.words, runs=published.runs, sources=published.sources
    )
