"""A choice written down: what the chosen worker had and owed, what the best would have been; everyone's figures if asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvyard.index import Holder
from kvyard.router.config import RouterConfig
from kvyard.router.cost import costs
from kvyard.router.inputs import Choice, RoutingInput
from kvyard.router.request import Candidate, Decision


def decision(
    at: RoutingInput,
    choice: Choice,
    new_tokens: int,
    workers: Sequence[Holder | None],
    config: RouterConfig,
    detail: bool,
) -> Decision:
    """The record of ``choice``, made before anything is booked; ``workers`` by slot."""
    request, slot, overlaps = at.request, choice.slot, at.overlaps
    best = regret = 0
    best_worker: Holder | None = None
    if overlaps is not None:
        total = overlaps.total
        best = max(total) if len(total) == len(at.slots) else max([total[other] for other in at.slots])
        if best:
            regret = best - total[slot]
            best_worker = workers[next(other for other in at.slots if total[other] == best) if regret else slot]
    return Decision(
        id=request.id,
        policy=config.policy,
        why=choice.why,
        tied=choice.tied,
        num_tokens=request.num_tokens,
        new_tokens=new_tokens,
        blocks=at.blocks,
        best=best,
        best_worker=best_worker,
        regret=regret,
        candidates=tuple(
            [Candidate(**_figures(at, other, cost, workers)) for other, cost in zip(at.slots, costs(config, at))]
            if detail
            else ()
        ),
        **_figures(at, slot, choice.cost, workers),
    )


def _figures(at: RoutingInput, slot: int, cost: float, workers: Sequence[Holder | None]) -> dict[str, Any]:
    """The fields of a ``Candidate``."""
    loads, overlaps = at.loads, at.overlaps
    return {
        "worker": workers[slot],
        "role": at.roles[slot],
        "cost": cost,
        "tiers": overlaps.at(slot) if overlaps is not None else (),
        "predicted": overlaps.predicted(slot) if overlaps is not None else 0,
        "prefill_tokens": loads.prefill[slot],
        "active_blocks": loads.blocks[slot],
        "shared_blocks": at.shared[slot] if at.shared is not None else 0,
        "active_requests": loads.requests[slot],
    }
