"""One point of a search: its fleet, its cost, and the metrics of its replays."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.study.advice import AdviceOption
from kvyard.lab.study.cost import Prices, cost, currency_of
from kvyard.lab.study.table import Values
from kvyard.lab.tune.space import ROUTER, Space
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report.metrics import COST
from kvyard.replay.report.slo import Limit, violation
from kvyard.replay.settings import make_config

State = Literal["done", "pruned", "skipped", "failed"]
LOST = 1e6
"""Violation of a point that couldn't be replayed."""
FIRST = (ROUTER, "workers")
"""Settings that labels name first."""


class Trial(AdviceOption, kw_only=True):
    """One point. Its ``values`` are of the whole part to search on, and empty unless it is ``done``; its ``cost`` per hour is a
    lower bound until the replay, for a fleet that an autoscaler changes.
    """

    number: int
    point: dict[str, object]
    """Settings that are searched."""
    identity: str
    """Equal for points with equal settings."""
    config: ReplayConfig | None
    """``None`` if these settings are invalid."""
    state: State = "done"
    why: str = ""
    """Reason why it was pruned, skipped or failed."""
    test: Values = msgspec.field(default_factory=dict)
    """Metrics on the part for the test, if it was replayed there."""
    test_violation: float = 0.0

    @property
    def met(self) -> bool:
        """True if it keeps all limits on the part to search on."""
        return self.state == "done" and self.violation <= 0

    def fail(self, why: str) -> None:
        """Mark the point as one that couldn't be replayed."""
        self.state, self.why, self.violation = "failed", why, LOST


def make_trial(
    number: int,
    point: Mapping[str, object],
    base: Mapping[str, object],
    space: Space,
    prices: Prices,
    limits: Sequence[Limit],
) -> Trial:
    """Return a point before any replay, with all that is known without one."""
    settings = {**base, **point}
    flat = space.flat(point)
    names = sorted(flat, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    label = ", ".join(f"{name.rpartition('.')[2]} {flat[name]}" for name in names)
    identity = msgspec.json.encode(point, order="sorted").decode()
    currency = currency_of(prices, base.get("gpu"))
    trial = Trial(label, {}, 0.0, currency=currency, number=number, point=dict(point), identity=identity, config=None)
    try:
        trial.config = make_config(settings)
    except KvyardError as error:
        trial.fail(str(error))
        return trial
    trial.cost = cost(settings, trial.config, prices)
    trial.violation = violation({COST.name: trial.cost}, limits)
    return trial
