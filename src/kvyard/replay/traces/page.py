"""A trace as a page of plots: one file that needs no network. Only loaded when asked for."""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.traces.info import Info, Reuse
from kvyard.replay.traces.writing import new_file

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#c05621", "#2f855a", "#718096"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a202c; background: #f7fafc; margin: 0 auto; max-width: 1200px;
  padding: 1.5rem; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; } p { margin: 0 0 1rem; color: #4a5568; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1rem; }
.plots section { background: #fff; border: 1px solid #e2e8f0; border-radius: 6px; padding: .75rem; min-width: 0; }
h2 { font-size: 1rem; margin: 0; } section p { font-size: .85rem; margin: 0; } .plot { height: 340px; }
"""


def write_page(info: Info, path: str | Path) -> None:
    """Write the page to a new file. Raises ``KvyardError`` where that can't be done, or plotly isn't installed."""
    text = page(info)
    with new_file(Path(path)) as file:
        file.write(text.encode())


def page(info: Info) -> str:
    """The page's text. Raises ``KvyardError`` if plotly isn't installed."""
    try:
        script = (files("plotly") / "package_data" / "plotly.min.js").read_text()
    except (ModuleNotFoundError, FileNotFoundError):
        raise KvyardError("plots need plotly: pip install 'kvyard[report]'") from None
    plots = [*_arrivals(info), _lengths(info)]
    if info.reuse is not None:
        plots += [_hits(info.reuse), _distances(info.reuse)]
    sections = "\n".join(
        f'<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p><div class="plot" id="plot{i}"></div></section>'
        for i, (title, text, _) in enumerate(plots)
    )
    figures = msgspec.json.encode([figure for _, _, figure in plots]).decode().replace("</", "<\\/")
    name = html.escape(Path(info.name).name)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>{_STYLE}</style><script>{script}</script></head><body>
<h1>{name}</h1><p>{html.escape(_summary(info))}</p>
<div class="plots">
{sections}
</div>
<script>
const figures = {figures};
const options = {{responsive: true, displayModeBar: false}};
figures.forEach((figure, i) => Plotly.newPlot("plot" + i, figure.data, figure.layout, options));
</script></body></html>
"""


_Plot = tuple[str, str, dict[str, Any]]


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


def _arrivals(info: Info) -> list[_Plot]:
    if not info.arrivals:
        return []
    seconds = [round((i + 0.5) * info.window, 3) for i in range(len(info.arrivals))]
    requests = [count / info.window for count in info.arrivals]
    tokens = [count / info.window for count in info.arriving_tokens]
    layout = _layout("seconds", "requests a second")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["yaxis2"] = {
        "title": {"text": "prompt tokens a second"},
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
    }
    layout["yaxis2"] |= {"rangemode": "tozero"}
    data = [
        {"x": seconds, "y": requests, "name": "requests", "line": {"color": BLUE}},
        {"x": seconds, "y": tokens, "name": "prompt tokens", "yaxis": "y2", "line": {"color": ORANGE, "width": 1}},
    ]
    text = f"requests that arrive by themselves, in windows of {info.window:.3g} s"
    return [("Arrivals", text, {"data": data, "layout": layout})]


def _lengths(info: Info) -> _Plot:
    data = [
        {
            "type": "bar",
            "x": [upper for upper, _ in info.lengths[key]],
            "y": [count for _, count in info.lengths[key]],
            "width": [upper * (1 - 2**-0.25) for upper, _ in info.lengths[key]],
            "offset": [upper * (2**-0.25 - 1) for upper, _ in info.lengths[key]],
            "name": name,
            "opacity": 0.6,
            "marker": {"color": color},
        }
        for key, name, color in (("input", "prompt", BLUE), ("output", "answer", ORANGE))
    ]
    layout = _layout("tokens", "requests", log=True) | {"barmode": "overlay"}
    return "Lengths", "requests by length, four steps to a doubling", {"data": data, "layout": layout}


def _hits(reuse: Reuse) -> _Plot:
    sizes = [size for size, _ in reuse.curve]
    data = [
        {"x": sizes, "y": [share for _, share in reuse.curve], "name": "LRU", "line": {"color": BLUE}},
        {
            "x": [size for size, _ in reuse.best],
            "y": [share for _, share in reuse.best],
            "name": "Belady (best)",
            "mode": "lines+markers",
            "line": {"color": GREEN, "dash": "dot"},
        },
        {
            "x": [sizes[0], sizes[-1]],
            "y": [reuse.infinite_blocks] * 2,
            "name": "room for everything",
            "mode": "lines",
            "line": {"color": GREY, "dash": "dash"},
        },
    ]
    layout = _layout(f"cache size in blocks of {reuse.block_size} tokens", "blocks hit / blocks looked up", log=True)
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    return "What a cache hits", "prompts in order, without time passing", {"data": data, "layout": layout}


def _distances(reuse: Reuse) -> _Plot:
    data = [
        {
            "x": [max(1, blocks) for blocks, _ in reuse.distances],
            "y": [share for _, share in reuse.distances],
            "name": "share",
            "line": {"color": BLUE},
            "fill": "tozeroy",
        }
    ]
    layout = _layout("different blocks touched in between", "share of blocks used again", log=True) | {
        "showlegend": False
    }
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    return "Reuse distance", "how far back a cache must remember", {"data": data, "layout": layout}


def _layout(x: str, y: str, log: bool = False) -> dict[str, Any]:
    return {
        "margin": {"l": 60, "r": 60, "t": 10, "b": 50},
        "xaxis": {"title": {"text": x}, "type": "log" if log else "linear", "gridcolor": "#edf2f7"},
        "yaxis": {"title": {"text": y}, "gridcolor": "#edf2f7"},
        "legend": {"orientation": "h", "y": 1.12},
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
    }
