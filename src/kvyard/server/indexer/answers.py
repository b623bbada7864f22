"""Answers: what the index found, in the words of the service's clients. Pure functions."""

import math
from typing import Any

from kvyard.clock import MS
from kvyard.index import Scores, WorkerMatch
from kvyard.index.scorer import Explanation
from kvyard.server.http import picked
from kvyard.server.indexer.config import TIER_NAMES, TIERS
from kvyard.server.indexer.listener import IndexedModel
from kvyard.server.indexer.schemas import (
    GroupReason,
    InstanceMatch,
    Matches,
    ModelRows,
    PlaceRows,
    PromptScores,
    TierTokens,
    WorkerExplanation,
    WorkerInfo,
    WorkerScore,
)


def matches(scores: Scores) -> Matches:
    """Return Dynamo's answer: tokens per instance and tier, cumulative; an instance reaches as far as its best rank."""
    instances: dict[str, InstanceMatch] = {}
    for holder, match in scores.workers.items():
        reach = cumulative(match)
        if not any(reach):
            continue
        gpu, cpu, disk = reach
        instance = instances.setdefault(holder.name, InstanceMatch(longest_matched=0, gpu=0, dp={}, cpu=0, disk=0))
        instance.dp[str(holder.rank)] = gpu
        instance.gpu, instance.cpu, instance.disk = (
            max(instance.gpu, gpu),
            max(instance.cpu, cpu),
            max(instance.disk, disk),
        )
        instance.longest_matched = max(instance.longest_matched, disk)
    return Matches(
        scores={name: dict(instance.dp) for name, instance in instances.items()}, frequencies=[], instances=instances
    )


def cumulative(match: WorkerMatch) -> tuple[int, int, int]:
    """Return the reach of a worker from the device alone, with host memory, and with everything."""
    own = [match.tiers[tier].reach if tier in match.tiers else 0 for tier in TIERS.values()]
    return own[0], max(own[:2]), max(own)


def worker(model: IndexedModel, match: WorkerMatch) -> WorkerScore:
    """Return one rank's answer."""
    holder = match.worker
    return WorkerScore(
        instance_id=model.ids.get(holder.name, holder.name),
        dp_rank=holder.rank,
        **picked(match, "tokens blocks limited_by confidence reason"),
        score=match.score if math.isfinite(match.score) else 0.0,
        tiers={
            TIER_NAMES[tier]: TierTokens(**picked(tier_match, "tokens blocks reach"))
            for tier, tier_match in match.tiers.items()
        },
        state=match.state.value,
        age_ms=match.age / MS,
    )


def scored(model: IndexedModel, scores: Scores) -> PromptScores:
    """Return one prompt's answer, the best worker first."""
    best = scores.best()
    ranked = [match for holder, match in scores.workers.items() if not holder.shared]
    ranked.sort(key=lambda match: (-match.score, match.worker))
    return PromptScores(
        tokens=scores.tokens,
        blocks=scores.blocks,
        workers=[worker(model, match) for match in ranked],
        best=worker(model, best) if best is not None else None,
    )


def explained(model: IndexedModel, explanation: Explanation) -> WorkerExplanation:
    """Return one worker's reasons."""
    return WorkerExplanation(
        worker=worker(model, explanation.match),
        summary=explanation.summary,
        groups=[GroupReason(**picked(group, "group kind tokens why")) for group in explanation.groups],
    )


def model_facts(model: IndexedModel) -> dict[str, Any]:
    """Return facts about the model itself."""
    identity = model.indexer.identity
    return {"model_name": model.name, "tenant_id": model.tenant, "block_size": identity.block_size}


def workers(model: IndexedModel) -> list[WorkerInfo]:
    """Return the workers registered for a model."""
    by_worker: dict[tuple[str, str], WorkerInfo] = {}
    for listener in model.listeners.values():
        registration = listener.registration
        key = (
            ("pool", registration.pool) if registration.pool is not None else ("worker", str(registration.instance_id))
        )
        info = by_worker.get(key)
        if info is None:
            info = by_worker[key] = WorkerInfo(
                instance_id=registration.instance_id,
                pool=registration.pool,
                status="active",
                **model_facts(model) | {"block_size": registration.block_size},
                routing_group=model.tenant,
                endpoints={},
                listeners={},
            )
        rank = str(registration.dp_rank or 0)
        about = listener.info()
        info.endpoints.setdefault(rank, registration.endpoint)
        info.listeners[rank if rank not in info.listeners else f"{rank}/{about.name}"] = about
        info.block_size = info.block_size or registration.block_size
        info.status = max(info.status, about.status, key=("active", "pending", "failed").index)
    return list(by_worker.values())


def rows(model: IndexedModel) -> ModelRows:
    """Return the rows of all workers, readable."""
    indexer = model.indexer
    places: list[PlaceRows] = []
    for holder in list(indexer.places.of):
        for number in indexer.places.of.get(holder, ()):
            place = indexer.places[number]
            runs = [list(run) for run in indexer.backend.held(number)]
            if runs:
                places.append(
                    PlaceRows(
                        instance_id=None if holder.shared else model.ids.get(holder.name, holder.name),
                        pool=holder.name if holder.shared else None,
                        dp_rank=holder.rank,
                        tier=TIER_NAMES[place.tier],
                        group=place.group,
                        runs=runs,
                    )
                )
    return ModelRows(block_size=indexer.identity.block_size, names=indexer.identity.names, places=places)
