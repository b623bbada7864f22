"""The cost of a request on each worker, in blocks: what it would compute there, behind what waits, plus what is held.

    credit  = c * device + host_credit * host + storage_credit * storage + ... over the lower tiers
    c       = overlap_credit / (1 + overlap_decay * excess prefill blocks / blocks of this prompt)
    prefill = max(0, (active prefill tokens + this prompt's) / block size - credit)
    cost    = prefill_scale * prefill + held_weight * blocks held there with this request + request_weight * active requests

Every term is in ``docs/routing.md``. Plain functions of a routing input; nothing is changed.
"""

from collections.abc import Sequence
from math import exp
from typing import Final

from kvyard.router.config import RouterConfig
from kvyard.router.inputs import Choice, RoutingInput, least, least_of
from kvyard.router.ranking import classes, lowest

_FINE: Final = 1024
"""Credits that are whole numbers of such parts make sums that aren't rounded."""


def costs(config: RouterConfig, at: RoutingInput) -> list[float]:
    """Per worker that may be chosen."""
    loads, size = at.loads, at.loads.block_size
    tokens, count, scale = at.request.num_tokens, at.blocks, config.prefill_scale
    prefill, held = _of(at, loads.prefill), _of(at, loads.blocks)
    shared = _of(at, at.shared) if at.shared is not None else [0] * len(prefill)
    worth = _credits(config, at, prefill) if at.overlaps is not None else [0] * len(prefill)
    out: list[float] = []
    for place, waiting in enumerate(prefill):  # a plain loop: there is one for each request
        todo = (waiting + tokens) / size - worth[place]
        out.append((scale * todo if todo > 0 else 0.0) + (held[place] + count - shared[place]))
    if config.held_weight != 1:
        less = 1 - config.held_weight
        out = [cost - less * (mine + count - both) for cost, mine, both in zip(out, held, shared, strict=True)]
    if config.request_weight:
        weight = config.request_weight
        out = [cost + weight * requests for cost, requests in zip(out, _of(at, loads.requests), strict=True)]
    return out


def _credits(config: RouterConfig, at: RoutingInput, prefill: list[int]) -> Sequence[float]:
    overlaps = at.overlaps
    assert overlaps is not None
    device, credit = _of(at, overlaps.device), config.overlap_credit
    if config.overlap_decay:
        floor, size = min(prefill), at.loads.block_size
        decay = config.overlap_decay / size / max(1, -(-at.request.num_tokens // size))
        out = [credit / (1 + decay * (more - floor)) * blocks for more, blocks in zip(prefill, device, strict=True)]
    elif credit == 1 and overlaps.plain:
        return device
    else:
        out = [credit * blocks for blocks in device]
    for tier, weight in zip(overlaps.tiers[1:], config.lower_credits):
        out = [credit + weight * blocks for credit, blocks in zip(out, _of(at, tier), strict=True)]
    if overlaps.confidence is not None:
        out = [overlaps.confidence[slot] * credit for slot, credit in zip(at.slots, out, strict=True)]
    return out


def _of(at: RoutingInput, figures: list[int]) -> list[int]:
    """The figures of those who may be chosen, which mostly are all."""
    return figures if len(figures) == len(at.slots) else [figures[slot] for slot in at.slots]


def has_candidates(config: RouterConfig) -> bool:
    """Whether the least cost follows from loads in order, without a look at every worker: where nothing but plain sums of
    blocks counts, so that of workers with the same overlap the least loaded costs least, and no sum is rounded.
    """
    return (
        config.prefill_scale == config.held_weight == config.overlap_credit == 1
        and all(0 <= credit <= 1 and credit * _FINE % 1 == 0 for credit in config.lower_credits)
        and not config.request_weight
        and not config.overlap_decay
        and not config.temperature
    )


def _worth(config: RouterConfig, blocks: tuple[int, ...]) -> float:
    """What blocks by tier are worth, where a block of the device counts 1."""
    worth = float(blocks[0])
    for lower, credit in zip(blocks[1:], config.lower_credits):
        worth += credit * lower
    return worth


def _cheapest_candidate(config: RouterConfig, at: RoutingInput, why: str) -> Choice:
    """What ``cheapest`` says, by the least loaded of those that have equally much of the prompt, cached and in use."""
    loads, ranking = at.loads, at.loads.ranking
    assert ranking is not None
    size, tokens, count = loads.block_size, at.request.num_tokens, at.blocks
    best, found = -1.0, 0
    for blocks, holders in at.prefixes.split(at.among) if at.prefixes is not None else [((0,), at.among)]:
        worth = _worth(config, blocks)
        for shared, users in classes(at.shared_levels, holders):
            _, _, slots = ranking.least(users)
            slot = lowest(slots)
            cost = (loads.prefill[slot] + tokens) / size - worth + (loads.blocks[slot] + count - shared)
            if not found or cost < best:
                best, found = cost, slots
            elif cost == best:
                found |= slots
    return least_of(found, best, at.rng, why)


def cheapest(config: RouterConfig, at: RoutingInput, why: str) -> Choice:
    """The least cost, or with a temperature a draw: softmax over costs scaled to 0 .. 1, the least being the likeliest."""
    if at.sparse:
        return _cheapest_candidate(config, at, why)
    found = costs(config, at)
    if not config.temperature or len(found) == 1:
        return least(at.slots, found, at.rng, why)
    low, high = min(found), max(found)
    spread = (high - low) * config.temperature
    weights = [exp((low - cost) / spread) for cost in found] if spread else [1.0] * len(found)
    (place,) = at.rng.choices(range(len(found)), weights)
    return Choice(at.slots[place], found[place], found.count(found[place]), why)
