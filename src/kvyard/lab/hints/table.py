"""What hints are worth as tables: for a terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.files import write_whole
from kvyard.lab.hints.study import FIGURES, HintPoint, HintStudy
from kvyard.lab.sweep.table import Figure, shown_value, times

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = ("reuse", "ttft_mean_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p99_ms")
"""In the terminal, where there is only so much room."""


def known(study: HintStudy) -> list[Figure]:
    """The figures that the study has."""
    return [figure for figure in FIGURES if any(figure.name in point.figures for point in study.points)]


def by_hint(study: HintStudy) -> dict[str, list[HintPoint]]:
    """Its points by kind of hint, in order of false rate and recall."""
    found: dict[str, list[HintPoint]] = {}
    for point in sorted(study.points, key=lambda one: (one.false, one.recall)):
        found.setdefault(point.hint, []).append(point)
    return found


def gain_text(point: HintPoint, name: str) -> str:
    """A difference to no hints as people say it: points of reuse, or milliseconds."""
    gain = point.gains.get(name)
    if gain is None:
        return "–"
    if name == "reuse":
        return f"{100 * gain:+.1f}"
    return f"{gain:+.1f}" if abs(gain) < 9.95 else f"{gain:+.0f}"


def verdict(points: list[HintPoint]) -> str:
    """What a hint of middling recall, never wrong, would be worth; empty where that wasn't run."""
    right = [one for one in points if not one.false and 0 < one.recall < 1]
    if not right:
        return ""
    one = min(right, key=lambda point: abs(point.recall - 0.5))
    text = f"given at {one.recall:.0%} of the places where it could be, and never wrongly, it is worth "
    text += f"{gain_text(one, 'reuse')} points of reuse"
    if "ttft_mean_ms" in one.gains:
        text += f" and {gain_text(one, 'ttft_mean_ms')} ms of mean TTFT"
    return text


def censoring(study: HintStudy) -> str:
    """How much the trace's end flatters hints, in a sentence."""
    before, after = study.censored
    if after <= before:
        return "The trace's end cuts no more conversations off than others end before it."
    return (
        f"{after:.0%} of the requests in the last tenth of the trace are their conversation's last, and {before:.0%} before "
        "that: its end cuts conversations off, which flatters hints about ends."
    )


def print_study(study: HintStudy, console: Console | None = None) -> None:
    """Print a table per kind of hint."""
    from rich.console import Console as Terminal
    from rich.table import Table

    console = console or Terminal(width=None if sys.stdout.isatty() else 120)
    columns = [figure for figure in known(study) if figure.name in SHOWN]
    console.print(f"{study.trace}: {study.setting}", markup=False, highlight=False)
    for hint, points in by_hint(study).items():
        table = Table(box=None, header_style="bold", pad_edge=False, title=f"\n{hint}", title_justify="left")
        for name in ("recall", "false"):
            table.add_column(name, justify="right")
        for figure in columns:
            table.add_column(figure.head, justify="right")
            if figure.name in ("reuse", "ttft_mean_ms"):
                table.add_column("points" if figure.share else "ms", justify="right")
        for point in points:
            cells = [f"{point.recall:.2f}", f"{point.false:.2f}"]
            for figure in columns:
                cells.append(shown_value(figure, point.figures[figure.name]))
                if figure.name in ("reuse", "ttft_mean_ms"):
                    cells.append(gain_text(point, figure.name))
            table.add_row(*cells)
        console.print(table)
        said = verdict(points)
        if said:
            console.print(f"{hint}: {said}.", markup=False, highlight=False)
    console.print()
    console.print(censoring(study), style="dim", markup=False, highlight=False)
    if study.sweep is not None:
        console.print(times(study.sweep), style="dim", markup=False, highlight=False)
        for failure in study.sweep.failures:
            console.print(f"{failure.point.label}: {failure.why}", style="yellow", markup=False)


def rows(study: HintStudy) -> list[dict[str, Any]]:
    """A row per point, with all figures, gains and spreads."""
    found = []
    for points in by_hint(study).values():
        for one in points:
            row: dict[str, Any] = {"hint": one.hint, "recall": one.recall, "false": one.false, **one.figures}
            row |= {f"{name}_gain": value for name, value in one.gains.items()}
            found.append(row | {f"{name}_spread": value for name, value in one.spread.items()})
    return found


def write_csv(study: HintStudy, path: Path) -> None:
    """Write all rows. Raises ``KvyardError`` where that can't be done."""
    text = io.StringIO()
    names = ["hint", "recall", "false"]
    for kind in ("", "_gain", "_spread"):
        names += [f"{figure.name}{kind}" for figure in known(study)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(study))
    write_whole(path, text.getvalue())


def write_json(study: HintStudy, path: Path) -> None:
    """Write all rows and what they are about. Raises ``KvyardError`` where that can't be done."""
    before, after = study.censored
    value = {
        "kind": "kvyard hints",
        "trace": study.trace,
        "setting": study.setting,
        "last_of_conversation": {"before": before, "last_tenth": after},
        "points": rows(study),
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
