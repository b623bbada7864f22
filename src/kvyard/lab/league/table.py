"""A league's tables: for a terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvyard.files import write_whole
from kvyard.lab.league.advice import advice
from kvyard.lab.league.league import FIGURES, League, LeaguePlace
from kvyard.lab.sweep.table import Figure, best_of, shown_value, times
from kvyard.replay.report.fitting import fitted

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = (
    "reuse",
    "ttft_mean_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "itl_mean_ms",
    "itl_p99_ms",
    "e2e_mean_ms",
    "goodput_requests_per_s",
    "balance",
    "regret",
)
"""In the terminal, where there is only so much room."""


def shown(league: League) -> list[Figure]:
    """The columns of a terminal's table: those that say anything."""
    rows = [one.figures for table in league.cells.values() for one in table]
    return [one for one in FIGURES if one.name in SHOWN and any(row[one.name] is not None for row in rows)]


def print_league(league: League, console: Console | None = None) -> None:
    """Print a table per cell, the best of each column in bold and the Pareto front starred."""
    from rich.console import Console as Terminal
    from rich.table import Table

    console = console or Terminal(width=None if sys.stdout.isatty() else 120)
    columns = shown(league)
    for cell, standings in league.cells.items():
        note = "; overloaded: its queues decide" if cell in league.overloaded else ""
        table = Table(box=None, header_style="bold", pad_edge=False, title=f"{cell}{note}", title_justify="left")
        table.add_column("policy")
        for figure in columns:
            table.add_column(figure.head, justify="right")
        best = {figure.name: best_of(figure, [one.figures for one in standings]) for figure in columns}
        for one in standings:
            cells = [f"{one.policy}{' *' if one.front else ''}"]
            for figure in columns:
                text = shown_value(figure, one.figures[figure.name])
                cells.append(
                    f"[bold]{text}[/bold]" if one.figures[figure.name] == best[figure.name] is not None else text
                )
            table.add_row(*cells)
        console.print(fitted(table, console, [figure.head for figure in reversed(columns)]))
        console.print()
    console.print(
        "* no policy has both a sooner first token (mean) and a lower ITL p99. Times in ms, means over seeds."
    )
    said = times(league.sweep)
    if said:
        console.print(said, style="dim", markup=False, highlight=False)
    for failure in league.sweep.failures:
        console.print(f"{failure.point.label}: {failure.why}", style="yellow", markup=False)
    for sentence in advice(league):
        console.print(sentence, markup=False, highlight=False)


def rows(league: League) -> list[dict[str, Any]]:
    """A row per cell and policy, with all figures."""
    return [
        {"cell": cell, "policy": one.policy, "front": one.front, **one.figures, "ttft_spread_ms": one.spread}
        for cell, standings in league.cells.items()
        for one in standings
    ]


def write_csv(league: League, path: Path) -> None:
    """Write all rows. Raises ``KvyardError`` where that can't be done."""
    text = io.StringIO()
    names = ["cell", "policy", "front", *(figure.name for figure in FIGURES), "ttft_spread_ms"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(league))
    write_whole(path, text.getvalue())


def write_json(league: League, path: Path) -> None:
    """Write all rows, and which cells are overloaded. Raises ``KvyardError`` where that can't be done."""
    value = {
        "kind": "kvyard league",
        "trace": league.sweep.trace,
        "overloaded": sorted(league.overloaded),
        "standings": rows(league),
        "advice": advice(league),
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def behind(one: LeaguePlace, first: LeaguePlace) -> str:
    """By how much a policy's mean TTFT is above the first one's."""
    own, least = one.figures["ttft_mean_ms"] or 0.0, first.figures["ttft_mean_ms"] or 0.0
    return f"{own / least - 1:+.1%}" if least else "–"
