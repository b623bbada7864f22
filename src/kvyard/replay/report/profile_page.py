"""Charts of a timing profile against measured passes, as one HTML page that needs nothing else."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kvyard.engine.timing.measurements import Measurements
from kvyard.engine.timing.profile import Profile, pass_ms
from kvyard.replay.report.figures import RUN_COLORS, Figure, line, lines, rounded
from kvyard.replay.report.html import Page, head

PAST = (0, 2048, 8192, 32768)
CONTEXT = (256, 1024, 4096, 16384, 65536)
POINTS = 60
"""Points of a line."""

BOTH_LOG: Figure = {"xScale": "log", "yScale": "log", "yFormat": "ms", "height": 420}
Points = Mapping[int, Sequence[tuple[int, float]]]


def page(profile: Profile, data: Measurements | None) -> str:
    """Return the page's text."""
    prefill: dict[int, list[tuple[int, float]]] = defaultdict(list)
    decode: dict[int, list[tuple[int, float]]] = defaultdict(list)
    rows = data.rows if data is not None else ()
    for row in rows:
        if row.kind == "prefill":
            prefill[row.prefills[0][1]].append((row.prefills[0][0], row.ms))
        elif row.kind == "decode":
            decode[row.context // row.batch].append((row.batch, row.ms))
    of = profile.form
    html = Page(f"{profile.name} · kvyard")
    html.add(head(profile.name, ", ".join(filter(None, (profile.source, profile.device)))))
    text = "a line for what the profile says, dots for what was measured" if rows else "what the profile says"
    charts = [
        html.figure(
            "Prefill",
            f"a pass by new tokens, for each number of past ones: {text}",
            _lines(
                "past", "new tokens", prefill, PAST, (16, 32768), lambda new, past: pass_ms(of, [(new, past)], 0, 0)
            ),
        ),
        html.figure(
            "Decode",
            f"a step by batch, for each length of context: {text}",
            _lines("context", "batch", decode, CONTEXT, (1, 512), lambda n, ctx: pass_ms(of, (), n, n * ctx)),
        ),
    ]
    if rows:
        passes = [(row.ms, pass_ms(of, *row.shape)) for row in rows]
        charts.append(html.figure("Measured and estimated", "all passes, on the line where equal", _agreement(passes)))
    html.cards("one", *charts)
    return html.text()


def _lines(
    what: str,
    along: str,
    measured: Points,
    default: Sequence[int],
    span: tuple[int, int],
    ms: Callable[[int, int], float],
) -> Figure:
    """Return a line of estimates for each value of ``what``, and a dot for each measured point."""
    first, last = span
    xs = sorted({round(first * (last / first) ** (i / (POINTS - 1))) for i in range(POINTS)})
    series: list[Figure] = []
    for index, value in enumerate(sorted(measured) or default):
        color, name = RUN_COLORS[index % len(RUN_COLORS)], f"{what} {value}"
        series.append(line(name, rounded([ms(x, value) for x in xs]), color, x=xs))
        if measured.get(value):
            sizes, took = zip(*measured[value], strict=True)
            series.append(line(f"{name}, measured", took, color, x=sizes, only="dots"))
    return lines(f"ms by {along}", series, f"{along} (log)", "ms (log)", xUnit=along, **BOTH_LOG)


def _agreement(passes: Sequence[tuple[float, float]]) -> Figure:
    measured, estimated = zip(*passes, strict=True)
    ends = [min(measured), max(measured)]
    series = [line("equal", ends, "grey2", x=ends), line("passes", rounded(estimated), "blue", x=measured, only="dots")]
    return lines("measured and estimated", series, "measured ms (log)", "estimated ms (log)", xTip="ms", **BOTH_LOG)
