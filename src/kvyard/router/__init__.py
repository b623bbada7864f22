"""The router: it chooses a worker for each request, by load and by cached prefix.

``Router`` joins the parts; ``docs/explain/routing.md`` explains the design.
"""

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.overlaps import PrefixIndex, Reach
from kvyard.router.policies import POLICIES, Policy
from kvyard.router.request import Choice, Decision, RouteRequest
from kvyard.router.router import Router
from kvyard.router.worker import WorkerLoad
from kvyard.source_docs import SourceDoc

__all__ = [
    "POLICIES",
    "Choice",
    "Decision",
    "Match",
    "Policy",
    "PrefixIndex",
    "Reach",
    "RouteRequest",
    "Router",
    "RouterConfig",
    "RoutingInput",
    "WorkerLoad",
]

for _input in (Choice, Match, RoutingInput, WorkerLoad):
    _input.__doc__ = SourceDoc()  # type: ignore[assignment]
