"""A search over settings of a fleet for goals under an SLO."""

from kvyard.lab.study.cost import Prices
from kvyard.lab.study.goals import Goal, parse_goals
from kvyard.lab.tune.tune import tune
from kvyard.lab.tune.view import Tuned
from kvyard.replay.report.slo import Limit, parse_limits

__all__ = ["Goal", "Limit", "Prices", "Tuned", "parse_goals", "parse_limits", "tune"]
