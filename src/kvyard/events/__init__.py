"""Events: what the maps of cached copies announce, batched, put on every engine's wire, and read back from it."""

from kvyard.events.batcher import Batcher, Snapshot
from kvyard.events.counters import BatcherCounters, OutboxCounters
from kvyard.events.mirror import Mirror
from kvyard.events.outbox import Outbox
from kvyard.events.types import Cleared, Event, EventBatch, GroupMeta, Removed, Sink, Stored, Tier

__all__ = [
    "Batcher",
    "BatcherCounters",
    "Cleared",
    "Event",
    "EventBatch",
    "GroupMeta",
    "Mirror",
    "Outbox",
    "OutboxCounters",
    "Removed",
    "Sink",
    "Snapshot",
    "Stored",
    "Tier",
]
