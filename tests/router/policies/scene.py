"""A scene for a policy: workers with loads, caches and a pace, put together by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from kvyard.clock import MS
from kvyard.index import Holder
from kvyard.index.bits import mask_of
from kvyard.router import Choice, Policy, RouterConfig, RouteRequest, RoutingInput
from kvyard.router.active import ActiveLoads, Booking
from kvyard.router.matches import CachedPrefixes
from kvyard.router.policies import make_policy
from kvyard.router.worker import WorkerLoad

SIZE = 16


class Steady:
    """A pace that is easy to reckon with: a millisecond a token, ten a step, one a block that is loaded, and ``per_pair`` for
    each token that attends to a cached one.
    """

    def __init__(self, per_token: float = 1.0, capacity: int | None = 1000, per_pair: float = 0.0) -> None:
        self.capacity = capacity
        self.per_token = per_token
        self.per_pair = per_pair
        self.least_per_token = per_token
        self.least_step = 0.0

    def prefill(self, tokens: int) -> float:
        return self.per_token * tokens

    def past(self, tokens: int, cached: int) -> float:
        return self.per_pair * tokens * cached

    def passes(self, tokens: int) -> int:
        return -(-tokens // 1000)

    def load(self, blocks: Sequence[int]) -> float:
        return float(sum(blocks))

    def step(self, requests: int, context: int) -> float:
        return 10.0 * requests

    def observe(self, tokens: int, ms: float, pairs: int = 0) -> None:
        raise AssertionError("no first token came")


class Scene:
    """Of each worker: tokens to prefill, requests, blocks held, blocks cached of the prompt (a list: by tier), blocks of it
    that others use, and how many milliseconds ago its requests came.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[int] = (0, 0, 0),
        requests: Sequence[int] = (0, 0, 0),
        held: Sequence[int] = (0, 0, 0),
        cached: Sequence[int] = (0, 0, 0),
        host: Sequence[int] | None = None,
        shared: Sequence[int] | None = None,
        ages: Sequence[int] = (),
        tokens: int = 1600,
        now: int = 0,
        since: int = 0,
        paces: Sequence[Steady] | None = None,
        first_key: int = 7,
        seed: int = 1,
    ) -> None:
        count = len(prefill)
        loads = ActiveLoads(SIZE)
        speeds = paces or [Steady()] * count
        for slot in range(count):
            worker = WorkerLoad(slot, Holder(f"w{slot}"), "both", speeds[slot], SIZE)
            worker.prefill_tokens, worker.requests, worker.blocks = prefill[slot], requests[slot], held[slot]
            worker.computing_since = since
            loads.workers.append(worker)
            for number in range(requests[slot]):
                age = ages[slot] if slot < len(ages) else 0
                loads.active[slot, number] = Booking(1, 0, worker, None, 0, now - age * MS)
        loads._high = max(held)
        tiers = [list(cached)] + ([list(host)] if host is not None else [])
        prefixes = None
        if any(map(any, tiers)):
            prefixes = CachedPrefixes(
                [(blocks, 1 << slot) for slot, blocks in enumerate(zip(*tiers, strict=False))], len(tiers)
            )
        keys = [first_key * 1000 + at for at in range(tokens // SIZE)]
        self.shared = list(shared or [0] * count)
        self.routing = RoutingInput(
            RouteRequest("r", keys, tokens),
            now,
            loads.workers,
            mask_of(range(count)),
            loads,
            prefixes,
            sorted([(blocks, 1 << slot) for slot, blocks in enumerate(self.shared) if blocks], reverse=True),
            Random(seed),
            [(pace, 1 << slot) for slot, pace in enumerate(speeds)],
        )

    def costs(self, policy: Policy) -> list[float]:
        """Return its cost at each worker."""
        model, routing = policy.costs(self.routing), self.routing
        return [model.cost(worker, routing.match_of(worker.slot)) for worker in routing.workers]

    def choice(self, policy: Policy) -> Choice:
        """Return its choice; it is reported back as done."""
        made = policy.choose(self.routing)
        policy.routed(self.routing, made)
        return made


def policy(name: str, options: Mapping[str, float] | None = None) -> Policy:
    return make_policy(RouterConfig(policy=name, options=dict(options or {})))


def pick(name: str, options: Mapping[str, float] | None = None, **scene: object) -> int:
    """The worker that a fresh policy chooses."""
    return Scene(**scene).choice(policy(name, options)).slot  # type: ignore[arg-type]
