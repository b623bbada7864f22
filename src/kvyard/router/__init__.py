"""The router: which worker gets a request, by load and by what each already has of the prompt.

``Router`` joins the parts; ``docs/routing.md`` says why they are what they are.
"""

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, Reach, RoutingInput
from kvyard.router.overlaps import PrefixIndex
from kvyard.router.policies import POLICIES, Policy
from kvyard.router.request import Decision, RouteRequest
from kvyard.router.router import Router

__all__ = [
    "POLICIES",
    "Choice",
    "Decision",
    "Policy",
    "PrefixIndex",
    "Reach",
    "RouteRequest",
    "Router",
    "RouterConfig",
    "RoutingInput",
]
