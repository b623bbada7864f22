"""Result of a search: all points, the best of them or the front, and the answer; as tables and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvyard.engine.price_list import default_prices
from kvyard.integers import ceil_div
from kvyard.lab.study import Chart, Result, Row, Section, Table
from kvyard.lab.study.advice import answer, at_edges, choose, middle
from kvyard.lab.study.charts import Bar, Dot, Dots, bars, bars_of, dots
from kvyard.lab.study.cost import GIB, Prices, cards, currency_of
from kvyard.lab.study.goals import Goal
from kvyard.lab.study.settings_file import as_toml
from kvyard.lab.tune.parts import TraceParts
from kvyard.lab.tune.space import Choices, Space, Steps
from kvyard.lab.tune.trial import Trial
from kvyard.replay.report.html import tile
from kvyard.replay.report.metrics import COST, Metric
from kvyard.replay.report.room import what_ifs
from kvyard.replay.report.slo import WANTED, Limit, missed, rejections_alone

MOST_ROWS = 8
MOST_TILES = 4
FURTHER = ("reuse", "ttft_mean", "ttft_p99", "itl_p99")
"""Metrics that are shown beside those of goals and limits."""
NOT_THERE = "SLO met where it was searched, NOT met on the test part"
COLORS = {"met": "blue", "missed": "orange", "best": "green"}


class Tuned(msgspec.Struct):
    """Result of a search so far."""

    trace: str
    folder: Path
    base: dict[str, object]
    """Settings that aren't searched."""
    space: Space
    goals: list[Goal]
    limits: list[Limit]
    prices: Prices
    parts: TraceParts
    seed: int
    trials: list[Trial] = msgspec.field(default_factory=list)
    """All points, in the order in which they were asked for."""
    importance: dict[str, float] = msgspec.field(default_factory=dict)
    """Importance of settings: shares of 1."""
    found: int = 0
    """Points that were there from an earlier run."""
    interrupted: bool = False

    @property
    def distinct(self) -> list[Trial]:
        """All points without those that were asked for again."""
        by_identity: dict[str, Trial] = {}
        for trial in self.trials:
            by_identity.setdefault(trial.identity, trial)
        return list(by_identity.values())

    @property
    def done(self) -> list[Trial]:
        """Points that were replayed as a whole, each once."""
        return [trial for trial in self.distinct if trial.state == "done"]

    @property
    def met(self) -> bool:
        """True if a point keeps all limits."""
        return any(trial.met for trial in self.trials)

    @property
    def replayed(self) -> int:
        """Number of points that needed a replay."""
        return len(self._replayed())

    @property
    def idle(self) -> int:
        """Number of latest points that needed no replay."""
        seen = {trial.number for trial in self._replayed()}
        return len(self.trials) - max(
            (count for count, trial in enumerate(self.trials, 1) if trial.number in seen), default=0
        )

    @property
    def exhausted(self) -> bool:
        """True if every point there is was looked at."""
        size = self.space.size
        return size is not None and len(self.distinct) >= size

    @property
    def metrics(self) -> list[Metric]:
        """Metrics of the goals."""
        return [goal.metric for goal in self.goals]

    @property
    def wanted(self) -> list[Metric]:
        """Metrics of goals and limits, each once; the cost in any case."""
        return list(dict.fromkeys([*self.metrics, *(WANTED[limit.name] for limit in self.limits), COST]))

    @property
    def best(self) -> list[Trial]:
        """With one goal the best point, with several the Pareto front; the closest if no point keeps the limits."""
        return choose(self.done, self.metrics)

    @property
    def answer(self) -> Trial | None:
        """The one point that is written as settings."""
        best = self.best
        return middle(best, self.metrics) if best else None

    def settings(self, trial: Trial) -> dict[str, object]:
        """Return all settings of a point."""
        return {**self.base, **trial.point}

    def cards(self, trial: Trial) -> float | None:
        """Return the number of cards of a point; ``None`` if its settings can't be."""
        return None if trial.config is None else cards(self.settings(trial), trial.config)

    @property
    def currency(self) -> str:
        """Unit of costs: the price list's, unless prices were set."""
        currency = currency_of(self.prices, self.base.get("gpu"))
        return f"{currency} an hour, prices of {default_prices().date}" if currency else "your prices per hour"

    def sentences(self) -> list[str]:
        """Return the answer, how it does on the test part, and what to doubt."""
        slo = " and ".join(map(str, self.limits))
        parts = answer(self.done, self.metrics, self.limits, slo, self.replayed)
        if self.answer is None:
            return ["No point could be replayed."]
        return parts.also(_tested(self, self.answer), *_doubts(self, self.answer)).sentences

    def result(self) -> Result:
        """Return it to be shown."""
        return view(self)

    def show(self) -> None:
        """Print the answer."""
        self.result().show()

    def save(self) -> list[Path]:
        """Write ``tune.csv``, ``tune.json``, ``tune.html`` and ``tune.toml``, the last two if there is an answer; returns
        where. Raises ``KvyardError``.
        """
        return self.result().save(self.folder)

    def _replayed(self) -> list[Trial]:
        return [trial for trial in self.distinct if trial.config is not None and trial.state != "skipped"]


