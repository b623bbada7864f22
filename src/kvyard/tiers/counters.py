"""What an offload engine counts, for the report. Plain numbers since the start; nothing reads them to decide anything."""

from __future__ import annotations

import msgspec


class Flow(msgspec.Struct):
    """Copies from one tier to the next in one direction."""

    submitted: int = 0
    landed: int = 0
    blocks: int = 0
    """Of those that landed."""
    bytes: int = 0
    queued_ns: int = 0
    """How much later they landed, together, than they would have on idle links."""


class OffloadCounters(msgspec.Struct):
    """One worker's account."""

    stores: Flow = msgspec.field(default_factory=Flow)
    """Device to host."""
    loads: Flow = msgspec.field(default_factory=Flow)
    """Host to device."""
    spills: Flow = msgspec.field(default_factory=Flow)
    """Host to storage."""
    fetches: Flow = msgspec.field(default_factory=Flow)
    """Storage to host."""
    lookups: int = 0
    """Requests that asked lower tiers, each question counted."""
    hits: int = 0
    """Requests for which a load began."""
    hit_tokens: int = 0
    """Tokens that these loads bring."""
    storage_tokens: int = 0
    """Those of them that were fetched from storage for it."""
    pending_waits: int = 0
    """Questions answered with: it is on its way, ask again."""
    no_device_room: int = 0
    """Loads that found no room on the device."""
    no_host_room: int = 0
    """Stores and fetches put off because what the host holds is in use."""
    no_storage_room: int = 0
    """Spills left out because what storage holds is in use."""
    refused: int = 0
    """Stores and fetches given up because they can never fit."""
    dropped_blocks: int = 0
    """On eviction: device blocks given up without a copy."""
    unclean_waits: int = 0
    """On eviction: allocations that had to wait for a copy."""
    wasted_loads: int = 0
    """Loads that landed after their request had gone."""
    cross_worker_blocks: int = 0
    """Blocks read from a shared tier that another worker had stored."""
