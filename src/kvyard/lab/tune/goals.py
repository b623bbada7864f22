"""What is wanted of a fleet: figures to make small or large, and limits to keep, from text."""

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.sweep.table import latency
from kvyard.replay.report import Report
from kvyard.replay.report.report import LATENCIES
from kvyard.replay.report.slo import milliseconds
from kvyard.replay.report.words import measured, percent
from kvyard.settings import number

SPREADS = ("mean", "p50", "p90", "p95", "p99", "max")
MOST_GOALS = 3
REJECTED = 0.01
"""The share of requests that a fleet may turn away. Percentiles are of those it served, so turning away the long ones would
look like an improvement."""
LOST = 1e6
"""The violation of a point that couldn't be replayed."""


class WantedFigure(NamedTuple):
    """A figure that can be wanted."""

    title: str
    """For an axis, with its unit."""
    best: Literal["min", "max"]
    of: Callable[[Report], float]
    unit: str = ""

    def shown(self, value: float) -> str:
        """For people."""
        return percent(value) if self.unit == "share" else f"{measured(value)}{' ' + self.unit if self.unit else ''}"


def _rate(name: str) -> Callable[[Report], float]:
    return lambda report: report.throughput[name]


COST = "cost"
FIGURES: Mapping[str, WantedFigure] = {
    COST: WantedFigure("Cost per hour", "min", lambda report: 0.0),  # of a configuration, not of a report
    "reuse": WantedFigure("Prompt tokens not computed / admitted", "max", lambda one: one.reuse["all"].value, "share"),
    **{
        f"{name}_{field}": WantedFigure(f"{name.upper()} {field}, ms", "min", latency(name, field), "ms")
        for name in LATENCIES
        for field in SPREADS
    },
    "output_tokens_per_s": WantedFigure("Output tokens per second", "max", _rate("output_tokens_per_s")),
    "requests_per_s": WantedFigure("Requests finished per second", "max", _rate("requests_per_s")),
    "balance": WantedFigure(
        "Prompt tokens of the busiest worker / mean", "min", lambda one: one.balance.get("max_over_mean", 1.0)
    ),
}
"""By the names that goals and limits have."""


class Goal(msgspec.Struct, frozen=True):
    """A figure to make small or large."""

    name: str
    best: Literal["min", "max"]

    def __str__(self) -> str:
        return f"{self.best} {self.name}"

    def loss(self, value: float) -> float:
        """Smaller is better."""
        return value if self.best == "min" else -value


class Limit(msgspec.Struct, frozen=True):
    """What a figure may be at most, or at least where more of it is better."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name} {'≤' if self.low else '≥'} {FIGURES[self.name].shown(self.value)}"

    @property
    def low(self) -> bool:
        return FIGURES[self.name].best == "min"

    def violation(self, value: float) -> float:
        """By which share of the limit ``value`` misses it; 0 or less where it is kept."""
        missed = value - self.value if self.low else self.value - value
        return missed / self.value if self.value else missed


def figures(report: Report, cost: float) -> dict[str, float]:
    """All that can be wanted, of a fleet that costs so much. A latency that no request had, as ITL where answers are of one
    token, isn't there: 0 would be the best of all.
    """
    absent = {name for name in LATENCIES if not report.latency[name].count}
    return {
        name: cost if name == COST else float(one.of(report))
        for name, one in FIGURES.items()
        if name.rpartition("_")[0] not in absent
    }


def shown_figure(figures: Mapping[str, float], name: str) -> str:
    """One of ``figures`` for people; a dash where it isn't there."""
    return FIGURES[name].shown(figures[name]) if name in figures else "–"


def parse_goals(text: str) -> list[Goal]:
    """Goals from text such as ``min cost`` or ``min cost, max reuse``. Raises ``KvyardError``."""
    goals: list[Goal] = []
    for part in text.split(","):
        words = part.split()
        if len(words) != 2 or words[0] not in ("min", "max"):
            raise KvyardError(
                f"--goal {text!r}: write min or max and a figure, as in 'min cost' or 'min cost, max reuse'"
            )
        figure = _figure(words[1], "--goal")
        if figure.best != words[0]:
            raise KvyardError(
                f"--goal {part.strip()!r}: that makes things worse; did you mean '{figure.best} {words[1]}'?"
            )
        if any(one.name == words[1] for one in goals):
            raise KvyardError(f"--goal {text!r}: {words[1]} is named twice")
        goals.append(Goal(words[1], figure.best))
    if len(goals) > MOST_GOALS:
        raise KvyardError(
            f"--goal {text!r}: {len(goals)} goals at once; take at most {MOST_GOALS}, the rest as limits in --slo"
        )
    return goals


def parse_limits(text: str | None) -> list[Limit]:
    """Limits from text such as ``ttft_p99=1000,itl_p99<50ms,cost<=20``. Raises ``KvyardError``."""
    limits: list[Limit] = []
    for part in text.split(",") if text is not None else ():
        found = re.fullmatch(r"\s*(\w+)\s*(<=|>=|≤|≥|<|>|=)\s*(\S+)\s*", part)
        if found is None:
            raise KvyardError(
                f"--slo {part.strip()!r} can't be read: write FIGURE=LIMIT, as in ttft_p99=1000,itl_p99=50"
            )
        name, sign, value = found.groups()
        if name in LATENCIES:
            raise KvyardError(
                f"--slo {part.strip()}: of which requests? Write {name}_p99={value}, or one of {_spreads(name)}"
            )
        figure = _figure(name, "--slo")
        if sign in (">", ">=", "≥") if figure.best == "min" else sign in ("<", "<=", "≤"):
            raise KvyardError(
                f"--slo {part.strip()}: the {figure.best}imum of {name} is what is wanted; turn the sign round"
            )
        limit = _limit(part.strip(), figure, value)
        if any(one.name == name for one in limits):
            raise KvyardError(f"--slo {text!r}: {name} is named twice")
        limits.append(Limit(name, limit))
    return limits


def _limit(part: str, figure: WantedFigure, value: str) -> float:
    try:
        if figure.unit == "ms":
            limit = milliseconds(value)
        elif figure.unit == "share" and value.endswith("%"):
            limit = number("", value[:-1]) / 100
        else:
            limit = number("", value)
    except KvyardError:
        limit = -1.0
    if not 0 < limit < float("inf"):
        unit = "milliseconds, or a time with its unit such as 1s" if figure.unit == "ms" else "a number"
        raise KvyardError(f"--slo {part}: a limit is {unit}, above 0")
    return limit


def _figure(name: str, flag: str) -> WantedFigure:
    from difflib import get_close_matches

    found = FIGURES.get(name)
    if found is None:
        near = get_close_matches(name, FIGURES, 1, 0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        plain = [one for one in FIGURES if one.rpartition("_")[0] not in LATENCIES]
        raise KvyardError(
            f"{flag}: there is no figure {name!r}: {hint}There are {', '.join(plain)}, and of "
            f"{', '.join(LATENCIES)} each of {', '.join(SPREADS)}, as in ttft_p99"
        )
    return found


def _spreads(name: str) -> str:
    return ", ".join(f"{name}_{field}" for field in SPREADS)
