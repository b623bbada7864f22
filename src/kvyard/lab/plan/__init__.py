"""``kvyard plan``: the cheapest fleet for a trace, a model and an SLO, what it costs, and what limits it."""

from kvyard.lab.plan.plan import Planned, plan

__all__ = ["Planned", "plan"]
