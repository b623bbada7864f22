"""Routing policies: which worker gets a request. Each is one file and one entry of ``POLICIES``.

A policy chooses among the slots of a ``RoutingInput`` and learns where the request went in the end. It keeps only what it needs
for itself; load, index and decisions are the router's. What it declares of itself (``needs_index``, ``needs_keys``,
``memory``) decides what it gets to see, in the router, in a replay and in a gateway.

An installed package adds its own by an entry point of the group ``kvyard.policies``, a program by ``POLICIES.register``.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from kvyard.registry import Options, Registry, defaults
from kvyard.router.active import ActiveLoads
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.memory import RoutedMemory


class Policy:
    """The interface, and a policy that has nothing to remember."""

    needs_index = False
    """Whether it reads overlaps that an index knows, and can't do without one."""
    needs_keys = True
    """Whether it reads the prompt: overlaps, or load in blocks that prompts share. Without, a replay works out no keys."""
    needs_pace = False
    """Whether it reads how fast workers are, so that they should be watched."""
    guarded = False
    """Whether the imbalance guard may overrule it."""
    ranked_by: int = 0
    """The order of loads (``kvyard.router.active``) by which it chooses in a large fleet without a look at every worker: it
    then has an input that is ``sparse``. 0 where it looks at all of them."""
    OPTIONS: ClassVar[Options] = {}
    """Numbers of this policy alone that ``RouterConfig.options`` may set."""

    memory: RoutedMemory | None = None
    """Where overlaps come from, instead of the index."""
    pull_ms: Callable[[int], float | None] | None = None
    """Where workers pull from each other: how long so many tokens take, ``None`` for too few to be pulled."""

    def __init__(self, config: RouterConfig) -> None:
        """The options of ``config`` have been checked by ``make_policy``."""
        self.config = config
        self.options = {**defaults(self.OPTIONS), **config.options}

    def choose(self, at: RoutingInput) -> Choice:
        """One of ``at.slots``. Changes nothing that ``routed`` couldn't."""
        raise NotImplementedError

    def costs(self, at: RoutingInput) -> list[float]:
        """What each of ``at.slots`` would cost by the policy's own measure, for explanations; 0 where it has none."""
        return [0.0] * len(at.slots)

    def routed(self, at: RoutingInput, choice: Choice) -> None:
        """The request went to ``choice.slot``: this policy's choice, or the guard's."""

    def rank(self, loads: ActiveLoads) -> None:
        """Loads are in the order of ``ranked_by`` from now on: give workers the weights that they have by now."""

    def gone(self, slot: int) -> None:
        """The worker in that slot won't come back: another one may get its number."""


def load_of(kind: str, at: RoutingInput) -> Sequence[float]:
    """Per worker that may be chosen, how much it has to do; ``kind`` is ``RouterConfig.load``."""
    loads = at.loads
    if kind == "blocks":
        return [loads.prefill[slot] / loads.block_size + loads.blocks[slot] for slot in at.slots]
    figures = loads.requests if kind == "requests" else loads.prefill
    return [float(figures[slot]) for slot in at.slots]


_HERE = "kvyard.router.policies"
POLICIES: Registry[Callable[[RouterConfig], Policy]] = Registry(
    "routing policy",
    "kvyard.policies",
    {
        "kv": f"{_HERE}.kv:Kv",
        "least-time": f"{_HERE}.least_time:LeastTime",
        "approx": f"{_HERE}.approx:Approx",
        "least-loaded": f"{_HERE}.least_loaded:LeastLoaded",
        "affinity": f"{_HERE}.affinity:Affinity",
        "round-robin": f"{_HERE}.round_robin:RoundRobin",
        "random": f"{_HERE}.random:Random",
        "longest-match": f"{_HERE}.longest_match:LongestMatch",
        "least-prefill": f"{_HERE}.least_prefill:LeastPrefill",
        "lmetric": f"{_HERE}.lmetric:LMetric",
        "sticky": f"{_HERE}.sticky:Sticky",
        "llm-d-blend": f"{_HERE}.llmd_blend:LlmdBlend",
        "cache-aware": f"{_HERE}.cache_aware:CacheAware",
        "prefix-hash": f"{_HERE}.prefix_hash:PrefixHash",
        "preble": f"{_HERE}.preble:Preble",
        "aibrix": f"{_HERE}.aibrix:Aibrix",
        "dualmap": f"{_HERE}.dualmap:DualMap",
        "load-aware": f"{_HERE}.load_aware:LoadAware",
        "ray-prefix": f"{_HERE}.ray_prefix:RayPrefix",
        "conductor": f"{_HERE}.conductor:Conductor",
    },
)


def make_policy(config: RouterConfig) -> Policy:
    """Return the policy that a configuration names. Raises ``KvyardError`` for an unknown one, or unknown options."""
    POLICIES.check(config.policy, config.options)
    return POLICIES.get(config.policy)(config)
