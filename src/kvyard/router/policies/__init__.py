"""Routing policies: which worker gets a request. Each is one file and one entry of ``POLICIES``.

An installed package adds its own by an entry point of the group ``kvyard.policies``, a program by ``POLICIES.register``.
"""

from __future__ import annotations

from collections.abc import Callable

from kvyard.registry import Registry
from kvyard.router.config import RouterConfig
from kvyard.router.policies.base import Policy, load_of

__all__ = ["POLICIES", "Policy", "load_of", "make_policy"]

_HERE = "kvyard.router.policies"
POLICIES: Registry[Callable[[RouterConfig], Policy]] = Registry(
    "routing policy",
    "kvyard.policies",
    {
        "kv": f"{_HERE}.kv:Kv",
        "approx": f"{_HERE}.approx:Approx",
        "least-loaded": f"{_HERE}.least_loaded:LeastLoaded",
        "affinity": f"{_HERE}.affinity:Affinity",
        "round-robin": f"{_HERE}.round_robin:RoundRobin",
        "random": f"{_HERE}.random:Random",
    },
)


def make_policy(config: RouterConfig) -> Policy:
    """The policy that a configuration names. Raises ``KvyardError`` for an unknown one."""
    return POLICIES.get(config.policy)(config)
