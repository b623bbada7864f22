"""A validation as text for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvyard import __version__
from kvyard.files import write_whole
from kvyard.integers import ceil_div
from kvyard.lab.validate.compare import COLUMNS, ComparedLatency, Validation
from kvyard.replay.report import figures as draw
from kvyard.replay.report.html import Page, card, head, listing, row, table, tile, tiles
from kvyard.replay.report.numbers import Spread, histogram
from kvyard.replay.report.report import LATENCIES
from kvyard.replay.report.words import SHORT, measured, percent, whole

if TYPE_CHECKING:
    from rich.console import Console

RATES = {"requests_per_s": "Requests per second", "output_tokens_per_s": "Output tokens per second"}
HITS = "Prompt tokens found cached"
EACH = "off, each"
"""The row with how far single requests are off."""
MOST_DOTS = 2000
"""Requests drawn as dots, evenly chosen: more can't be distinguished."""


def summary(validation: Validation) -> str:
    """Return the validation in one line."""
    errors = ", ".join(f"{SHORT[name]} {signed(latency.error['mean'])}" for name, latency in validation.latency.items())
    return (
        f"{validation.requests:,} requests · replayed against measured, mean: {errors} · at most {_worst(validation)}"
    )


def _worst(validation: Validation) -> str:
    """Return the largest error of the tables, and how far single requests are off at most of what they list."""
    (name, statistic), error = max(validation.errors().items(), key=lambda entry: abs(entry[1]))
    worst = (
        f"{percent(abs(error))} off ({SHORT[name]} {statistic})"
        if statistic
        else f"{percent(abs(error))} off ({RATES[name].lower()})"
    )
    scattered = {
        f"{SHORT[name]} {column}": float(getattr(error.scatter, column))
        for name, error in validation.latency.items()
        if error.scatter is not None
        for column in COLUMNS
    }
    if not scattered:
        return worst
    widest = max(scattered, key=lambda of: scattered[of])
    return f"{worst}, single requests {scattered[widest] * 100:.1f}% ({widest})"


def signed(error: float) -> str:
    """Return an error as people write it."""
    text = f"{error * 100:+.1f}%"
    return "±0.0%" if text in ("+0.0%", "-0.0%") else text


def latency_rows(latency: ComparedLatency) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of one latency, by name: a cell for each of ``COLUMNS``."""
    yield "measured", [measured(getattr(latency.measured, name)) for name in COLUMNS]
    yield "replayed", [measured(getattr(latency.replayed, name)) for name in COLUMNS]
    yield "error", [signed(latency.error[name]) for name in COLUMNS]
    if latency.scatter is not None:
        yield EACH, [f"{getattr(latency.scatter, name) * 100:.1f}%" for name in COLUMNS]


def rate_rows(validation: Validation) -> Iterator[tuple[str, str, str, str]]:
    """Yield figures of the whole run: name, measured, replayed, error."""
    for name, rate in validation.throughput.items():
        yield RATES[name], measured(rate.measured), measured(rate.replayed), signed(rate.error)
    if validation.hit_share is not None:
        hits = validation.hit_share
        yield HITS, percent(hits.measured), percent(hits.replayed), f"{hits.error * 100:+.1f} pt"
    if validation.preemptions:
        yield "Preemptions", "–", whole(validation.preemptions), ""


def notes(validation: Validation) -> list[str]:
    """Return the caveats of the figures."""
    taken = [f"{name} {value}" for name, value in validation.settings.items()]
    lines = [f"Taken from the run: {', '.join(taken)}."] if taken else []
    return [f"Times: {validation.timing}.", *lines, *validation.notes]


def print_validation(validation: Validation, console: Console | None = None) -> None:
    """Print the result. Without a terminal there are no colours."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from kvyard.replay.report.table import plain_console

    console = console or plain_console()
    console.print(f"[bold]{escape(validation.run)}[/bold]  [dim]{escape(validation.format)}[/dim]")
    console.print(escape(summary(validation)))
    for note in notes(validation):
        console.print(f"[dim]{escape(note)}[/dim]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="")
    table.add_column("")
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for name, latency in validation.latency.items():
        table.add_section()
        for index, (what, cells) in enumerate(latency_rows(latency)):
            style = "bold" if what == "error" else "dim" if what == EACH else ""
            table.add_row(f"{SHORT[name]}, ms" if not index else "", what, *cells, style=style)
    console.print(table)
    rates = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="")
    rates.add_column("")
    for title in ("measured", "replayed", "error"):
        rates.add_column(title, justify="right")
    for line in rate_rows(validation):
        rates.add_row(*line)
    console.print(rates)
    console.print(f"[dim]error: of the value above it. {EACH}: how far single requests are off, without sign.[/dim]")


