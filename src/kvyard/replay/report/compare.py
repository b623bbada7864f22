"""Runs side by side: makes a ``Comparison`` of their reports, and prints it; ``compare_page`` draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvyard.errors import KvyardError
from kvyard.replay.report.comparison import NOISE, Better, ComparedLine, Comparison, Unit, change_text, value_text
from kvyard.replay.report.report import TIERS, Report
from kvyard.replay.report.verdict import verdict
from kvyard.replay.report.waterfall import LEVELS, LOSSES
from kvyard.replay.report.words import REASONS, SOURCES, common_times, name_of

if TYPE_CHECKING:
    from rich.console import Console


class Measure(NamedTuple):
    """Something that every run has a value of, or none."""

    key: str
    title: str
    part: str
    unit: Unit
    better: Better
    get: Callable[[Report], float | None]


def measures() -> list[Measure]:
    """Everything that is compared, in order."""
    found: list[Measure] = []

    def add(key: str, title: str, part: str, unit: Unit, better: Better, get: Callable[[Report], float | None]) -> None:
        found.append(Measure(key, title, part, unit, better, get))

    for key, title, fields in (
        ("ttft", "TTFT", ("mean", "p50", "p90", "p99")),
        ("itl", "ITL", ("mean", "p50", "p99")),
        ("e2e", "E2E", ("mean", "p50", "p99")),
        ("queue", "Queue", ("mean", "p99")),
    ):
        for field in fields:
            add(f"{key}.{field}", f"{title} {field}", "Latency, ms", "ms", "low", _latency(key, field))
    for key, title in (("requests_per_s", "Requests"), ("output_tokens_per_s", "Output tokens")):
        add(key, title, "Throughput, per second", "per_s", "high", lambda report, key=key: report.throughput[key])  # type: ignore[misc]
    add("goodput", "Requests within the SLO", "Throughput, per second", "share", "high",
        lambda report: report.goodput.requests.value if report.goodput else None)  # fmt: skip
    part = "Of prompt tokens"
    for key, title in (*((key, SOURCES[key]) for key in TIERS), ("all", "Reused in all")):
        better: Better = "high" if key == "all" else ""
        add(f"reuse.{key}", title, part, "share", better, _reused(key))
    for key, title in REASONS.items():
        add(f"missed.{key}", f"Computed: {title.lower()}", part, "share", "", _missed(key))
    part = "Where the reuse went, of prompt tokens"
    for key, title in LEVELS.items():
        add(f"waterfall.{key}", title.capitalize(), part, "share", "high" if key == "delivered" else "", _level(key))
    part = "Prefill lost by, ms in all"
    for key, title in LOSSES.items():
        add(f"lost.{key}", title.capitalize(), part, "ms", "", _lost(key))
    part = "Fleet"
    add("preemptions", "Preemptions", part, "count", "low", lambda report: report.preemptions)
    add("evicted", "Device blocks evicted", part, "count", "",
        lambda report: report.tiers["device"].evicted_blocks if report.tiers else None)  # fmt: skip
    add("moved", "Bytes moved between tiers", part, "bytes", "",
        lambda report: sum(flow.bytes for flow in report.transfers.values()) if report.tiers else None)  # fmt: skip
    add("regret", "Router regret", part, "share", "low",
        lambda report: report.router.regret.value if report.router and report.router.regret.whole else None)  # fmt: skip
    add("balance", "Prompt tokens, most / mean", part, "ratio", "low",
        lambda report: report.balance.get("max_over_mean"))  # fmt: skip
    return found


def _latency(key: str, field: str) -> Callable[[Report], float | None]:
    def get(report: Report) -> float | None:
        spread = report.latency.get(key)
        return float(getattr(spread, field)) if spread is not None and spread.count else None

    return get


def _missed(key: str) -> Callable[[Report], float | None]:
    def get(report: Report) -> float | None:
        if report.live is not None and key != "unknown":
            return None  # a client can't see why something had to be computed
        return report.missed_tokens[key].value if key in report.missed_tokens else 0.0

    return get


def _reused(key: str) -> Callable[[Report], float | None]:
    return lambda report: report.reuse[key].value if key in report.reuse else None


def _level(key: str) -> Callable[[Report], float | None]:
    def get(report: Report) -> float | None:
        tokens = [step.tokens for step in report.waterfall.steps if step.level == key]
        return tokens[0] / report.reuse["all"].whole if tokens and report.reuse["all"].whole else None

    return get


def _lost(key: str) -> Callable[[Report], float | None]:
    return lambda report: next((step.ms for step in report.waterfall.steps if step.level == key), None)


def compare(reports: Sequence[Report], names: Sequence[str] | None = None) -> Comparison:
    """Put ``reports`` side by side, the first being what others are measured against.

    ``names`` call them; left out, their labels do. Raises ``KvyardError`` for fewer than two.
    """
    if len(reports) < 2:
        raise KvyardError("comparing takes two reports or more")
    runs = unique(names or [name_of(report) for report in reports])
    lines = []
    for measure in measures():
        values = [measure.get(report) for report in reports]
        if any(values):
            lines.append(_line(measure, values))
    settings = differences([report.config for report in reports])
    timing = common_times(runs, reports)
    return Comparison(
        runs=runs,
        notes=_notes(reports, runs),
        timing=timing,
        settings=settings,
        lines=lines,
        verdict=verdict(runs, lines),
    )


def unique(names: Sequence[str]) -> list[str]:
    """The same names, told apart by a number where they are the same."""
    found: list[str] = []
    for name in names:
        made, number = name, 2
        while made in found:
            made, number = f"{name} #{number}", number + 1
        found.append(made)
    return found


def _line(measure: Measure, values: list[float | None]) -> ComparedLine:
    first = values[0]
    changes: list[float | None] = []
    for value in values:
        if value is None or first is None:
            changes.append(None)
        elif measure.unit == "share":
            changes.append(value - first)
        else:
            changes.append((value - first) / first if first else None)
    known = [value for value in values if value is not None]
    best: list[int] = []
    if measure.better and known:
        top = min(known) if measure.better == "low" else max(known)
        best = [
            number for number, value in enumerate(values) if value is not None and abs(value - top) <= NOISE * abs(top)
        ]
        if len(best) == len(known):
            best = []
    return ComparedLine(
        key=measure.key,
        title=measure.title,
        part=measure.part,
        unit=measure.unit,
        better=measure.better,
        values=values,
        changes=changes,
        best=best,
    )


def differences(configs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """What is set differently, by path; null where a run has no such setting."""
    found: dict[str, list[object]] = {}
    _differ("", list(configs), found)
    return found


def _differ(path: str, values: list[object], found: dict[str, list[object]]) -> None:
    inner = [_parts(value) for value in values]
    if all(part is not None for part in inner):
        for key in dict.fromkeys(key for part in inner if part is not None for key in part):
            _differ(f"{path}.{key}" if path else str(key), [part.get(key) for part in inner if part is not None], found)
    elif any(value != values[0] for value in values):
        found[path] = values


def _parts(value: object) -> Mapping[object, object] | None:
    """What a setting is made of, if it is made of others."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        return dict(enumerate(value))
    return None


