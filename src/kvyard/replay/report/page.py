"""The report as a page: one file that needs no network, made from the report alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

from kvyard import __version__
from kvyard.files import write_whole
from kvyard.replay.report import figures as draw
from kvyard.replay.report import session_words
from kvyard.replay.report import words as say
from kvyard.replay.report.answers import answers
from kvyard.replay.report.bounds import BOUNDS
from kvyard.replay.report.html import Page, PageLink, answer, card, esc, head, listing, row, table, tile, tiles
from kvyard.replay.report.numbers import Share
from kvyard.replay.report.ranges import STATISTICS
from kvyard.replay.report.report import LATENCIES, LENGTHS, Report, StatedRange, WorkerReport
from kvyard.replay.report.session_report import SlowSession
from kvyard.replay.report.slo import WITHIN, judge, limits_of
from kvyard.replay.report.waterfall import EXPLAINED, LEVELS, absent_notes, step_cells


def write_html(report: Report, path: str | Path) -> None:
    """Write the page, in place of what was there. Raises ``KvyardError`` if that can't be done."""
    write_whole(path, page(report))


def page(report: Report, home: PageLink | None = None) -> str:
    """Return the page's text; ``home`` is a page that this run is a part of.

    The first screen has the verdict, the answer and headline figures. Sections follow, folded.
    """
    html = Page(f"{say.name_of(report)} · kvyard")
    html.add(
        ("" if home is None else f'<p class="home">{home}</p>')
        + head(say.name_of(report), say.summary(report), say.notes(report), say.times(report))
    )
    verdict, sentences = judge(report), answers(report)
    if verdict is None:
        html.add(answer(sentences))
    else:
        html.add(answer([_sentence(verdict.why), *sentences], verdict.met))
    html.add(tiles(_tiles(report)))
    if report.reuse:
        text = "of all prompt tokens of admitted requests, at first admission"
        figure = draw.composition([report], [say.name_of(report)])
        html.add(html.figure("Where prompt tokens came from", text, figure, wide=True))
    for section in SECTIONS:
        section(html, report)
    html.footer(f"kvyard {__version__} · report version {report.version} · requests {report.digest}")
    return html.text()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _tiles(report: Report) -> Iterator[str]:
    latency, rates = report.latency, report.throughput
    if report.goodput is not None:
        good = report.goodput
        missed = any(limit.name == "within_slo" for limit in limits_of(good.slo_ms)) and good.requests.value < WITHIN
        text = f"of requests: {say.limits(good.slo_ms)}"
        yield tile("Within the SLO", f"{good.requests.value * 100:.1f}", "%", text, missed)
        for name, value, met in say.verdicts(good):
            yield tile(name, *_parted(value), "met" if met == "met" else "", missed=met != "met")
    for name, key, field in (
        ("Time to first token", "ttft", "p50"),
        ("Inter-token latency", "itl", "p50"),
        ("End to end", "e2e", "p50"),
    ):
        value = getattr(latency[key], field)
        what = "median" if field == "p50" else field
        stated = report.ranges.get(f"{key}_{field}")
        if stated is not None and value:
            what += f", {_ms_range(stated)}"
        yield tile(name, *_ms(value), f"{what} · p99 {say.latency(latency[key].p99)}")
    yield tile(
        "Output",
        say.measured(rates["output_tokens_per_s"]),
        "tok/s",
        f"{say.measured(rates['requests_per_s'])} requests/s",
    )
    best = report.bounds.get("infinite")
    more = f"of prompt tokens · at best {say.percent(best.value)}" if best else "of prompt tokens"
    if report.reuse:
        yield tile("Reused", f"{report.reuse['all'].value * 100:.1f}", "%", more)
    if report.scaling is not None and report.scaling.card_seconds:
        cost = report.scaling.cost
        text = f"{say.money(cost)}: {say.price_text(cost)}" if cost is not None else "no price is known for the card"
        yield tile("Card-hours", say.card_hours(report.scaling), "h", text)
    if report.live is not None:
        late = report.live.lateness
        yield tile("Sent after it was due", *_ms(late.p50), f"median · p99 {say.latency(late.p99)}")


def _ms(value: float) -> tuple[str, str]:
    """Return a time and its unit, apart if there is one unit."""
    return _parted(say.latency(value))


def _parted(text: str) -> tuple[str, str]:
    number, _, unit = text.partition(" ")
    return (number, unit) if " " not in unit else (text, "")


def _ms_range(stated: StatedRange) -> str:
    """Return a range in the unit of its lower end, so that both ends can be read."""
    unit, by = ("ms", 1.0) if stated.low < 1000 else ("s", 1000.0) if stated.low < 120_000 else ("min", 60_000.0)
    return f"{say.ranged(stated, by)} {unit}"


