"""A search over settings of a fleet: how many, how much, which policy."""

from kvyard.replay.tune.cost import Prices
from kvyard.replay.tune.goals import Goal, Limit, parse_goals, parse_limits
from kvyard.replay.tune.tune import tune
from kvyard.replay.tune.tuned import Tuned

__all__ = ["Goal", "Limit", "Prices", "Tuned", "parse_goals", "parse_limits", "tune"]
