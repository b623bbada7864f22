"""A search as a page: the front, which settings matter, a slice along each of them, and all points. Needs no network."""

from collections.abc import Sequence

from kvyard import __version__
from kvyard.lab.tune.goals import COST, FIGURES, shown_figure
from kvyard.lab.tune.look import Look
from kvyard.lab.tune.space import Choices
from kvyard.lab.tune.table import columns
from kvyard.lab.tune.tuned import Tuned
from kvyard.lab.tune.words import asked, doubts, point, tested, verdict, wanted
from kvyard.replay.report import figures as draw
from kvyard.replay.report.html import Page, esc, head, listing, row, table, tile

BYTES = 1 << 30
STATES = {"met": "blue", "missed": "orange", "best": "green"}
MOST_TILES = 4


def page(tuned: Tuned) -> str:
    """The page's text. There is an answer."""
    answer = tuned.answer
    assert answer is not None
    made = Page(f"{asked(tuned)} · kvyard")
    parts = tuned.parts.requests
    text = (
        f"{tuned.replayed} points replayed on {parts['train']:,} requests of {tuned.trace}, the best tested on "
        f"{parts['test']:,} later ones; "
        f"{sum(one.state == 'pruned' for one in tuned.looks)} given up on a prefix, "
        f"{sum(one.state == 'skipped' for one in tuned.looks)} more left out by their cost alone."
    )
    made.add(head(asked(tuned), text, doubts(tuned)))
    made.add(f"<p><b>{esc(verdict(tuned))}</b> {esc(tested(tuned))}</p>")
    made.add('<div class="tiles">', *_tiles(tuned, answer), "</div>")
    across, up = _axes(tuned)
    made.cards(
        "two", made.figure(_title(tuned), _legend(tuned), _scatter(tuned, across, up)), *_importance(made, tuned)
    )
    made.section(
        "Slices", "Every point that was replayed as a whole, along each setting that was searched; colours as above."
    )
    made.cards("two", *(_slice(made, tuned, name) for name in tuned.space.dimensions))
    made.section("All points", "In the order in which they were looked at. Milliseconds, and prices per hour.")
    made.add('<section class="card wide">' + _table(tuned) + "</section>")
    made.section("The answer as settings", "As in tune.toml, which kvyard replay and kvyard gateway take.")
    made.add('<section class="card">' + listing("Settings", tuned.settings(answer)) + "</section>")
    made.add(f"<footer>kvyard {esc(__version__)}</footer>")
    return made.text()


def _title(tuned: Tuned) -> str:
    return "The Pareto front" if len(tuned.goals) > 1 else "What is bought for what"


def _tiles(tuned: Tuned, answer: Look) -> list[str]:
    limits = {one.name: str(one) for one in tuned.limits}
    made = []
    for name in wanted(tuned)[:MOST_TILES]:
        value = shown_figure(answer.figures, name)
        on_test = f"test: {shown_figure(answer.test, name)}" if answer.test and name != COST else ""
        more = " · ".join(one for one in (limits.get(name, ""), on_test) if one)
        made.append(tile(name, value, "per hour" if name == COST else "", more))
    return made


def _axes(tuned: Tuned) -> tuple[str, str]:
    """The two figures of the front: both goals, or the goal and what it is traded for."""
    names = [*wanted(tuned), "ttft_p99"]
    if len(tuned.goals) > 1:
        return tuned.goals[0].name, tuned.goals[1].name
    across = COST
    return across, next(name for name in names if name != across)


def _done(tuned: Tuned) -> list[Look]:
    return [one for one in tuned.looks if one.state == "done"]


def _groups(tuned: Tuned) -> dict[str, list[Look]]:
    best = {one.number for one in tuned.best}
    found: dict[str, list[Look]] = {name: [] for name in STATES}
    for one in _done(tuned):
        found["best" if one.number in best else "met" if one.met else "missed"].append(one)
    return {name: looks for name, looks in found.items() if looks}


def _names(tuned: Tuned) -> dict[str, str]:
    if not tuned.limits:
        return {"met": "other points", "missed": "too many rejected", "best": "best"}
    return {"met": "SLO met", "missed": "SLO missed", "best": "best" if tuned.met else "closest"}


def _legend(tuned: Tuned) -> str:
    names = _names(tuned)
    return "; ".join(f"{names[kind]}: {STATES[kind]}" for kind in _groups(tuned)) + "."


