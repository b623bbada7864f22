"""One point of a search: the fleet it stands for, what it costs, and what replays of it came to."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.tune.cost import Prices, cost
from kvyard.lab.tune.goals import COST, LOST, REJECTED, Goal, Limit, figures
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report import Report
from kvyard.replay.settings import make_config

State = Literal["done", "pruned", "skipped", "failed"]


class Look(msgspec.Struct):
    """One point."""

    number: int
    point: dict[str, object]
    """What is searched, as settings take it."""
    name: str
    """Equal for points with equal settings."""
    config: ReplayConfig | None
    """None where these settings can't be."""
    cost: float
    """Per hour. Of a fleet that an autoscaler changes: at least, until it was replayed."""
    state: State = "done"
    why: str = ""
    """It was pruned, skipped or failed."""
    figures: dict[str, float] = {}
    """Of the whole part to search on; empty unless it is ``done``."""
    violation: float = 0.0
    """By how much it misses the limits, shares of them added up; 0 where it keeps all."""
    test: dict[str, float] = {}
    """The same of the part for the test, where it was replayed."""
    test_violation: float = 0.0

    @property
    def met(self) -> bool:
        """Whether it keeps all limits on the part to search on."""
        return self.state == "done" and self.violation <= 0

    def losses(self, goals: Sequence[Goal]) -> list[float]:
        """How bad it is by each goal: smaller is better."""
        return [goal.loss(self.figures[goal.name]) for goal in goals]


def look_at(
    number: int, point: Mapping[str, object], base: Mapping[str, object], prices: Prices, limits: Sequence[Limit]
) -> Look:
    """A point before any replay: what can be told of it without one."""
    settings = {**base, **point}
    name = msgspec.json.encode(point, order="sorted").decode()
    try:
        config = make_config(settings)
    except KvyardError as error:
        return Look(number, dict(point), name, None, 0.0, "failed", str(error), violation=LOST)
    price = cost(settings, config, prices)
    over = sum(max(0.0, one.violation(price)) for one in limits if one.name == COST)
    return Look(number, dict(point), name, config, price, violation=over)


def judged(report: Report, price: float, limits: Sequence[Limit]) -> tuple[dict[str, float], float]:
    """The figures of a replay, and by how much they miss the limits. What no request had can't be missed."""
    found = figures(report, price)
    rejected = report.requests.get("rejected", 0) / max(1, report.requests["all"])
    missed = sum(max(0.0, one.violation(found[one.name])) for one in limits if one.name in found)
    return found, missed + (rejected / REJECTED if rejected > REJECTED else 0.0)
