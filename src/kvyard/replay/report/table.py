"""The report as text for a terminal: a table of measurements as AIPerf prints it, and blocks of shares below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvyard.replay.report import session_words
from kvyard.replay.report import words as say
from kvyard.replay.report.answers import answers
from kvyard.replay.report.bounds import BOUNDS
from kvyard.replay.report.fitting import fitted
from kvyard.replay.report.fleet_report import HandoverReport
from kvyard.replay.report.numbers import Spread
from kvyard.replay.report.ranges import STATISTICS
from kvyard.replay.report.report import LATENCIES, LENGTHS, Goodput, LiveReport, Report
from kvyard.replay.report.session_report import SessionsReport
from kvyard.replay.report.slo import RULE, judge
from kvyard.replay.report.waterfall import EXPLAINED, LEVELS, absent_notes, step_cells

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROOMY = 104
"""Columns from which metrics have their full names."""
SPREADS_LEFT_OUT = ("std", "min", "p95", "p90", "max")
"""Columns that a narrow terminal does without, first to last."""
PLAIN_WIDTH = 110
"""Width if it isn't known: in a file or a pipe."""


def print_report(report: Report, console: Console | None = None) -> None:
    """Print ``report``. Without a terminal there are no colours, and lines are ``PLAIN_WIDTH`` long."""
    console = console or plain_console()
    console.print(f"[bold]{_safe(say.name_of(report))}[/bold]")
    console.print(_safe(say.summary(report)))
    if report.timing:
        console.print(_safe(say.times(report)))
    for note in say.notes(report):
        console.print(f"[yellow]{_safe(note)}[/yellow]")
    verdict = judge(report)
    if verdict is not None:
        style, text = ("green", say.MET) if verdict.met else ("bold red", say.NOT_MET)
        console.print(f"[{style}]{text}[/{style}]: {_safe(verdict.why)}")
    console.print()
    if report.pools:
        console.print(fitted(_pools(report.pools), console, ("E2E mean, ms", "workers")))
    console.print(fitted(_measurements(report, console.width >= ROOMY), console, SPREADS_LEFT_OUT))
    ranges = say.range_rows(report)
    if ranges:
        console.print(_ranges(report, ranges, console.width >= ROOMY))
    console.print(_rates(report))
    if report.goodput is not None and (report.goodput.percentiles or report.goodput.rejected):
        console.print(_verdicts(report.goodput))
    if report.live is not None:
        console.print(fitted(_sending(report.live), console, SPREADS_LEFT_OUT))
    if report.flow:
        console.print(_safe(f"Flow control, {say.held_back(report.flow)} {say.longest_wait(report.flow)}".rstrip()))
        console.print()
    if report.tenants:
        console.print(fitted(_tenants(report), console, ("token-s held", "computed", "rejected", "lost to others")))
    if report.sessions:
        _print_sessions(report.sessions, console)
    if report.reuse:
        console.print(_prompts(report))
    if report.waterfall.steps:
        console.print(fitted(_waterfall(report), console, ("by", "of prompts", "prefill time")))
    if report.scaling is not None:
        for sentence in say.scaled(report.scaling):
            console.print(_safe(sentence))
        if rows := say.day_rows(report):
            console.print(_day(rows))
        console.print()
    if report.handovers is not None:
        console.print(fitted(_handovers(report.handovers), console, ("std", "min", "p95", "max")))
        console.print(fitted(_roles(report.handovers), console, ("of bandwidth",)))
    if report.transfers or (report.tiers and report.tiers["device"].evicted_blocks):
        console.print(fitted(_tiers(report), console, ("of bandwidth", "link busy", "read", "written")))
    if report.transfers:
        console.print(_transfers(report))
    if report.router is not None or report.balance:
        console.print(_fleet(report))
    for sentence in answers(report):
        console.print(_safe(sentence))


