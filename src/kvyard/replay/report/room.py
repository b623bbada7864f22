"""Room for blocks on a card: whether a run had more of them than its card holds, and how to have more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvyard.engine.cards import CARDS
from kvyard.engine.models.planning import ModelPlan, plan
from kvyard.engine.timing.deployment import Deployment
from kvyard.errors import KvyardError

MOST_USED = 0.98
"""Share of a card's memory that engines can be run with at most."""
MOST_CARDS = 8
"""Cards of a node, which is as far as tensor parallelism goes."""
WORTH = 1.2
"""Times the room from which a change is worth a word."""


def what_if(engine: Mapping[str, Any]) -> str:
    """Return a sentence if the engine's card can't hold the engine's blocks; empty if it can, or no card is known."""
    deployment = _deployment(engine)
    if deployment is None:
        return ""
    blocks, page = engine.get("num_gpu_blocks", 0), engine.get("bytes_per_block") or 0
    try:
        room = _plan(deployment, engine, gpu_memory_utilization=MOST_USED).cache_bytes
    except KvyardError:
        room = 0
    if not page or blocks * page <= room:
        return ""
    holds = f"{room // page:,} at most" if room else "none beside the model's weights"
    return (
        f"A what-if: {blocks:,} blocks on each device, and the card ({deployment.gpu}) has room for {holds}. Leave "
        "--num-gpu-blocks (or --gpu-memory) out for what it holds."
    )


def what_ifs(config: Mapping[str, Any]) -> list[str]:
    """Return such a sentence for each kind of worker of a replay's configuration that has more blocks than its card holds."""
    kinds = config.get("workers")
    engines = [kind.get("engine", {}) for kind in kinds] if isinstance(kinds, list | tuple) else []
    return list(dict.fromkeys(filter(None, map(what_if, engines))))


def more_room(engine: Mapping[str, Any]) -> str:
    """Return ways to more blocks that exist for the engine's card; empty if no card is known."""
    deployment = _deployment(engine)
    if deployment is None:
        return ""
    replace = msgspec.structs.replace
    changes: dict[str, Deployment] = {}
    if deployment.kv_cache_dtype == "auto":
        changes["an FP8 cache (--kv-cache-dtype fp8"] = replace(deployment, kv_cache_dtype="fp8")
    if deployment.weight_dtype is None:
        changes["FP8 weights (--quantization fp8"] = replace(deployment, weight_dtype="fp8")
    wider = deployment.tensor_parallel_size * 2
    if wider <= MOST_CARDS:
        changes[f"twice the cards for each worker (-tp {wider}"] = replace(deployment, tensor_parallel_size=wider)
    own_card = deployment.card
    larger = [
        card
        for card in CARDS.values()
        if card.memory > own_card.memory
        and card.bandwidth >= own_card.bandwidth
        and card.rate("bf16") >= own_card.rate("bf16")
    ]
    if larger:
        card = min(larger, key=lambda card: card.memory)
        changes[f"a card with more memory (--gpu {card.name}"] = replace(deployment, gpu=card.name)
    try:
        own = _plan(deployment, engine).max_tokens
    except KvyardError:
        own = 0
    ways = []
    for words, changed in changes.items():
        try:
            times = _plan(changed, engine).max_tokens / own if own else 0.0
        except KvyardError:
            continue
        if not own or times >= WORTH:
            ways.append(f"{words})" if not own else f"{words}: {times:.1f} times the room)")
    if not ways:
        return "fewer requests at a time (--max-num-seqs), or more workers"
    return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"


def _deployment(engine: Mapping[str, Any]) -> Deployment | None:
    """Return the model and card that the engine's times are of; ``None`` if they aren't of a model on a card."""
    timing = engine.get("timing")
    deployment = timing.get("deployment") if isinstance(timing, dict) else None
    if deployment is None or engine.get("bytes_per_block") is None:
        return None
    try:
        return msgspec.convert(deployment, Deployment)
    except msgspec.ValidationError:
        return None


def _plan(deployment: Deployment, engine: Mapping[str, Any], **more: Any) -> ModelPlan:
    """Return memory of a card. Raises ``KvyardError`` for a model that doesn't fit, or can't be read any more."""
    options = {
        name: value for name, value in msgspec.structs.asdict(deployment).items() if name not in ("model", "gpu")
    }
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        if engine.get(name) is not None:
            options[name] = engine[name]
    return plan(deployment.config(), deployment.card.memory, **options, **more)