def _latencies(page: Page, report: Report) -> None:
    page.section("Latency", "Of finished requests. Steps of equal ratio; dashed lines are percentiles.", folded=True)
    texts = {
        "ttft": "from arrival to the first token",
        "itl": "between two tokens of a request, every gap counted",
        "tpot": "mean gap of each request",
        "e2e": "from arrival to the last token",
        "queue": "from arrival to first admission",
    }
    if report.live is not None:
        texts |= {"ttft": "from when it was due to the first token", "e2e": "from when it was due to the last token"}
        texts["itl"] = "between two tokens of an answer, as they came over the wire"
    queue = report.latency.get("queue")
    zeros = report.histograms["queue"].zeros if queue is not None else 0
    if zeros and queue is not None and queue.count:
        texts["queue"] = f"until first admission; none for {zeros / queue.count:.0%} of requests"
    there = {key: words for key, words in LATENCIES.items() if key in report.latency}
    cards = [page.figure(words, texts[key], draw.distribution(report, key)) for key, words in there.items()]
    cards.append(page.figure("All of them", "cumulative", draw.all_latencies(report)))
    rows = []
    for names, unit, spreads in ((there, "ms", report.latency), (LENGTHS, "tokens", report.lengths)):
        for key, words in names.items():
            spread, show = spreads[key], say.measured if unit == "ms" else say.whole
            rows.append(
                row(
                    [
                        f"{words} ({unit})",
                        *(show(getattr(spread, name)) for name in say.COLUMNS),
                        say.whole(spread.count),
                    ]
                )
            )
    cards.append(card("In numbers", "", table(["", *say.COLUMNS, "count"], rows)))
    ranges = say.range_rows(report)
    if ranges:
        named = [row([f"{LATENCIES[key]} (ms)", *values]) for key, *values in ranges]
        cards.append(card(say.range_title(report), say.range_note(report), table(["", *STATISTICS], named)))
    page.cards("three", *cards)


def _over_time(page: Page, report: Report) -> None:
    window = say.span(report.series.window_s)
    cards = [page.figure("Time to first token", "by arrival, finished requests", draw.first_tokens(report))]
    if report.live is None:
        text = f"Simulated time. Counts are by windows of {window}; states are samples."
        page.section("Over time", text, folded=True)
        cards += [
            page.figure("Running and waiting", "all workers together", draw.queues(report)),
            page.figure("Cache use by tier", "what is held by requests can't be evicted", draw.cache_use(report)),
        ]
    else:
        page.section("Over time", f"By windows of {window}.", folded=True)
    cards.append(page.figure("Arriving and finishing", "", draw.rates(report)))
    if report.live is None:
        figure = draw.composition_over_time(report)
        cards.append(page.figure("Where prompt tokens came from", "by first admission", figure, wide=True))
    page.cards("two", *cards)


def _known(value: float | None, show: Callable[[float], str] = say.whole) -> str:
    return "–" if value is None else show(value)


def _reused(worker: WorkerReport) -> str:
    if worker.cached_tokens is None or not worker.input_tokens:
        return "–"
    return say.percent((worker.cached_tokens + worker.loaded_tokens) / worker.input_tokens)


WORKERS: dict[str, Callable[[WorkerReport], str]] = {
    "": lambda worker: worker.name,
    "role": lambda worker: worker.role,
    "requests": lambda worker: say.whole(worker.requests),
    "input tokens": lambda worker: say.whole(worker.input_tokens),
    "output tokens": lambda worker: say.whole(worker.output_tokens),
    "reused": _reused,
    "busy": lambda worker: _known(worker.busy, say.percent),
    "passes": lambda worker: _known(worker.passes),
    "preemptions": lambda worker: _known(worker.preemptions),
    "evicted blocks": lambda worker: _known(worker.evicted_blocks),
}
"""The columns of their table."""


def _workers(page: Page, report: Report) -> None:
    if not report.workers:
        return
    text = "Who got what, and when. A faint row is an idle worker, a strong column a burst."
    page.section("Workers", text, folded=True)
    balance, window = report.balance, say.span(report.series.window_s)
    text = (
        f"Prompt tokens: the most loaded has {balance['max_over_mean']:.3f} times the mean; standard deviation "
        f"{balance['variation']:.3f} of the mean."
    )
    rows = [row([show(worker) for show in WORKERS.values()]) for worker in report.workers]
    heat = page.figure("Routing heat map", f"by worker and time, windows of {window}", draw.heat(report))
    page.cards("one", heat, card("By worker", text, table(list(WORKERS), rows, tall=len(rows) > 16)))


