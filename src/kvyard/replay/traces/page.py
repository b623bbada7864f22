"""A trace as a page of charts: one file that needs no network. Only loaded when asked for."""

from collections.abc import Sequence
from math import log
from pathlib import Path

from kvyard.integers import ceil_div
from kvyard.replay.report.figures import SHARE, Figure, coarse, digits, line, lines, rounded, time_axis
from kvyard.replay.report.html import Page, head
from kvyard.replay.traces.info import Info, Reuse
from kvyard.replay.traces.writing import packed_file

POINTS = 300
"""Most points of a line."""
BY_BLOCKS: Figure = {"xScale": "log", "xUnit": "blocks", **SHARE}


def write_page(info: Info, path: str | Path) -> None:
    """Write the page to a new file. Raises ``KvyardError`` if that can't be done."""
    with packed_file(Path(path)) as file:
        file.write(page(info).encode())


def page(info: Info) -> str:
    """Return the page's text."""
    name = Path(info.name).name
    html = Page(f"{name} · kvyard")
    html.add(head(name, _summary(info)))
    charts = []
    if info.arrivals:
        text = f"requests that arrive by themselves, in windows of {info.window:.3g} s"
        charts.append(html.figure("Arrivals", text, _over_time(info, info.arrivals, "requests a second", "blue")))
        tokens = _over_time(info, info.arriving_tokens, "prompt tokens a second", "orange")
        charts.append(html.figure("Arriving prompt tokens", "of those requests", tokens))
    for key, title, color in (("input", "Prompts", "blue"), ("output", "Answers", "orange")):
        text = "requests by length, four steps to a doubling"
        charts.append(html.figure(title, text, _lengths(info.lengths[key], f"{title.lower()}, tokens (log)", color)))
    if info.reuse is not None:
        text = "prompts in order, without time passing"
        charts.append(html.figure("What a cache hits", text, _hits(info.reuse)))
        charts.append(html.figure("Reuse distance", "how far back a cache must remember", _distances(info.reuse)))
    html.cards("two", *charts)
    return html.text()


def _summary(info: Info) -> str:
    parts = [f"{info.requests:,} requests ({info.format})", f"{info.input.mean:,.0f} tokens in"]
    parts.append(f"{info.output.mean:,.0f} out on average")
    if info.sessions:
        parts.append(f"{info.sessions:,} sessions")
    if info.rate is not None:
        parts.append(f"{info.rate:.2f} a second over {info.duration:,.0f} s")
    if info.reuse is not None:
        parts.append(f"at most {info.reuse.infinite_tokens:.1%} of prompt tokens reusable")
    return " · ".join(parts)


def _over_time(info: Info, counts: Sequence[int], what: str, color: str) -> Figure:
    step = ceil_div(len(counts), POINTS) or 1
    rates = coarse([count / info.window for count in counts], step)
    by, axis = time_axis(len(counts) * info.window)
    middle = [
        digits((index * step + min(step, len(counts) - index * step) / 2) * info.window / by)
        for index in range(len(rates))
    ]
    return lines(what, [line(what, rates, color)], "", what, x=middle, xMin=0) | axis


def _lengths(counted: Sequence[tuple[float, int]], what: str, color: str) -> Figure:
    """Steps without requests are left out of ``counted``, and the axis needs them."""
    step = 2**0.25
    ends: list[float] = []
    counts: list[int] = []
    for upper, count in counted:
        while ends and ends[-1] * step < upper * 0.999:
            ends.append(ends[-1] * step)
            counts.append(0)
        ends += [upper] if ends else [upper / step, upper]
        counts.append(count)
    return {
        "kind": "histogram",
        "label": what,
        "ends": rounded(ends),
        "counts": counts,
        "zeros": 0,
        "marks": [],
        "color": color,
        "xTitle": what,
        "xTip": "",
        "yTitle": "requests",
        "height": 250,
    }


def _few(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Thin out ``points`` to those that can be seen: the last of each of ``POINTS`` steps along a logarithmic axis, and the
    first."""
    if len(points) <= POINTS:
        return list(points)
    first, last = max(1, points[0][0]), max(2, points[-1][0])
    kept = {0: points[0]}
    for x, value in points:
        kept[1 + round(POINTS * log(max(1, x) / first) / log(last / first))] = (x, value)
    return list(kept.values())


def _hits(reuse: Reuse) -> Figure:
    sizes, shares = zip(*_few(reuse.curve), strict=True)
    best_sizes, best = zip(*_few(reuse.best), strict=True)
    series = [
        line("LRU", shares, "blue", x=sizes),
        line("Belady (best)", best, "green", x=best_sizes, dash="2 4", dots=True),
        line("room for everything", [reuse.infinite_blocks] * 2, "grey2", x=[sizes[0], sizes[-1]], dash="7 5"),
    ]
    x = f"cache size in blocks of {reuse.block_size} tokens (log)"
    return lines("What a cache hits", series, x, "blocks hit / blocks looked up", **BY_BLOCKS)


def _distances(reuse: Reuse) -> Figure:
    shown = _few(reuse.distances)
    series = [
        line("used again within", [share for _, share in shown], "blue", x=[max(1, blocks) for blocks, _ in shown])
    ]
    x = "different blocks touched in between (log)"
    return lines("Reuse distance", series, x, "share of blocks used again", **BY_BLOCKS)
