"""Events: what the maps of cached copies announce, batched, put on every engine's wire, and read back from it."""

from kvyard.events.batcher import Batcher
from kvyard.events.mirror import Mirror
from kvyard.events.types import Cleared, Event, EventBatch, GroupMeta, Removed, Sink, Stored, Tier

__all__ = ["Batcher", "Cleared", "Event", "EventBatch", "GroupMeta", "Mirror", "Removed", "Sink", "Stored", "Tier"]
