"""A choice written down: what the chosen worker had and owed, what the best would have been; everyone's figures if asked."""

from __future__ import annotations

from collections.abc import Sequence

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
    request, slot, loads, overlaps = at.request, choice.slot, at.loads, at.overlaps
    predicted = best = regret = 0
    tiers: tuple[int, ...] = ()
    best_worker: Holder | None = None
    if overlaps is not None:
        tiers = overlaps.at(slot)
        predicted = overlaps.predicted(slot)
        total = overlaps.total
        best = max(total) if len(total) == len(at.slots) else max([total[other] for other in at.slots])
        if best:
            regret = best - total[slot]
            best_worker = workers[next(other for other in at.slots if total[other] == best) if regret else slot]
    worker = workers[slot]
    assert worker is not None
    return Decision(
        id=request.id,
        worker=worker,
        policy=config.policy,
        why=choice.why,
        cost=choice.cost,
        tied=choice.tied,
        num_tokens=request.num_tokens,
        new_tokens=new_tokens,
        blocks=at.blocks,
        tiers=tiers,
        predicted=predicted,
        prefill_tokens=loads.prefill[slot],
        active_blocks=loads.blocks[slot],
        shared_blocks=at.shared[slot] if at.shared is not None else 0,
        active_requests=loads.requests[slot],
        best=best,
        best_worker=best_worker,
        regret=regret,
        candidates=_candidates(at, workers, config) if detail else (),
    )


def _candidates(at: RoutingInput, workers: Sequence[Holder | None], config: RouterConfig) -> tuple[Candidate, ...]:
    loads, overlaps = at.loads, at.overlaps
    out: list[Candidate] = []
    for slot, cost in zip(at.slots, costs(config, at), strict=True):
        worker = workers[slot]
        assert worker is not None
        out.append(
            Candidate(
                worker=worker,
                role=at.roles[slot],
                cost=cost,
                tiers=overlaps.at(slot) if overlaps is not None else (),
                predicted=overlaps.predicted(slot) if overlaps is not None else 0,
                prefill_tokens=loads.prefill[slot],
                active_blocks=loads.blocks[slot],
                shared_blocks=at.shared[slot] if at.shared is not None else 0,
                active_requests=loads.requests[slot],
            )
        )
    return tuple(out)