def _misses(page: Page, report: Report) -> None:
    if not report.reuse:
        return
    page.section(
        "What missed and why",
        "Every prompt token was found in a cache, or computed for one of these reasons. Requests count where their cached "
        "prefix ended.",
        folded=True,
    )
    rows = []
    for key, words in say.SOURCES.items():
        share = report.reuse.get(key)
        if share is not None and (share.part or key == "device"):
            rows.append(_swatched(key, words, share))
    rows.append(_share("Reused", report.reuse["all"], "sum"))
    for key, words in BOUNDS.items():
        if key in report.bounds:
            rows.append(_share(f"At best: {words.lower()}", report.bounds[key], "bound"))
    for key, words in say.REASONS.items():
        tokens = report.missed_tokens.get(key)
        if tokens is not None:
            rows.append(_swatched(key, f"Computed: {words.lower()}", tokens, report.misses.get(key)))
    columns = ["", "of prompt tokens", "tokens", "prefixes ended", "numerator / denominator"]
    page.cards("one", card("Prompt tokens", "", table(columns, rows)))
    if steps := report.waterfall.steps:
        text = (
            "From an endless cache to what was delivered. Steps add up; a plus in time is prefill that had to be done. "
            + " ".join([EXPLAINED, *absent_notes(report)])
        )
        rows = [
            row([LEVELS[step.level].capitalize(), *step_cells(step, report)], marks=["", "", "", "", "", "words"])
            for step in steps
        ]
        columns = ["", "tokens", "of prompt tokens", "change", "prefill time", "lost / won by"]
        bar = draw.waterfalls([report], [say.name_of(report)]) | {"names": False}
        page.cards("one", card("Where the reuse went", text.strip(), page.chart(bar) + table(columns, rows)))


def _share(words: str, share: Share, kind: str = "", requests: Share | None = None) -> str:
    ended = say.whole(requests.part) if requests else ""
    return row(
        [words, say.percent(share.value), say.whole(share.part), ended, share.of], kind, ["", "", "", "", "words"]
    )


def _swatched(key: str, words: str, share: Share, requests: Share | None = None) -> str:
    swatch = f'<td><i class="swatch" style="background:var(--{draw.COLORS[key]})"></i>'
    return _share(words, share, requests=requests).replace("<td>", swatch, 1)


def _tenants(page: Page, report: Report) -> None:
    if report.tenants:
        page.section("Tenants", "Who asked for what, what it found, what it cost and how long it took.", folded=True)
        rows = map(row, say.tenant_rows(report.tenants, report.cache_time or {}))
        page.cards("one", card("By tenant", "", table(["", *say.TENANTS], rows, tall=len(report.tenants) > 16)))


def _flow(page: Page, report: Report) -> None:
    if report.flow:
        page.section("Flow control", say.held_back(report.flow), folded=True)
        if report.flow.longest_waits:
            waits = table(say.WAITS, map(row, say.wait_rows(report.flow)))
            page.cards("one", card("Why did these requests wait?", "The ten that waited longest.", waits))


def _sessions(page: Page, report: Report) -> None:
    sessions = report.sessions
    if not sessions:
        return
    page.section("Sessions", session_words.summary(sessions), folded=True)
    text = "From a session's first arrival to its last end, and by what its end waited for."
    spreads = table(["", *say.COLUMNS], map(row, session_words.spread_rows(sessions)))
    causes = table(["", "mean", "of completion"], map(row, session_words.cause_rows(sessions)))
    cards = [card("How long they took", text, spreads + causes)]
    shares = table(["", "share", "of"], map(row, session_words.share_rows(sessions)))
    cards.append(card("What they found", "Reuse, moves between workers, and what lay on devices.", shares))
    if sessions.sizes:
        columns = ["", "sessions", "service time alone", "service time", "slowdown", "p90"]
        text = "By the time that a session takes alone on an idle fleet."
        cards.append(card("Slowdown by size", text, table(columns, map(row, session_words.size_rows(sessions)))))
    page.cards(
        "one", *cards, card("The slowest", "Click one for its requests.", "".join(map(_timeline, sessions.slowest)))
    )


def _timeline(session: SlowSession) -> str:
    name, completion, slowdown, requests, migrations, causes = session_words.slow_row(session)
    head = f"{name}: {completion}, slowdown {slowdown}, {requests} requests, {migrations} moves; {causes}"
    left = f"<p>{session.left_out:,} quicker requests are left out.</p>" if session.left_out else ""
    rows = table(session_words.TURN_COLUMNS, map(row, session_words.turn_rows(session)), tall=len(session.turns) > 16)
    return f"<details><summary>{esc(head)}</summary>{left}{rows}</details>"


