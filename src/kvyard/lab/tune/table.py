"""A search's answer for a terminal, and all its points as CSV and as JSON."""

import csv
import io
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvyard.lab.tune.goals import COST, FIGURES, shown_figure
from kvyard.lab.tune.look import Look
from kvyard.lab.tune.tuned import Tuned
from kvyard.lab.tune.words import asked, doubts, tested, verdict, wanted

MOST_ROWS = 8
FURTHER = ("reuse", "ttft_mean", "ttft_p99", "itl_p99")
"""Shown beside what was wanted."""


def shown(tuned: Tuned) -> list[Look]:
    """The points of a table: the front, or the best with those that come next."""
    if len(tuned.goals) > 1 and tuned.met:
        best = tuned.best
        return best[:: max(1, -(-len(best) // MOST_ROWS))]
    done = {str(one.point): one for one in reversed(tuned.looks) if one.state == "done"}.values()
    return sorted(done, key=lambda one: (max(0.0, one.violation), one.losses(tuned.goals), one.number))[:MOST_ROWS]


def columns(tuned: Tuned) -> list[str]:
    """Names of figures, of a table."""
    return list(dict.fromkeys([*wanted(tuned), *FURTHER]))


def dimensions(tuned: Tuned) -> list[str]:
    """Names of what is searched, options of policies included."""
    own = [f"router.{policy}.{name}" for policy, options in tuned.space.options.items() for name in options]
    return [*tuned.space.dimensions, *own]


def print_tuned(tuned: Tuned, console: Console | None = None) -> None:
    """Print what was asked, the points that come first, and the answer."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"[bold]{asked(tuned)}[/bold]", highlight=False)
    names = columns(tuned)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in [*tuned.space.dimensions, *(["options"] if tuned.space.options else [])]:
        table.add_column(name, overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    if tuned.limits:
        table.add_column("SLO")
    answer = tuned.answer
    for one in shown(tuned):
        cells = [str(one.point[name]) for name in tuned.space.dimensions]
        if tuned.space.options:
            options = one.point.get("router_options")
            cells.append(
                " ".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, dict) else ""
            )
        cells += [shown_figure(one.figures, name).removesuffix(" ms") for name in names]
        if tuned.limits:
            cells.append("met" if one.met else "missed")
        table.add_row(*cells, style="bold" if one is answer or (answer and one.point == answer.point) else "")
    console.print(table)
    for line in [verdict(tuned), tested(tuned)]:
        if line:
            console.print(line, markup=False, highlight=False)
    for line in doubts(tuned):
        console.print(line, style="yellow", markup=False, highlight=False)


def rows(tuned: Tuned) -> list[dict[str, Any]]:
    """A row per point, in the order in which they were asked for."""
    answer = tuned.answer
    front = {one.number for one in tuned.best}
    found = []
    for one in tuned.looks:
        flat = tuned.space.flat(one.point)
        found.append(
            {
                "trial": one.number,
                **{name: flat.get(name) for name in dimensions(tuned)},
                "state": one.state,
                "best": one.number in front,
                "answer": answer is not None and one.number == answer.number,
                "slo_met": one.met if one.state == "done" else None,
                **{name: one.cost if name == COST else one.figures.get(name) for name in FIGURES},
                **{f"test_{name}": one.test.get(name) for name in columns(tuned) if name != COST},
                "why": one.why,
            }
        )
    return found


def as_csv(tuned: Tuned) -> str:
    """All rows."""
    found = rows(tuned)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]) if found else ["trial"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_json(tuned: Tuned) -> bytes:
    """What was asked, the answer in words and as settings, and all rows."""
    answer = tuned.answer
    value = {
        "kind": "kvyard tune",
        "trace": tuned.trace,
        "goals": list(map(str, tuned.goals)),
        "slo": {one.name: one.value for one in tuned.limits},
        "prices": tuned.prices,
        "requests": tuned.parts.requests,
        "seed": tuned.seed,
        "met": tuned.met,
        "answer": None if answer is None else tuned.settings(answer),
        "says": [line for line in (verdict(tuned), tested(tuned), *doubts(tuned)) if line],
        "importance": tuned.importance,
        "points": rows(tuned),
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