def write_validation(validation: Validation, path: str | Path) -> None:
    """Write the page, in place of what was there. Raises ``KvyardError`` if that can't be done."""
    write_whole(path, validation_page(validation))


def validation_page(validation: Validation) -> str:
    """Return the page's text."""
    page = Page(f"{validation.run} beside its replay · kvyard")
    page.add(head(f"{validation.run} beside its replay", summary(validation), notes(validation)))
    figures = [_tile(name, latency) for name, latency in validation.latency.items()]
    rate = validation.throughput["output_tokens_per_s"]
    figures.append(tile("Output", signed(rate.error), "", f"{measured(rate.measured)} tok/s measured"))
    page.add(tiles(figures))
    page.section("In numbers", f"Milliseconds. “{EACH}” is how far single requests are off, without sign.")
    rows = [
        row([LATENCIES[name] if not index else "", what, *cells], "sum" if what == "error" else "")
        for name, latency in validation.latency.items()
        for index, (what, cells) in enumerate(latency_rows(latency))
    ]
    rates = [row(cells) for cells in rate_rows(validation)]
    page.cards(
        "one",
        card("Latency", "", table(["", "", *COLUMNS], rows)),
        card("The whole run", "", table(["", "measured", "replayed", "error"], rates)),
    )
    drawn = [name for name in LATENCIES if name in validation.latency and name != "itl"]
    page.section("Request by request", "A dot is a request: on the line where the replay took as long as the real run.")
    page.cards("three", *(page.figure(LATENCIES[name], "", _dots(validation, name)) for name in drawn))
    page.section("Distributions", "The share of requests that took no longer.")
    page.cards("three", *(page.figure(LATENCIES[name], "cumulative", _cumulative(validation, name)) for name in drawn))
    page.section(
        "Over time", "Means of neighbouring requests, by arrival: where the two part, the replay's load was another."
    )
    over_time = [name for name in drawn if name != "tpot"]
    page.cards(
        "two", *(page.figure(LATENCIES[name], "by arrival", _by_arrival(validation, name)) for name in over_time)
    )
    page.section("What was run", "The same settings and run give the same page.")
    page.add('<section class="card">' + listing("Configuration", validation.config) + "</section>")
    page.footer(f"kvyard {__version__} · {validation.format}")
    return page.text()


def _tile(name: str, latency: ComparedLatency) -> str:
    spread: Spread = latency.measured
    return tile(
        LATENCIES[name],
        signed(latency.error["mean"]),
        "",
        f"mean {measured(spread.mean)} ms · p99 {signed(latency.error['p99'])}",
    )


def _both(validation: Validation, name: str) -> tuple[list[float], list[float], list[float]]:
    """Arrivals in seconds, measured and replayed milliseconds of the requests that have this latency."""
    pairs = [(pair.arrival_s, getattr(pair, name)) for pair in validation.pairs if getattr(pair, name) is not None]
    return [seconds for seconds, _ in pairs], [took[0] for _, took in pairs], [took[1] for _, took in pairs]


def _dots(validation: Validation, name: str) -> draw.Figure:
    _, real, simulated = _both(validation, name)
    step = ceil_div(len(real), MOST_DOTS) or 1
    real, simulated = real[::step], simulated[::step]
    positive = [value for value in (*real, *simulated) if value > 0]
    ends = draw.rounded([min(positive), max(positive)]) if positive else []
    return draw.lines(
        f"{SHORT[name]}: measured and replayed",
        [
            draw.line("equal", ends, "grey2", x=ends),
            draw.line("requests", draw.rounded(simulated), "blue", x=draw.rounded(real), only="dots"),
        ],
        f"measured {SHORT[name]} (log)",
        "replayed (log)",
        xScale="log",
        yScale="log",
        xTip="ms",
        xFormat="ms",
        yFormat="ms",
        height=300,
    )


def _cumulative(validation: Validation, name: str) -> draw.Figure:
    _, real, simulated = _both(validation, name)
    both = [("measured", "orange", histogram(real)), ("replayed", "blue", histogram(simulated))]
    title = f"{SHORT[name]} (log)"
    return draw.cumulative(both, title, "share of requests", f"{LATENCIES[name]}: cumulative")


def _by_arrival(validation: Validation, name: str) -> draw.Figure:
    arrivals, real, simulated = _both(validation, name)
    by, axis = draw.time_axis(arrivals[-1] if arrivals else 0.0)
    series = [
        draw.line("measured", draw.thinned(real), "orange"),
        draw.line("replayed", draw.thinned(simulated), "blue"),
    ]
    figure = draw.lines(f"{LATENCIES[name]} by arrival", series, "", f"{SHORT[name]} (log)", xMin=0)
    return figure | axis | {"x": draw.thinned([arrival / by for arrival in arrivals]), "yScale": "log", "yFormat": "ms"}
