"""What least time costs at each worker, apart from the policy so that it can be compiled; the policy says what each term is."""

from kvyard.clock import MS
from kvyard.router.inputs import RoutingInput


def time_costs(
    at: RoutingInput, computed: list[float], interference: float, renewal: float, stickiness: float
) -> list[float]:
    """Per worker that may be chosen, milliseconds. ``computed`` is by slot what was computed there lately."""
    loads, overlaps, paces, slots = at.loads, at.overlaps, at.paces, at.slots
    tokens, size = at.request.num_tokens, loads.block_size
    cached, rooms, beyond, kept = _caches(at)
    used = min(kept, max([at.shared[slot] for slot in slots]) * size) if at.shared is not None else 0
    lower = overlaps is not None and len(overlaps.tiers) > 1
    requests = loads.requests
    interference /= max(1.0, sum([requests[slot] for slot in slots]) / len(slots))
    total = sum([computed[slot] for slot in slots])
    renewal = renewal * len(slots) / total if total else 0.0
    costs = []
    for place, slot in enumerate(slots):
        pace, waiting, has = paces[slot], loads.prefill[slot], cached[place]
        new = tokens - has
        past = pace.past(new, has)
        own = pace.prefill(new) + past
        wait = 0.0
        if waiting:
            behind = pace.prefill(waiting + new) + past - own + loads.past[slot]
            wait = max(0.0, behind - (at.now - loads.computing_since[slot]) / MS)
        if requests[slot]:
            wait += pace.passes(waiting + new) * pace.step(requests[slot], loads.blocks[slot] * size)
        if lower and overlaps is not None:
            wait = max(wait, pace.load(overlaps.at(slot)[1:]))
        weight = 1.0 + interference * requests[slot] + renewal * computed[slot]
        cost = wait + rooms[place] + weight * own
        if has < kept:
            lacks = tokens - max(has, used)
            again = pace.prefill(lacks) + pace.past(lacks, tokens - lacks)
            cost += stickiness * (again - pace.prefill(tokens - kept) - pace.past(tokens - kept, kept))
        if beyond[place]:
            cost += stickiness * (pace.prefill(beyond[place]) + pace.past(beyond[place], tokens - beyond[place]))
        costs.append(cost)
    return costs


def _caches(at: RoutingInput) -> tuple[list[int], list[float], list[int], int]:
    """Per worker that may be chosen the tokens it needn't compute, the milliseconds until there is room for the prompt, and
    the tokens for which there is none; and the most tokens that any worker has and can keep.
    """
    loads, shared = at.loads, at.shared
    cached = [at.cached(slot) for slot in at.slots]
    kept = max(cached)
    rooms, beyond = [0.0] * len(cached), [0] * len(cached)
    full = False
    blocks, prompt, paces = loads.blocks, at.blocks, at.paces
    for place, slot in enumerate(at.slots):
        capacity = paces[slot].capacity
        if capacity is None or blocks[slot] + prompt <= capacity or not loads.requests[slot]:
            continue
        free = capacity - blocks[slot] + (shared[slot] if shared is not None else 0)
        if free < prompt:
            cached[place] = max(0, min(cached[place], free * loads.block_size))
            rooms[place] = loads.mean_age(slot, at.now) / MS
            beyond[place] = min(at.request.num_tokens, (prompt - free) * loads.block_size)
            full = True
    if full:
        kept = max([tokens for tokens, more in zip(cached, beyond) if not more], default=0)
    return cached, rooms, beyond, kept
