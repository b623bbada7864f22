"""Bytes of a fleet's lower tiers, all workers together."""

from collections.abc import Sequence

from kvyard.events.tier import LOWER_TIERS
from kvyard.replay.config import ReplayConfig


def lower_bytes(config: ReplayConfig, counts: Sequence[float]) -> list[float]:
    """By tier, closest to the device first, the bytes of a fleet with ``counts`` workers of each kind. A tier that workers
    share counts once, as large as the largest kind says.
    """
    private = [0.0] * len(LOWER_TIERS)
    shared = [0.0] * len(LOWER_TIERS)
    for kind, count in zip(config.workers, counts, strict=True):
        below, size = kind.engine.tiers, kind.engine.bytes_per_block or 0
        for level, tier in enumerate(below.tiers if below is not None else ()):
            held = tier.bytes if tier.bytes is not None else (tier.num_blocks or 0) * size
            if tier.scope == "shared":
                shared[level] = max(shared[level], held)
            else:
                private[level] += count * kind.dp_size * held
    return [own + common for own, common in zip(private, shared, strict=False)]
