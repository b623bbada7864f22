"""Goals of a search: metrics to make small or large, from text; and how a replay is judged by limits."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.report import Report
from kvyard.replay.report.metrics import COST, Metric, read_metrics
from kvyard.replay.report.slo import WANTED, Limit, violation, wanted_metric

MOST_GOALS = 3


class Goal(msgspec.Struct, frozen=True):
    """A metric to make small or large."""

    name: str
    best: Literal["min", "max"]

    def __str__(self) -> str:
        return f"{self.best} {self.name}"

    @property
    def metric(self) -> Metric:
        """The metric itself."""
        return WANTED[self.name]


def parse_goals(text: str) -> list[Goal]:
    """Return goals from text such as ``min cost`` or ``min cost, max reuse``. Raises ``KvyardError``."""
    goals: list[Goal] = []
    for part in text.split(","):
        words = part.split()
        if len(words) != 2 or words[0] not in ("min", "max"):
            raise KvyardError(
                f"--goal {text!r}: write min or max and a metric, as in 'min cost' or 'min cost, max reuse'"
            )
        best: Literal["min", "max"] = "max" if wanted_metric(words[1], "--goal").better == "high" else "min"
        if best != words[0]:
            raise KvyardError(f"--goal {part.strip()!r}: that makes things worse; did you mean '{best} {words[1]}'?")
        if any(goal.name == words[1] for goal in goals):
            raise KvyardError(f"--goal {text!r}: {words[1]} is named twice")
        goals.append(Goal(words[1], best))
    if len(goals) > MOST_GOALS:
        raise KvyardError(
            f"--goal {text!r}: {len(goals)} goals at once; take at most {MOST_GOALS}, the rest as limits in --slo"
        )
    return goals


def judged(report: Report, price: float, limits: Sequence[Limit]) -> tuple[dict[str, float | None], float]:
    """Return the metrics of a replay of a fleet with this price, and by how much they miss ``limits``."""
    values = {**read_metrics(report), COST.name: price}
    return values, violation(values, limits)
