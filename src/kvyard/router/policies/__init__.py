"""Routing policies: they choose the worker of a request. Each is one file and one entry of ``POLICIES``.

A policy returns the cost of one worker, and the router searches for the least. Its declarations (``needs_index``,
``needs_keys``, ``memory``) determine its inputs, in router, replay and gateway alike. A policy keeps only its own state; load,
index and decisions belong to the router.

An installed package adds its own by an entry point of the group ``kvyard.policies``, a program by ``POLICIES.register``.
"""

from collections.abc import Callable
from math import inf
from typing import ClassVar, Protocol

from kvyard.errors import KvyardError
from kvyard.registry import Options, Registry, defaults
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.memory import RoutedMemory
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class CostModel(Protocol):
    """The costs of one request. A policy is one itself, unless costs need figures that are worked out once per request."""

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return the cost of ``worker``, which has ``match`` of the prompt."""

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        """Return a lower bound; see ``Policy.lower_bound``."""


class Policy:
    """A rule that chooses a worker.

    Most policies are a ``cost``: the worker of least cost is chosen, in a fleet of any size, by a look at every worker. One
    that is to serve thousands of workers adds ``rank`` and ``lower_bound``, and few are looked at. One that isn't the least
    cost of all workers has a ``choose`` of its own.

    See ``docs/how-to/write-a-routing-policy.md``. ``RoutingInput`` is the request: ``num_tokens``, ``blocks``
    (full blocks of the prompt), ``now`` (nanoseconds), ``rng``, the ``workers`` that may be chosen, and ``matches``. A
    ``WorkerLoad`` is a worker: ``slot``, ``name``, ``role``, ``pace``, ``block_size``, ``requests``, ``queued``,
    ``prefill_tokens``, ``blocks``. A ``Match`` is what a group of workers have of the prompt: ``cached_tokens``,
    ``new_tokens``, ``tiers`` (cached blocks by tier), ``slots`` (the group, as bits).
    """

    needs_index = False
    """True if it reads overlaps from an index, and requires one."""
    needs_keys = True
    """True if it reads the prompt: overlaps, or load in blocks that prompts share. Otherwise a replay computes no keys."""
    needs_pace = False
    """True if it reads the speed of workers, so that they are observed; matches are split by it."""
    needs_shared = False
    """True if it reads ``Match.shared_blocks``; matches are split by it."""
    guarded = False
    """True if the imbalance guard may overrule it."""
    ranked = False
    """True if it has a ``rank`` and a bound."""
    same_rank_same_cost = False
    """True if workers of one match (and pace) and one rank cost exactly the same. Idle ones always do."""
    predicts_plainly = False
    """True if what was sent to a worker counts whole until its events come, also for a hybrid model, whose groups keep only
    some blocks of a prompt."""
    draws = False
    """True if it honours ``RouterConfig.temperature``."""
    waits = False
    """True if it may have a request wait for a worker without room, where flow control says who has none."""
    why = "cost"
    """The reason that decisions give, a word of ``kvyard.router.explain.REASONS``."""
    OPTIONS: ClassVar[Options] = {}
    """Numbers of this policy alone that ``RouterConfig.options`` may set."""

    memory: RoutedMemory | None = None
    """Source of overlaps, instead of the index."""
    _cost_is_checked = False
    pull_ms: Callable[[int], float | None] | None = None
    """If workers pull from each other: milliseconds to pull a number of tokens, ``None`` for too few to be pulled."""

    def __init__(self, config: RouterConfig) -> None:
        """The options of ``config`` have been checked by ``make_policy``."""
        self.config = config
        self.options = {**defaults(self.OPTIONS), **config.options}

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Return the cost of ``worker``, which has ``match`` of the prompt, by the policy's own measure; 0 where
        it has none.
        """
        return 0.0

    def rank(self, worker: WorkerLoad) -> tuple[int, float]:
        """Return a bucket (there should be few) and a figure, both 0 or more, by which the router keeps workers in order in a
        large fleet. It depends on the worker's load and on the policy's own figures of it, which change in ``routed`` alone.
        """
        raise NotImplementedError

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        """Return a lower bound: no worker of ``match`` in ``bucket`` costs less whose figure is ``figure`` or more. It doesn't
        fall from one bucket to the next for a figure of 0.
        """
        return -inf

    def costs(self, routing: RoutingInput) -> CostModel:
        """Return the cost model for this request; by default the policy's own ``cost`` and ``lower_bound``."""
        return self

    def choose(self, routing: RoutingInput) -> Choice:
        """Return one of ``routing.workers``: that of least cost. Changes nothing; ``routed`` does."""
        costs = self.costs(routing)
        if not self._cost_is_checked:
            self._check_cost(costs, routing)
        bound = costs.lower_bound if self.ranked else None
        return routing.cheapest(costs.cost, self.why, None, bound, self.same_rank_same_cost)

    def _check_cost(self, costs: CostModel, routing: RoutingInput) -> None:
        """Raise ``KvyardError`` if a cost isn't a number, at the first decision."""
        worker = routing.workers[0]
        cost: object = costs.cost(worker, routing.match_of(worker.slot))
        if not isinstance(cost, int | float):
            raise KvyardError(
                f"{type(self).__name__}.cost must return a number, not {cost!r}: for a tie-break add a part below 1"
            )
        self._cost_is_checked = True

    def hold(self, routing: RoutingInput, full: int) -> tuple[int, float] | None:
        """Return the slot of a worker without room that the request should wait for, and for how many milliseconds at most;
        ``None`` if it should go to one that has room. ``routing`` has all workers, of which ``full``, slots as bits, have no
        room. Changes nothing.
        """
        return None

    def routed(self, routing: RoutingInput, choice: Choice) -> bool | None:
        """Note that the request went to ``choice.slot``: this policy's choice, or the guard's. Returns True if ranks of other
        workers have changed too.
        """
        return None

    def gone(self, slot: int) -> None:
        """Discard state of the worker in that slot, which left: another one may get its number."""


def load_of(kind: str, worker: WorkerLoad) -> float:
    """Return the load of a worker; ``kind`` is ``RouterConfig.load``."""
    if kind == "blocks":
        return worker.prefill_tokens / worker.block_size + worker.blocks
    return float(worker.requests if kind == "requests" else worker.prefill_tokens)


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
        "program": f"{_HERE}.program:Program",
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
    """Return the policy that a configuration names. Raises ``KvyardError`` for an unknown one, and for settings that it
    would ignore.
    """
    # Affinity has no options: those that are given are its fallback's.
    POLICIES.check(config.fallback if config.policy == "affinity" else config.policy, config.options)
    policy = POLICIES.get(config.policy)(config)
    if config.temperature and not policy.draws:
        name = config.fallback if config.policy == "affinity" else config.policy
        raise KvyardError(f"temperature is for the routing policies kv and approx, not for {name}: leave it out")
    return policy
