"""Counters of an offload engine, for the report. Plain numbers since the start; nothing reads them to decide anything."""

import msgspec

from kvyard.events.tier import reported_tiers
from kvyard.tiers.copy_totals import CopyTotals


class TierCounters(msgspec.Struct):
    """One tier below the device, as one worker uses it."""

    stores: CopyTotals = msgspec.field(default_factory=CopyTotals)
    """Into it, from the next closer tier."""
    loads: CopyTotals = msgspec.field(default_factory=CopyTotals)
    """Out of it, to the next closer tier."""
    tokens: int = 0
    """Tokens that loads brought to the device and that no closer tier had."""
    no_room: int = 0
    """Copies put off or left out because what it holds is in use."""


class PullCounters(msgspec.Struct):
    """Pulls of one worker from others."""

    begun: int = 0
    landed: int = 0
    tokens: int = 0
    """Tokens that loads brought to the device from another worker."""
    blocks: int = 0
    """Of those that landed, as are the others."""
    bytes: int = 0
    ns: int = 0
    """From a pull's beginning until it had landed, of all together."""
    queued_ns: int = 0
    """Sum of the delays of landings compared with an idle network."""
    gone: int = 0
    """Pulls that found too little where the router had seen it, after one latency."""
    failed: int = 0
    """Pulls whose source failed before they had landed."""
    no_room: int = 0
    """Prompts computed because the first tier had no room."""
    busy: int = 0
    """Prompts computed because too many pulls were in flight."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests for which the load policy chose to compute, by the reason that it gave."""


class OffloadCounters(msgspec.Struct):
    """One worker's account."""

    tiers: list[TierCounters]
    """Closest to the device first."""
    lookups: int = 0
    """Requests that asked lower tiers, each question counted."""
    hits: int = 0
    """Requests for which a load began."""
    hit_tokens: int = 0
    """Tokens that these loads bring."""
    pending_waits: int = 0
    """Requests answered with: it is in flight, ask again."""
    no_device_room: int = 0
    """Loads that found no room on the device."""
    refused: int = 0
    """Stores and fetches given up because they can never fit."""
    dropped_blocks: int = 0
    """On eviction: device blocks evicted without a copy."""
    unclean_waits: int = 0
    """On eviction: allocations that had to wait for a copy."""
    wasted_loads: int = 0
    """Loads that landed after their request had gone."""
    left_requests: int = 0
    """Requests that began without what lower tiers had of them, or with less than that."""
    left_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens left, by the reason that the load policy gave."""
    pulls: PullCounters = msgspec.field(default_factory=PullCounters)
    cross_worker_blocks: int = 0
    """Blocks read from a shared tier that another worker had stored."""

    def flat(self) -> dict[str, int]:
        """Return all counters but those of single copies, by name: ``hits``, ``storage_tokens``, ``no_host_room`` ..."""
        counts = {name: value for name, value in msgspec.structs.asdict(self).items() if isinstance(value, int)}
        for level, tier in enumerate(reported_tiers(len(self.tiers))):
            counters = self.tiers[level] if level < len(self.tiers) else TierCounters()
            counts[f"{tier.label}_tokens"] = counters.tokens
            counts[f"no_{tier.label}_room"] = counters.no_room
        return counts
