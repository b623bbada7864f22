"""A league as a page: one file that needs no network. Per cell the bars of what people wait for, and the whole table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvyard import __version__
from kvyard.lab.league.advice import advice
from kvyard.lab.league.league import FIGURES, League, LeaguePlace, cell_of
from kvyard.lab.league.table import behind
from kvyard.lab.sweep.runs import run_page
from kvyard.lab.sweep.table import Figure, shown_value, times
from kvyard.replay.report import figures as draw
from kvyard.replay.report.html import Page, PageLink, answer, esc, head, listing, row, table

DRAWN = ("ttft_mean_ms", "itl_p99_ms", "reuse")


def page(league: League) -> str:
    """The page's text."""
    count = len({one.policy for standings in league.cells.values() for one in standings})
    title = "Routing policies side by side"
    made = Page(f"{title} · kvyard")
    notes = [f"{cell}: overloaded, so its queues decide." for cell in sorted(league.overloaded)]
    notes += [f"{failure.point.label}: {failure.why}" for failure in league.sweep.failures]
    if league.sweep.missing:
        notes.append(f"{league.sweep.missing} of {len(league.sweep.grid.points)} points have not run yet.")
    made.add(
        head(title, f"{count} policies on {league.sweep.trace}", notes, times(league.sweep)), answer(advice(league))
    )
    for cell, standings in league.cells.items():
        first = standings[0]
        text = f"{first.policy} has the soonest first token. Starred: none has both a sooner first token and a lower ITL p99."
        made.section(cell, text)
        wanted = [figure for figure in FIGURES if figure.name in DRAWN]
        made.cards("three", *(made.figure(figure.title, "", _bars(figure, standings)) for figure in wanted))
        made.add('<section class="card wide">' + _table(standings, _runs(league, cell)) + "</section>")
    made.section("What was run", "What is not varied is the same for all.")
    base = league.sweep.done[0][1]
    made.add('<section class="card">' + listing("Configuration of the first point", base.config) + "</section>")
    made.add(f"<footer>kvyard {esc(__version__)}</footer>")
    return made.text()


def _bars(figure: Figure, standings: Sequence[LeaguePlace]) -> draw.Figure:
    bars = []
    for one in standings:
        value = one.figures[figure.name]
        text = shown_value(figure, value)
        part = {
            "name": figure.title,
            "color": "blue",
            "value": 0 if value is None else draw.digits(value),
            "text": text,
        }
        bars.append({"name": one.policy, "parts": [part], "text": text})
    drawn: draw.Figure = {"kind": "bars", "label": figure.title, "rows": bars, "xTitle": figure.title}
    return drawn | {"xFormat": "percent"} if figure.share else drawn


def _runs(league: League, cell: str) -> dict[str, str]:
    """By policy, the page of its first run in a cell."""
    found: dict[str, str] = {}
    for point, _ in league.sweep.done:
        if cell_of(point.varied) == cell:
            found.setdefault(point.varied["router"], run_page(league.sweep, f"points/{point.key}.json"))
    return found


def _table(standings: Sequence[LeaguePlace], runs: Mapping[str, str]) -> str:
    kept = [figure for figure in FIGURES if any(one.figures[figure.name] is not None for one in standings)]
    made = []
    for one in standings:
        figures = [shown_value(figure, one.figures[figure.name]) for figure in kept]
        policy = PageLink(f"{one.policy}{' *' if one.front else ''}", runs[one.policy])
        made.append(row([policy, behind(one, standings[0]), *figures]))
    return table(["policy", "TTFT behind the first", *(figure.column for figure in kept)], made)