def view(tuned: Tuned) -> Result:
    """Return the result of a search: the best points, what they are traded for, and slices along each setting."""
    answer = tuned.answer
    goals = ", ".join(map(str, tuned.goals))
    goals = goals[:1].upper() + goals[1:]
    asked = f"{goals} with {' and '.join(map(str, tuned.limits))}" if tuned.limits else goals
    requests = tuned.parts.requests
    states = [trial.state for trial in tuned.trials]
    unfinished = {
        "given up on a prefix": states.count("pruned"),
        "left out by their cost alone": states.count("skipped"),
    }
    sentences = tuned.sentences()
    return Result(
        kind="tune",
        title=asked,
        about=f"{tuned.replayed} points replayed on {requests['train']:,} requests of {tuned.trace}, the best tested on "
        f"{requests['test']:,} later ones{''.join(f'; {count} {why}' for why, count in unfinished.items() if count)}.",
        tables=[_table(tuned, asked)] if answer is not None else [],
        rows=[_row(tuned, trial) for trial in tuned.trials],
        facts={
            "trace": tuned.trace,
            "goals": list(map(str, tuned.goals)),
            "slo": {limit.name: limit.value for limit in tuned.limits},
            "prices": tuned.prices,
            "requests": requests,
            "seed": tuned.seed,
            "met": tuned.met,
            "answer": None if answer is None else tuned.settings(answer),
            "says": sentences,
            "importance": tuned.importance,
        },
        advice=sentences,
        met=tuned.met and answer.test_violation <= 0 if tuned.limits and answer is not None else None,
        verdict=NOT_THERE if tuned.met and answer is not None and answer.test_violation > 0 else "",
        legend=f"Times are in ms unless a column says s, costs in {tuned.currency}.",
        tiles=[] if answer is None else _tiles(tuned, answer),
        sections=[
            Section(
                title="The Pareto front" if len(tuned.goals) > 1 else "What is bought for what",
                text="Each dot is a point that was replayed as a whole, a dashed line a limit.",
                charts=[*_scatters(tuned), *_importance(tuned)],
            ),
            Section(
                title="Slices",
                text="Every point that was replayed as a whole, along each setting that was searched; colours as above.",
                charts=[_slice(tuned, name) for name in tuned.space.dimensions],
            ),
            Section(title="All points", text="In the order in which they were looked at.", table=_all_points(tuned)),
        ],
        config=None if answer is None else ("Settings of the answer, as in tune.toml", tuned.settings(answer)),
        files={
            "tune.toml": lambda: as_toml(
                "tune",
                [f"kvyard tune {tuned.trace}: {asked}", *sentences],
                tuned.settings(answer) if answer is not None else {},
                tuned.prices,
            )
        },
    )


def _tested(tuned: Tuned, trial: Trial) -> str:
    """Describe the answer's result on the part that it was not searched on."""
    if tuned.parts.test is None:
        return "It was not tested on anything else: --test 0.3 keeps the last 30 % of the trace for that."
    if not trial.test:
        return "It has not been replayed on the test part yet."
    metrics = [metric for metric in tuned.wanted if metric is not COST]
    results = [f"{metric.title} {metric.text(trial.test.get(metric.name), unit=True)}" for metric in metrics]
    requests = f"{tuned.parts.requests['test']:,} requests, later and not searched on"
    result = f"On the test part ({requests}): {', '.join(results) or 'replayed'}"
    if trial.test_violation <= 0:
        return f"{result}{'; the SLO is met there too' if tuned.limits else ''}."
    why = missed(trial.test, tuned.limits)
    return f"{result}. The SLO is missed there: {why}."


