"""A search over settings of a fleet: how many, how much, which policy."""

from kvyard.lab.tune.cost import Prices
from kvyard.lab.tune.goals import Goal, Limit, parse_goals, parse_limits
from kvyard.lab.tune.tune import tune
from kvyard.lab.tune.tuned import Tuned

__all__ = ["Goal", "Limit", "Prices", "Tuned", "parse_goals", "parse_limits", "tune"]