def _scatter(tuned: Tuned, across: str, up: str) -> draw.Figure:
    series = []
    for name, grouped in _groups(tuned).items():
        looks = [one for one in grouped if across in one.figures and up in one.figures]
        looks.sort(key=lambda one: one.figures[across])
        x = [draw.digits(one.figures[across]) for one in looks]
        y = [draw.digits(one.figures[up]) for one in looks]
        joined = name == "best" and len(looks) > 1
        more = {"dots": True} if joined else {"only": "dots"}
        series.append(draw.line(_names(tuned)[name], y, STATES[name], x=x, **more))
    return _drawn(f"{FIGURES[across].title} and {FIGURES[up].title}", series, FIGURES[across].title, up)


def _drawn(label: str, series: Sequence[draw.Figure], x_title: str, up: str) -> draw.Figure:
    figure = draw.lines(label, series, x_title, FIGURES[up].title, height=280)
    return figure | draw.SHARE if FIGURES[up].unit == "share" else figure


def _importance(made: Page, tuned: Tuned) -> list[str]:
    if not tuned.importance:
        return []
    bars = [
        {
            "name": name,
            "parts": [{"name": name, "color": "blue", "value": draw.digits(value), "text": f"{value:.0%}"}],
            "text": f"{value:.0%}",
        }
        for name, value in tuned.importance.items()
        if value >= 0.005
    ]
    figure: draw.Figure = {
        "kind": "bars",
        "label": "Importance of settings",
        "rows": bars,
        "xTitle": "share of what tells the best quarter of points from the others",
        "xFormat": "percent",
    }
    return [made.figure("What matters", "PED-ANOVA, by Optuna: shares of 1.", figure)]


def _slice(made: Page, tuned: Tuned, name: str) -> str:
    """The goal's figure (where that is the cost, the first limit's) along one setting."""
    up = next((one for one in wanted(tuned) if one != COST), COST)
    dimension = tuned.space.dimensions[name]
    if isinstance(dimension, Choices):
        return made.figure(name, "The best with each, by the goal.", _bars(tuned, name, dimension))
    scale = BYTES if name.endswith("bytes") or name == "gpu_memory" else 1
    series = []
    for kind, grouped in _groups(tuned).items():
        looks = [one for one in grouped if up in one.figures]
        looks.sort(key=lambda one: dimension.place(one.point[name]))
        x = [draw.digits(dimension.place(one.point[name]) / scale) for one in looks]
        y = [draw.digits(one.figures[up]) for one in looks]
        series.append(draw.line(_names(tuned)[kind], y, STATES[kind], x=x, only="dots"))
    title = f"{name.replace('_', ' ')}{', GiB' if scale > 1 else ''}"
    return made.figure(name, "", _drawn(f"{FIGURES[up].title} by {name}", series, title, up))


def _bars(tuned: Tuned, name: str, dimension: Choices) -> draw.Figure:
    goal = tuned.goals[0]
    bars = []
    for value in dimension.values:
        looks = [one for one in _done(tuned) if one.point[name] == value]
        kept = [one for one in looks if one.met]
        if not looks:
            continue
        best = min(kept or looks, key=lambda one: (max(0.0, one.violation), one.losses(tuned.goals)))
        least = best.figures[goal.name]
        text = FIGURES[goal.name].shown(least) + ("" if kept else ", SLO missed" if tuned.limits else "")
        color = STATES["met" if kept else "missed"]
        bars.append(
            {
                "name": value,
                "parts": [{"name": str(goal), "color": color, "value": draw.digits(least), "text": text}],
                "text": text,
            }
        )
    title = FIGURES[goal.name].title
    figure: draw.Figure = {"kind": "bars", "label": f"{title} by {name}", "rows": bars, "xTitle": title}
    return figure | {"xFormat": "percent"} if FIGURES[goal.name].unit == "share" else figure


def _table(tuned: Tuned) -> str:
    names = columns(tuned)
    made = []
    best = {one.number for one in tuned.best}
    for one in tuned.looks:
        figures = [FIGURES[COST].shown(one.cost) if name == COST else shown_figure(one.figures, name) for name in names]
        state = (
            "best"
            if one.number in best
            else ("SLO met" if one.met else "SLO missed")
            if one.state == "done"
            else one.state
        )
        made.append(row([str(one.number), point(one, tuned), *figures, state, one.why]))
    return table(["trial", "point", *names, "", "why"], made, tall=True)
