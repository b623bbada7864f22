"""Scaling policies: they choose the number of workers, once per period of virtual time.

Each is one file and one entry of ``SCALERS``. A policy sees what a real controller would: offered load, queues, cache use and
the first tokens of the latest period, by role. ``autoscaler`` carries its decision out (start-up times, drains, caches).

An installed package adds its own by an entry point of the group ``kvyard.scalers``, a program by ``SCALERS.register``; a name
with a colon in it, ``package.module:Class``, is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from kvyard.engine.role import Role
from kvyard.registry import Options, Registry, defaults
from kvyard.router.pace import Pace


class RoleState(NamedTuple):
    """The workers of one role at one instant."""

    role: Role
    active: int
    """Workers that take requests."""
    starting: int
    draining: int
    running: int
    """Requests, all workers together."""
    waiting: int
    """Requests that wait, including those that load."""
    used: float
    """The share of device blocks that requests hold, of workers that take requests."""
    pace: Pace
    """Speed of one worker."""
    slots: int
    """Most requests that one worker runs."""


class Snapshot(NamedTuple):
    """Observation of a controller at one instant; counts are of the period since the last one."""

    now_s: float
    period_s: float
    roles: Mapping[Role, RoleState]
    requests: int
    """Offered, whatever became of them."""
    input_tokens: int
    cached_tokens: int
    """Prompt tokens that workers found in their caches, of requests admitted in the period."""
    admitted_tokens: int
    """Prompt tokens of those."""
    output_tokens: int
    """Asked for by those that were offered."""
    ttfts_ms: Sequence[float]
    """First tokens that came."""
    startup_s: float

    def ttft(self, percentile: float) -> float | None:
        """Return a percentile of the first tokens that came; ``None`` for none."""
        ranked = sorted(self.ttfts_ms)
        return ranked[min(len(ranked) - 1, int(len(ranked) * percentile / 100))] if ranked else None


class Scaler:
    """The interface."""

    OPTIONS: ClassVar[Options] = {}
    """Numbers that people may set; times are seconds."""

    def __init__(self, options: Mapping[str, float] | None = None) -> None:
        """``options`` have been checked by ``make_scaler``."""
        self.options = {**defaults(self.OPTIONS), **(options or {})}

    def wanted(self, seen: Snapshot) -> Mapping[Role, int]:
        """Return the number of workers of each role that there should be; roles that are left out stay as they are."""
        raise NotImplementedError


_HERE = "kvyard.replay.scaling"
SCALERS: Registry[Callable[[Mapping[str, float]], Scaler]] = Registry(
    "scaling policy",
    "kvyard.scalers",
    {
        "constant": f"{_HERE}.constant:Constant",
        "threshold": f"{_HERE}.threshold:Threshold",
        "predictive": f"{_HERE}.predictive:Predictive",
    },
    by_path=True,
)


def make_scaler(name: str, options: Mapping[str, float] | None = None) -> Scaler:
    """Return the scaling policy called ``name``. Raises ``KvyardError`` for an unknown one, and as ``Registry.resolve``."""
    return SCALERS.get(name)(SCALERS.resolve(name, options or {}, besides=("min", "max", "startup", "period")))