def report_text(report: Report, width: int = PLAIN_WIDTH) -> str:
    """Return the text of ``print_report`` without colours."""
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=False, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def plain_console() -> Console:
    """Return the default console."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _safe(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="", pad_edge=False, padding=(0, 0, 0, 1), collapse_padding=True)
    table.add_column(f"[bold]{title}[/bold]", overflow="fold")
    for column in columns:
        table.add_column(f"[dim]{column}[/dim]", justify="right", no_wrap=True)
    return table


def _pools(pools: Mapping[str, Report]) -> Table:
    table = _table("Pool", "requests", "workers", "TTFT mean, ms", "p99", "E2E mean, ms", "reused")
    for name, report in pools.items():
        ttft = report.latency["ttft"]
        figures = [say.measured(value) for value in (ttft.mean, ttft.p99, report.latency["e2e"].mean)]
        counts = [f"{report.requests['all']:,}", f"{len(report.workers):,}"]
        table.add_row(_safe(name), *counts, *figures, say.percent(report.reuse["all"].value))
    return table


def _measurements(report: Report, roomy: bool) -> Table:
    table = _table("Finished requests" if roomy else "Finished", *say.COLUMNS)
    for names, unit, spreads in ((LATENCIES, "ms", report.latency), (LENGTHS, "tokens", report.lengths)):
        for key, long in names.items():
            spread = spreads.get(key, Spread())
            show = (say.whole if unit == "tokens" else say.measured) if roomy else say.short
            values = [show(getattr(spread, column)) if spread.count else "-" for column in say.COLUMNS]
            table.add_row(f"{long if roomy else say.SHORT[key]} ({unit})", *values)
    table.columns[0].no_wrap = True
    return table


def _ranges(report: Report, rows: list[list[str]], roomy: bool) -> Table:
    table = _table(say.range_title(report), *STATISTICS)
    for key, *values in rows:
        table.add_row(f"{LATENCIES[key] if roomy else say.SHORT[key]} (ms)", *values)
    table.columns[0].no_wrap = True
    note = say.range_note(report)
    if note:
        table.caption, table.caption_justify = note, "left"
    return table


def _rates(report: Report) -> Table:
    table = _table("Throughput", "per second")
    rates = report.throughput
    table.add_row("Requests finished", say.measured(rates["requests_per_s"]))
    table.add_row("Output tokens", say.measured(rates["output_tokens_per_s"]))
    table.add_row("Input tokens", say.measured(rates["input_tokens_per_s"]))
    good = report.goodput
    if good is not None:
        of = f"{say.percent(good.requests.value)}, {good.requests.part:,} / {good.requests.whole:,} requests"
        table.add_row(f"Goodput, requests with {say.limits(good.slo_ms)} ({of})", say.measured(good.requests_per_s))
        table.add_row("Goodput, output tokens of these", say.measured(good.output_tokens_per_s))
    return table


def _verdicts(good: Goodput) -> Table:
    table = _table("SLO", "measured", "")
    for row in say.verdicts(good):
        table.add_row(*row)
    if good.rejected:
        table.caption, table.caption_justify = RULE, "left"
    return table


def _sending(live: LiveReport) -> Table:
    table = _table("Sent after it was due", *say.COLUMNS)
    late = live.lateness
    table.add_row(
        "Lateness (ms)", *(say.measured(getattr(late, column)) if late.count else "-" for column in say.COLUMNS)
    )
    return table


def _tenants(report: Report) -> Table:
    table = _table("Tenant", *say.TENANTS)
    for cells in say.tenant_rows(report.tenants or {}, report.cache_time or {}):
        table.add_row(*map(_safe, cells))
    return table


def _print_sessions(sessions: SessionsReport, console: Console) -> None:
    table = _table("Sessions", *say.COLUMNS)
    for cells in session_words.spread_rows(sessions):
        table.add_row(*cells)
    table.caption, table.caption_justify = session_words.summary(sessions), "left"
    console.print(fitted(table, console, SPREADS_LEFT_OUT))
    for title, columns, rows in (
        ("Mean session, by cause", ("time", "of completion"), session_words.cause_rows(sessions)),
        ("Sessions and caches", ("share", ""), session_words.share_rows(sessions)),
        ("By size", ("sessions", "alone", "service", "slowdown", "p90"), session_words.size_rows(sessions)),
        (
            "Slowest",
            ("completion", "slowdown", "requests", "moved", "mainly"),
            [list(map(_safe, session_words.slow_row(session))) for session in sessions.slowest[:3]],
        ),
    ):
        if rows:
            table = _table(title, *columns)
            for cells in rows:
                table.add_row(*cells)
            console.print(fitted(table, console, ("mainly", "moved", "alone")))


def _prompts(report: Report) -> Table:
    table = _table(
        f"{report.reuse['all'].whole:,} prompt tokens of admitted requests", "tokens", "of them", "prefixes ended"
    )
    for name, words in say.SOURCES.items():
        share = report.reuse.get(name)
        if share is not None and name != "cached" and (share.part or name == "device"):
            table.add_row(words, f"{share.part:,}", say.percent(share.value), "")
    all_ = report.reuse["all"]
    table.add_row("[bold]Reused[/bold]", f"[bold]{all_.part:,}[/bold]", f"[bold]{say.percent(all_.value)}[/bold]", "")
    for name, words in BOUNDS.items():
        if name in report.bounds:
            bound = report.bounds[name]
            table.add_row(f"  at best: {words.lower()}", f"{bound.part:,}", say.percent(bound.value), "", style="dim")
    for name, words in say.REASONS.items():
        if name in report.missed_tokens or name in report.misses:
            tokens, requests = report.missed_tokens.get(name), report.misses.get(name)
            table.add_row(
                f"Computed: {words.lower()}",
                f"{tokens.part:,}" if tokens else "0",
                say.percent(tokens.value) if tokens else say.percent(0),
                f"{requests.part:,}" if requests else "" if report.live is not None else "0",
            )
    return table


def _waterfall(report: Report) -> Table:
    table = _table("Where the reuse went", "tokens", "of prompts", "change", "prefill time", "by")
    for step in report.waterfall.steps:
        cells = step_cells(step, report)
        table.add_row(LEVELS[step.level].capitalize(), *cells, style="bold" if step.level == "delivered" else "")
    table.columns[-1].no_wrap, table.columns[-1].justify = False, "left"
    table.caption, table.caption_justify = " ".join([EXPLAINED, *absent_notes(report)]), "left"
    return table


def _day(rows: list[list[str]]) -> Table:
    table = _table("Over time, from", *say.DAY)
    for cells in rows:
        table.add_row(*cells)
    return table


def _handovers(handovers: HandoverReport) -> Table:
    table = _table("From arrival to first token, handed over (ms)", *say.COLUMNS)
    for cells in say.stage_rows(handovers):
        table.add_row(*cells)
    table.caption, table.caption_justify = say.handed_over(handovers), "left"
    return table


def _roles(handovers: HandoverReport) -> Table:
    table = _table("Roles and network", "", "busy", "bytes", "of bandwidth")
    for cells in say.role_rows(handovers):
        table.add_row(*cells)
    return table


def _tiers(report: Report) -> Table:
    table = _table("Tiers", "blocks", "evicted", "written", "read", "link busy", "of bandwidth")
    for name, tier in report.tiers.items():
        out, in_ = tier.links.get("outward"), tier.links.get("inward")
        cells = ["", "", ""]
        if out is not None and in_ is not None:
            used = [way.bandwidth for way in (out, in_) if way.bandwidth is not None]
            cells = [
                say.amount(out.bytes),
                say.amount(in_.bytes),
                f"{say.percent(out.busy.value)} / {say.percent(in_.busy.value)}",
                " / ".join(say.percent(share.value) for share in used) or "no limit",
            ]
        table.add_row(name.capitalize(), f"{tier.capacity_blocks:,}", f"{tier.evicted_blocks:,}", *cells)
    return table


def _transfers(report: Report) -> Table:
    table = _table("Transfers", *say.TRANSFERS)
    for cells in say.transfer_rows(report):
        table.add_row(*cells)
    if report.loading.count:
        wait = report.loading
        times = f"mean {say.measured(wait.mean)} ms, p99 {say.measured(wait.p99)} ms"
        table.caption = f"{wait.count:,} requests waited for loads: {times}"
        table.caption_justify = "left"
    if report.left_requests:
        table.caption = f"{table.caption}\n{say.left_loads(report)}" if table.caption else say.left_loads(report)
        table.caption_justify = "left"
    if report.pulls is not None:
        table.caption = f"{table.caption}\n{say.pulled(report.pulls)}" if table.caption else say.pulled(report.pulls)
        table.caption_justify = "left"
    return table


def _fleet(report: Report) -> Table:
    router, balance = report.router, report.balance
    table = _table("Router and balance" if router is not None else "Balance", "", "")
    if router is None:
        pass
    elif router.regret.whole:
        for words, share in (
            ("Regret: prefix blocks others had beyond the chosen / those of the best", router.regret),
            ("Sent to a worker with the longest prefix / requests of which any had one", router.best),
            ("Prefix tokens found at admission / believed when routing", router.belief),
        ):
            table.add_row(words, say.percent(share.value), f"{share.part:,} / {share.whole:,}")
    else:
        table.add_row(f"Regret: none known, {router.policy} saw no worker with any of a prompt", "-", "")
    table.add_row("Prompt tokens by worker: most / mean", f"{balance['max_over_mean']:.3f}", "")
    table.add_row("Prompt tokens by worker: standard deviation / mean", f"{balance['variation']:.3f}", "")
    if "busy_min" in balance:
        table.add_row(
            "Share of time busy: least to most", say.percent(balance["busy_min"]), say.percent(balance["busy_max"])
        )
    if report.preemptions is not None:
        table.add_row("Preemptions", f"{report.preemptions:,}", "")
    failures = say.failed_workers(report.config)
    if router is not None and (router.retries or failures):
        table.add_row("Requests routed again after a failure", f"{router.retries:,}", failures)
    return table