def _notes(reports: Sequence[Report], runs: Sequence[str]) -> list[str]:
    found = []
    first = reports[0]
    for report, run in zip(reports[1:], runs[1:]):
        if report.digest != first.digest:
            here, there = (
                f"{one.requests['all']:,} requests with {one.input_tokens:,} tokens" for one in (report, first)
            )
            found.append(f"{run} had other requests to serve than {runs[0]}: {here}, not {there}.")
        if report.made_by != first.made_by:
            found.append(f"{run} was made by kvyard {report.made_by}, {runs[0]} by {first.made_by}.")
        if report.goodput and first.goodput and report.goodput.slo_ms != first.goodput.slo_ms:
            found.append(f"{run} and {runs[0]} have different SLOs: goodput can't be compared.")
        if (report.live is None) != (first.live is None):
            live, other = (run, runs[0]) if report.live is not None else (runs[0], run)
            found.append(f"{live} was measured live, {other} simulated.")
    for report, run in zip(reports, runs):
        if not report.complete:
            found.append(f"{run} was interrupted: its figures cover what had happened until then.")
        elif report.requests.get("finished", 0) < report.requests["all"]:
            missing = report.requests["all"] - report.requests.get("finished", 0)
            found.append(f"{run}: {missing:,} of {report.requests['all']:,} requests did not finish.")
    return found


NAME_WIDTH = 34
RUN_WIDTH = 21
FEW_SETTINGS = 12
LONGEST = 60
"""Of a setting in the terminal."""


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Print ``found``. Where runs don't fit side by side they come in several tables, each with the first run."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from kvyard.replay.report.table import plain_console

    console = console or plain_console()
    for note in found.notes:
        console.print(f"[yellow]{escape(note)}[/yellow]")
    fit = max(1, (console.width - NAME_WIDTH) // RUN_WIDTH - 1)
    others = list(range(1, len(found.runs)))
    for at in range(0, len(others), fit):
        shown = [0, *others[at : at + fit]]
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="", padding=(0, 0, 0, 1), collapse_padding=True)
        made.add_column("", overflow="fold")
        for number in shown:
            made.add_column(f"[bold]{escape(found.runs[number])}[/bold]", justify="right", overflow="fold")
            if number:
                made.add_column("[dim]change[/dim]", justify="right", no_wrap=True)
        part = ""
        for line in found.lines:
            if line.part != part:
                part = line.part
                made.add_section()
                made.add_row(f"[dim]{part}[/dim]")
            cells = []
            for number in shown:
                text = value_text(line, number)
                cells.append(f"[green]{text} *[/green]" if number in line.best else f"{text}  ")
                if number:
                    cells.append(change_text(line, number))
            made.add_row(line.title, *cells)
        console.print(made)
    console.print(
        f"[dim]* best, or within 0.5% of it; changes are against {escape(found.runs[0])}, the yardstick, "
        "of shares in points of a percent.[/dim]"
    )
    if found.timing:
        console.print(f"[dim]{escape(found.timing)}[/dim]")
    _print_settings(found, console)
    console.print()
    for sentence in found.verdict:
        console.print(escape(sentence))


def _print_settings(found: Comparison, console: Console) -> None:
    from rich.markup import escape

    if not found.settings:
        console.print("All runs have the same settings.")
        return
    console.print("\n[bold]Set differently[/bold]")
    for path, values in list(found.settings.items())[:FEW_SETTINGS]:
        console.print("  " + escape(f"{path}: {' | '.join(_shortened(setting_text(value)) for value in values)}"))
    more = len(found.settings) - FEW_SETTINGS
    if more > 0:
        console.print(f"  and {more} more: --json has them all")


def setting_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(one)}" for name, one in value.items() if one is not None)
    return "–" if value is None else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
