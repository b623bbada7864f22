"""A comparison of runs: the same measure of each, who is best, and how far the others are from the first. Plain values."""

from typing import Literal

import msgspec

from kvyard.replay.report.words import amount, measured, percent, whole

Unit = Literal["ms", "per_s", "share", "count", "ratio", "bytes"]
Better = Literal["low", "high", ""]

NOISE = 0.005
"""Values that differ by no more are equally good."""


class ComparedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A measure over all runs."""

    key: str
    title: str
    part: str
    """The heading it belongs under."""
    unit: Unit
    better: Better
    values: list[float | None]
    """By run; null where a run has none."""
    changes: list[float | None]
    """Against the first run, relative to it; shares are differences instead."""
    best: list[int]
    """Numbers of the runs with the best value, where there is a best and not all are."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Runs side by side."""

    runs: list[str]
    notes: list[str]
    """What makes the comparison less than fair."""
    timing: str
    """Where the times of the runs come from, and what their errors mean for the changes; empty for live runs."""
    settings: dict[str, list[object]]
    """What was set differently, by the path in the configuration."""
    lines: list[ComparedLine]
    verdict: list[str] = msgspec.field(default_factory=list)
    """Which run is better for what, and by how much, in sentences."""


def value_text(line: ComparedLine, number: int) -> str:
    """A run's value."""
    value = line.values[number]
    if value is None:
        return "–"
    if line.unit == "share":
        return percent(value)
    if line.unit == "bytes":
        return amount(value)
    return whole(value) if line.unit == "count" else f"{value:.3f}" if line.unit == "ratio" else measured(value)


def change_text(line: ComparedLine, number: int) -> str:
    """How far a run is from the first; empty for the first itself."""
    change = line.changes[number]
    if change is None or not number:
        return ""
    text = f"{change * 100:+.1f}"
    if float(text) == 0:
        text = "±0"
    return f"{text} pt" if line.unit == "share" else f"{text}%"