def _scaling(page: Page, report: Report) -> None:
    if report.scaling is None:
        return
    page.section("Autoscaling", " ".join(say.scaled(report.scaling)))
    if report.scaling.workers:
        cards = [
            page.figure("Workers", "that were on: starting, taking requests or draining", draw.workers_on(report)),
            page.figure("Load", "requests arriving", draw.offered(report)),
        ]
        if report.scaling.within_slo:
            cards.append(page.figure("SLO", "of the requests that arrived then", draw.within_slo(report)))
        page.cards("three", *cards)
    rows = [
        row([say.span(seconds), role, say.whole(before), say.whole(after)])
        for seconds, role, before, after in report.scaling.actions
    ]
    table_ = table(["at", "role", "workers before", "after"], rows, tall=len(rows) > 16)
    acts = f"<details><summary>Each change of the number of workers</summary>{table_}</details>"
    page.add(f'<section class="card">{acts}</section>')


def _handovers(page: Page, report: Report) -> None:
    handovers = report.handovers
    if handovers is None:
        return
    page.section("Prefill and decode", say.handed_over(handovers), folded=True)
    columns = ["", *(f"{name} (ms)" for name in say.COLUMNS)]
    stages = table(columns, map(row, say.stage_rows(handovers)))
    roles = table(["", "", "busy", "bytes", "of bandwidth"], map(row, say.role_rows(handovers)))
    page.cards(
        "one",
        card(
            "From arrival to first token",
            "Of finished requests that were handed over. The stages of a request add up to its time to first token.",
            stages,
        ),
        card(
            "Roles and network",
            "Busy: time in passes, or in which anything moved / time of the run. Of bandwidth: bytes moved / bytes that "
            "could have.",
            roles,
        ),
    )


def _tiers(page: Page, report: Report) -> None:
    if not report.transfers and not (report.tiers and report.tiers["device"].evicted_blocks):
        return
    text = "What caches evicted, and what moved between them. All workers together."
    page.section("Tiers and links", text, folded=True)
    rows = []
    for name, tier in report.tiers.items():
        cells = [name.capitalize(), say.whole(tier.capacity_blocks), say.whole(tier.evicted_blocks)]
        for way in ("outward", "inward"):
            use = tier.links.get(way)
            if use is None:
                cells += ["", "", ""]
            else:
                share = say.percent(use.bandwidth.value) if use.bandwidth else "no limit"
                cells += [say.amount(use.bytes), say.percent(use.busy.value), share]
        rows.append(row(cells))
    columns = [
        "",
        "blocks",
        "evicted",
        "written",
        "link out busy",
        "of bandwidth",
        "read",
        "link in busy",
        "of bandwidth",
    ]
    cards = [
        card(
            "Tiers",
            "Busy: time in which anything moved / time of the run. Of bandwidth: bytes moved / bytes that could have.",
            table(columns, rows),
        )
    ]
    if report.transfers:
        wait = report.loading
        text = "Waited: how much later they landed than on idle links."
        if wait.count:
            times = f"{say.measured(wait.mean)} ms on average, p99 {say.measured(wait.p99)} ms"
            text += f" {wait.count:,} requests waited for loads, {times}."
        if report.left_requests:
            text += f" {say.left_loads(report)}."
        if report.pulls is not None:
            text += f" {say.pulled(report.pulls)}."
        cards.append(card("Transfers", text, table(["", *say.TRANSFERS], map(row, say.transfer_rows(report)))))
    page.cards("one", *cards)


def _router(page: Page, report: Report) -> None:
    router = report.router
    if router is None:
        return
    failures = say.failed_workers(report.config)
    cause = f" ({failures})" if failures else ""
    text = f"{router.policy}, {router.decisions:,} decisions, {router.retries:,} made again after a failure{cause}."
    page.section("Router", text, folded=True)
    if not router.regret.whole:
        text = f"{router.policy} saw no worker with any of a prompt, so it isn't known what another choice would have saved."
        page.add(f'<section class="card"><p>{esc(text)}</p></section>')
        return
    rows = [
        row(
            [words, say.percent(share.value), f"{share.part:,} / {share.whole:,}", share.of],
            marks=["", "", "", "words"],
        )
        for words, share in (
            ("Regret", router.regret),
            ("Longest prefix chosen", router.best),
            ("Belief that held", router.belief),
        )
    ]
    page.cards("one", card("Decisions", "", table(["", "share", "counts", "numerator / denominator"], rows)))


def _settings(page: Page, report: Report) -> None:
    text = "The same settings and trace give the same report, byte for byte."
    if report.live is not None:
        text = "A live run: the next one is a little different."
    page.section("What was run", text, folded=True)
    lists = {"Configuration": report.config, "Trace": report.trace, "Bounds": report.bounds}
    page.add(f'<section class="card">{"".join(listing(*pair) for pair in lists.items())}</section>')


SECTIONS: tuple[Callable[[Page, Report], None], ...] = (
    _scaling,
    _latencies,
    _over_time,
    _workers,
    _misses,
    _tenants,
    _flow,
    _sessions,
    _handovers,
    _tiers,
    _router,
    _settings,
)
"""Parts of the page below the first screen, in order. Each adds nothing if the report has nothing for it."""
