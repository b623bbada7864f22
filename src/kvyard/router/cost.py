"""The cost model of ``kv`` and ``approx``, in blocks: what a worker would compute, behind what waits there, plus what is held.

    credit  = c * device + host_credit * host + storage_credit * storage + ... over the lower tiers
    c       = overlap_credit / (1 + overlap_decay * excess prefill blocks / blocks of this prompt)
    prefill = max(0, (active prefill tokens + this prompt's) / block size - credit)
    cost    = prefill_scale * prefill + held_weight * blocks held there with this request + request_weight * active requests

Every term is in ``docs/reference/routing-policies.md``.
"""

from math import exp
from typing import Final

from kvyard.index.bits import bits
from kvyard.integers import ceil_div
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.matches import Match
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad

_FINE: Final = 1024
"""Credits that are whole multiples of 1/1024 make sums that aren't rounded."""
_ROUNDING: Final = 1e-9
"""A bound is a sum in another order than the cost is: this share of its terms is uncertain."""


class BlockCost:
    """The cost of one request, worker by worker."""

    def __init__(self, config: RouterConfig, routing: RoutingInput, plain: bool) -> None:
        """``plain`` is ``is_plain(config)``."""
        self._config = config
        self._is_plain = plain
        self._size = routing.loads.block_size
        self._tokens = routing.num_tokens
        self._blocks = routing.blocks
        self._decay = 0.0
        self._floor = 0
        """The least prefill tokens of any worker that may be chosen, where backlogs decay credits."""
        if config.overlap_decay:
            self._floor = min([worker.prefill_tokens for worker in routing.workers])
            self._decay = config.overlap_decay / self._size / max(1, ceil_div(self._tokens, self._size))
        self._match: Match | None = None
        """The latest that was asked about; the figures below are the same for all its workers."""
        self._credit = 0.0
        """Its credit, without decay,"""
        self._adds = 0
        """and the blocks of the prompt that no request in flight holds there."""

    def cost(self, worker: WorkerLoad, match: Match) -> float:
        """Blocks."""
        if match is not self._match:
            self._look_at(match)
        waiting, held = worker.prefill_tokens, worker.blocks + self._adds
        todo = (waiting + self._tokens) / self._size - self._credit
        if self._is_plain:
            return (todo if todo > 0 else 0.0) + held
        config = self._config
        if self._decay:
            decayed = config.overlap_credit / (1 + self._decay * (waiting - self._floor))
            todo = (waiting + self._tokens) / self._size - self._credit_of(match, decayed)
        cost = (config.prefill_scale * todo if todo > 0 else 0.0) + held
        if config.held_weight != 1:
            cost -= (1 - config.held_weight) * held
        if config.request_weight:
            cost += config.request_weight * worker.requests
        return cost

    def lower_bound(self, match: Match, bucket: int, figure: float) -> float:
        """Return blocks that no worker with this ``rank`` or more costs less than."""
        if match is not self._match:
            self._look_at(match)
        config, size = self._config, self._size
        scale = config.prefill_scale
        bound = (figure + scale * self._tokens) / size - scale * self._credit + config.held_weight * self._adds
        return bound - _ROUNDING * ((figure + self._tokens) / size + scale * self._credit + self._blocks)

    def _look_at(self, match: Match) -> None:
        self._match = match
        self._credit = self._credit_of(match, self._config.overlap_credit)
        self._adds = self._blocks - match.shared_blocks

    def _credit_of(self, match: Match, device_credit: float) -> float:
        """Return the blocks' worth of what is cached, where a block in device memory counts ``device_credit``."""
        tiers = match.tiers
        if not tiers:
            return 0.0
        credit = device_credit * tiers[0]
        if len(tiers) > 1:
            for blocks, weight in zip(tiers[1:], self._config.lower_credits):
                credit += weight * blocks
        return match.confidence * credit


def block_rank(config: RouterConfig, worker: WorkerLoad) -> tuple[int, float]:
    """Return the part of the cost that a worker has for any request, in tokens."""
    held = config.held_weight * worker.blocks + config.request_weight * worker.requests
    return 0, config.prefill_scale * worker.prefill_tokens + worker.block_size * held


def is_plain(config: RouterConfig) -> bool:
    """True if nothing but blocks to compute and to hold counts, each as 1."""
    return config.prefill_scale == config.held_weight == 1 and not config.request_weight + config.overlap_decay


def is_exact(config: RouterConfig) -> bool:
    """True if no sum is rounded where blocks have a power of two tokens, and no prefill is cut off at 0: workers of one match
    and one rank then cost the same to the bit.
    """
    credits = config.lower_credits
    return (
        is_plain(config)
        and config.overlap_credit == 1
        and all(0 <= credit <= 1 and credit * _FINE % 1 == 0 for credit in credits)
    )


def drawn(routing: RoutingInput, costs: BlockCost, temperature: float) -> Choice:
    """Return a draw: softmax over costs scaled to 0 .. 1, the least being the likeliest."""
    workers = routing.loads.workers
    ranked = sorted(
        [(slot, costs.cost(workers[slot], match)) for match in routing.matches for slot in bits(match.slots)]
    )
    values = [cost for _, cost in ranked]
    low, high = min(values), max(values)
    spread = (high - low) * temperature
    weights = [exp((low - cost) / spread) for cost in values] if spread else [1.0] * len(values)
    (place,) = routing.rng.choices(range(len(values)), weights)
    return Choice(ranked[place][0], values[place], values.count(values[place]), "cost")