def _doubts(tuned: Tuned, best: Trial) -> list[str]:
    """Return the doubts about the answer."""
    flat = {name.rpartition(".")[2]: value for name, value in tuned.space.flat(best.point).items()}
    beyond = [] if best.config is None else what_ifs(msgspec.to_builtins(best.config))
    edges = {
        f"{name} {flat[name.rpartition('.')[2]]}": end
        for name, end in tuned.space.edges(best.point).items()
        if not (beyond and name == "num_gpu_blocks")
    }
    doubts = [*beyond, *([] if rejections_alone(best.values, tuned.limits) else at_edges(edges))]
    if tuned.met and best.test and best.test_violation > 0:
        alone = rejections_alone(best.test, tuned.limits)
        so = ", for rejected requests alone" if alone else ": leave room, with a lower limit in --slo"
        doubts.append(f"What is best on one part misses the SLO on the other{so}.")
    if tuned.interrupted:
        doubts.append("The search was interrupted: this is the best so far.")
    failed = [trial for trial in tuned.trials if trial.state == "failed"]
    if failed:
        doubts.append(f"{len(failed)} points couldn't be replayed, the first because {failed[0].why}")
    return doubts


def _shown(tuned: Tuned) -> list[str]:
    return list(dict.fromkeys([*(metric.name for metric in tuned.wanted), *FURTHER]))


def _table(tuned: Tuned, title: str) -> Table:
    """Return the front, or the best with those that come next."""
    best, answer = tuned.best, tuned.answer
    if len(tuned.goals) > 1 and tuned.met:
        shown = best[:: max(1, ceil_div(len(best), MOST_ROWS))]
    else:
        shown = sorted(tuned.done, key=lambda trial: (max(0.0, trial.violation), trial.losses(tuned.metrics)))[
            :MOST_ROWS
        ]
    rows = []
    for trial in shown:
        cells = {name: str(trial.point[name]) for name in tuned.space.dimensions}
        cells["cards"] = _cards_text(tuned, trial)
        options = trial.point.get("router_options")
        if tuned.space.options:
            pairs = options.items() if isinstance(options, Mapping) else ()
            cells["options"] = " ".join(f"{name}={value}" for name, value in pairs)
        if tuned.limits:
            cells["SLO"] = "met" if trial.met else "NOT met"
        rows.append(Row(cells=cells, values=trial.values, bold=trial is answer))
    return Table(rows=rows, title=title, shown=_shown(tuned))


def _all_points(tuned: Tuned) -> Table:
    best = {trial.number for trial in tuned.best}
    names = _names(tuned)
    chosen = names["best"] if tuned.met else f"{names['best']}, {names['missed']}"
    rows = []
    for trial in tuned.trials:
        done = names["met" if trial.met else "missed"] if trial.state == "done" else trial.state
        rows.append(
            Row(
                cells={
                    "trial": str(trial.number),
                    "point": trial.name,
                    "": chosen if trial.number in best else done,
                    "cards": _cards_text(tuned, trial),
                },
                values={**trial.values, COST.name: trial.cost},
                more={"why": trial.why},
            )
        )
    return Table(rows=rows, shown=_shown(tuned), tall=True)


def _row(tuned: Tuned, trial: Trial) -> dict[str, Any]:
    answer, flat = tuned.answer, tuned.space.flat(trial.point)
    own = [f"router.{policy}.{name}" for policy, options in tuned.space.options.items() for name in options]
    return {
        "trial": trial.number,
        **{name: flat.get(name) for name in (*tuned.space.dimensions, *own)},
        "cards": tuned.cards(trial),
        "state": trial.state,
        "best": any(other.number == trial.number for other in tuned.best),
        "answer": answer is not None and trial.number == answer.number,
        "slo_met": trial.met if trial.state == "done" else None,
        **{name: trial.cost if name == COST.name else trial.values.get(name) for name in WANTED},
        **{f"test_{name}": trial.test.get(name) for name in _shown(tuned) if name != COST.name},
        "why": trial.why,
    }


def _cards_text(tuned: Tuned, trial: Trial) -> str:
    count = tuned.cards(trial)
    return "–" if count is None else f"{count:g}"


