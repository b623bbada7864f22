"""Plots of a profile against measured passes, as one HTML page that needs nothing else. Needs the ``report`` extra."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvyard.engine.timing.measurements import Measurements
from kvyard.engine.timing.profile import Profile
from kvyard.engine.timing.profile_form import pass_ms
from kvyard.errors import KvyardError

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
PAST = (0, 2048, 8192, 32768)
CONTEXT = (256, 1024, 4096, 16384, 65536)

Points = dict[int, list[tuple[int, float]]]


def page(profile: Profile, data: Measurements | None) -> str:
    """The page. Raises ``KvyardError`` if plotly isn't installed."""
    try:
        from plotly.graph_objects import Figure
        from plotly.subplots import make_subplots
    except ImportError:
        raise KvyardError("plots need plotly: pip install 'kvyard[report]'") from None
    titles = ["prefill: ms by new tokens, a line per past", "decode: ms a step by batch, a line per context"]
    prefill: Points = defaultdict(list)
    decode: Points = defaultdict(list)
    rows = data.rows if data is not None else ()
    for row in rows:
        if row.kind == "prefill":
            prefill[row.prefills[0][1]].append((row.prefills[0][0], row.ms))
        elif row.kind == "decode":
            decode[row.ctx].append((row.batch, row.ms))
    if rows:
        titles.append("measured and estimated, ms, all passes")
    figure: Figure = make_subplots(rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.09)
    of = profile.coefficients
    _lines(figure, 1, "past", prefill, PAST, (16, 32768), lambda new, past: pass_ms(of, [(new, past)], 0, 0))
    _lines(figure, 2, "context", decode, CONTEXT, (1, 512), lambda batch, ctx: pass_ms(of, (), batch, batch * ctx))
    if rows:
        _agreement(figure, 3, [(row.ms, pass_ms(of, *row.shape), f"{row.kind}: {row}") for row in rows])
    for place, name in enumerate(("new tokens", "batch", "measured ms")[: len(titles)], 1):
        figure.update_xaxes(type="log", dtick=1, title_text=name, row=place, col=1)
        figure.update_yaxes(type="log", dtick=1, title_text="estimated ms" if place == 3 else "ms", row=place, col=1)
    figure.update_layout(
        title=", ".join(filter(None, (profile.name, profile.source, profile.device))),
        template="plotly_white",
        height=480 * len(titles),
        font={"family": "system-ui, sans-serif"},
    )
    text: str = figure.to_html(include_plotlyjs=True, full_html=True, div_id="profile")
    return text


def _lines(
    figure: Any,
    row: int,
    what: str,
    points: Points,
    default: Sequence[int],
    span: tuple[int, int],
    ms: Callable[[int, int], float],
) -> None:
    """A line of estimates for each value of ``what``, and a mark for each measured point."""
    xs = sorted({round(x) for x in np.geomspace(*span, 60)})
    for index, value in enumerate(sorted(points) or default):
        style = {"color": COLOURS[index % len(COLOURS)]}
        name = f"{what} {value}"
        line = {"mode": "lines", "line": style, "name": name, "legendgroup": name, "row": row, "col": 1}
        figure.add_scatter(x=xs, y=[ms(x, value) for x in xs], **line)
        if points.get(value):
            x, y = zip(*points[value])
            mark = {"mode": "markers", "marker": style, "legendgroup": name, "showlegend": False, "row": row, "col": 1}
            figure.add_scatter(x=x, y=y, name=f"{name}, measured", **mark)


def _agreement(figure: Any, row: int, points: Sequence[tuple[float, float, str]]) -> None:
    measured, estimated, names = zip(*points)
    ends = [min(measured), max(measured)]
    figure.add_scatter(x=ends, y=ends, mode="lines", line={"color": "#ccc"}, name="equal", row=row, col=1)
    figure.add_scatter(
        x=measured, y=estimated, text=names, mode="markers", marker={"color": COLOURS[0]}, name="passes", row=row, col=1
    )
