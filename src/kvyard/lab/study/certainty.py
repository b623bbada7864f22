"""Certainty of a choice, given the error of its times on published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvyard.engine.timing.error_range import Load, RunClass, order_error
from kvyard.replay.report import Report
from kvyard.replay.report.metrics import Metric
from kvyard.replay.report.ranges import load_of
from kvyard.replay.report.report import StatedRange
from kvyard.replay.report.slo import WANTED, Limit


class Evidence(msgspec.Struct, frozen=True):
    """Known error of a run's figures."""

    ranges: Mapping[str, StatedRange] = {}
    classes: frozenset[RunClass | None] = frozenset()
    load: Load = "below"


def evidence_of(report: Report) -> Evidence:
    """Return the evidence for the error of a report's figures."""
    classes = frozenset(timing.run_class for timing in report.timing)
    return Evidence(report.ranges, classes, load_of(report.latency, report.loading))


def order_text(metric: Metric, better: tuple[str, float, Evidence], other: tuple[str, float, Evidence]) -> str:
    """Say whether the order of two choices, each with its name, its value and its evidence, stands in spite of the error; empty
    without evidence.
    """
    (name, value, known), (second, next_value, second_known) = better, other
    low, high = sorted((value, next_value))
    if low <= 0 or low == high:
        return ""
    if known.classes == second_known.classes and None not in known.classes and known.classes:
        return _common_error(metric, name, second, high / low, known, second_known)
    ranges = known.ranges.get(metric.name), second_known.ranges.get(metric.name)
    if ranges[0] is None or ranges[1] is None:
        return ""
    shown = " and ".join(_range_text(metric, stated) for stated in ranges if stated is not None)
    if ranges[0].high < ranges[1].low or ranges[1].high < ranges[0].low:
        return f"The order of {name} and {second} is safe: their ranges don't overlap ({shown})."
    return f"{name} and {second} lie within the error of each other in {metric.title}: {shown} overlap."


def _common_error(metric: Metric, name: str, second: str, ratio: float, known: Evidence, second_known: Evidence) -> str:
    """Return the error of a ratio of two choices on the same card, model and engine, whose errors are mostly equal."""
    load: Load = "above" if "above" in (known.load, second_known.load) else "below"
    order = order_error(metric.name, load)
    if order is None:
        return ""
    if ratio < order.safe:
        return (
            f"{name} and {second} lie within the error of each other in {metric.title}: they are {ratio - 1:.0%} apart, and "
            f"predictions of published runs ranked two choices right nine times in ten only if they were {order.safe - 1:.0%} "
            f"apart or more."
        )
    stated = known.ranges.get(metric.name)
    unsure = f", although the value isn't ({_range_text(metric, stated)})" if stated is not None else ""
    return (
        f"The order of {name} and {second} is safe{unsure}: they share most of the error, and of published pairs that were "
        f"{order.safe - 1:.0%} apart or more nine in ten were in the right order."
    )


def limits_text(limits: Sequence[Limit], known: Evidence) -> str:
    """Say which limits lie within the range of a choice that keeps them, so that meeting them isn't sure; else empty."""
    doubts = []
    for limit in limits:
        stated, metric = known.ranges.get(limit.name), WANTED[limit.name]
        if stated is not None and stated.low <= limit.value <= stated.high:
            doubts.append(
                f"{metric.title} is {_range_text(metric, stated)} with its error, and the limit is "
                f"{metric.limit_text(limit.value)}"
            )
    return f"Not sure: {'; '.join(doubts)}." if doubts else ""


def _range_text(metric: Metric, stated: StatedRange) -> str:
    return f"{metric.text(stated.low, unit=True)} to {metric.text(stated.high, unit=True)}"