def _tiles(tuned: Tuned, trial: Trial) -> list[str]:
    limits = {limit.name: limit for limit in tuned.limits}
    shown = [tile("cards", _cards_text(tuned, trial), "", trial.name)]
    shown.append(tile("cost", COST.text(trial.cost), "", tuned.currency))
    for metric in [metric for metric in tuned.wanted if metric is not COST][:MOST_TILES]:
        value, limit = trial.values.get(metric.name), limits.get(metric.name)
        test = f"test: {metric.text(trial.test.get(metric.name), unit=True)}" if trial.test else ""
        more = " · ".join(filter(None, (str(limit) if limit is not None else "", test)))
        missing = limit is not None and value is not None and limit.violation(value) > 0
        shown.append(tile(metric.name, metric.text(value, unit=True), "", more, missing))
    return shown


def _groups(tuned: Tuned) -> dict[str, list[Trial]]:
    best = {trial.number for trial in tuned.best}
    groups: dict[str, list[Trial]] = {name: [] for name in COLORS}
    for trial in tuned.trials:
        if trial.state == "done":
            groups["best" if trial.number in best else "met" if trial.met else "missed"].append(trial)
    return {name: trials for name, trials in groups.items() if trials}


def _names(tuned: Tuned) -> dict[str, str]:
    if not tuned.limits:
        return {"met": "other points", "missed": "too many rejected", "best": "best"}
    return {"met": "SLO met", "missed": "SLO NOT met", "best": "best" if tuned.met else "closest"}


def _scatters(tuned: Tuned) -> list[Chart]:
    """Return each further goal against the first, or with one goal each limited metric against the cost. The front is a line
    only between two goals: of three, each chart shows a shadow.
    """
    limits = {limit.name: limit for limit in tuned.limits}
    across, ups = COST, [metric for metric in tuned.wanted if metric is not COST] or [WANTED["ttft_p99"]]
    if len(tuned.goals) > 1:
        across = COST if COST in tuned.metrics else tuned.metrics[0]
        ups = [metric for metric in tuned.metrics if metric is not across]
    x_title = tuned.currency if across is COST else across.label
    return [
        dots(
            up,
            _dots(tuned, lambda trial: trial.values.get(across.name), up, joined=len(tuned.goals) < 3),
            x_title,
            f"{up.title} and {'cost' if across is COST else across.title}",
            limits.get(up.name),
        )
        for up in ups
    ]


def _dots(tuned: Tuned, across: Callable[[Trial], float | None], up: Metric, joined: bool = False) -> list[Dots]:
    """Return dots of each group of points; the best are ``joined``."""
    drawn = []
    for kind, trials in _groups(tuned).items():
        places = [(across(trial), trial.values.get(up.name), trial.name) for trial in trials]
        known = [Dot(x, y, name) for x, y, name in places if x is not None and y is not None]
        best = kind == "best"
        drawn.append(Dots(_names(tuned)[kind], known, COLORS[kind], large=best, joined=joined and best))
    return drawn


def _importance(tuned: Tuned) -> list[Chart]:
    shares = [(name, share, "blue", f"{share:.0%}") for name, share in tuned.importance.items() if share >= 0.005]
    figure = bars_of(shares, "share of what tells the best quarter apart") | {"xFormat": "percent"}
    return [Chart("What matters", "PED-ANOVA, by Optuna: shares of 1.", figure)] if shares else []


def _slice(tuned: Tuned, name: str) -> Chart:
    """Return the goal's metric (the first limit's, if that is the cost) along one setting."""
    dimension = tuned.space.dimensions[name]
    if isinstance(dimension, Choices):
        return bars(tuned.metrics[0], _bars(tuned, name, dimension), name, "The best with each, by the goal.")
    up = next((metric for metric in tuned.wanted if metric is not COST), COST)
    scale = GIB if name.endswith("bytes") or name == "gpu_memory" else 1
    drawn = _dots(tuned, lambda trial: dimension.place(trial.point[name]) / scale, up)
    limit = next((limit for limit in tuned.limits if limit.name == up.name), None)
    counts = isinstance(dimension, Steps) and scale == 1
    return dots(up, drawn, f"{name.replace('_', ' ')}{', GiB' if scale > 1 else ''}", name, limit, counts)


def _bars(tuned: Tuned, name: str, dimension: Choices) -> list[Bar]:
    bars = []
    for value in dimension.values:
        done = [trial for trial in tuned.done if trial.point[name] == value]
        if not done:
            continue
        best = min(done, key=lambda trial: (max(0.0, trial.violation), trial.losses(tuned.metrics)))
        color, remark = COLORS["met" if best.met else "missed"], ", NOT met" if tuned.limits and not best.met else ""
        bars.append(Bar(str(value), best.values.get(tuned.goals[0].name), color, remark))
    return bars
