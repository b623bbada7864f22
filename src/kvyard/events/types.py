"""Events of the KV plane, batches of them, and the sink that every map of cached copies calls.

These are plain values. They know nothing of wires (``kvyard.events.wire``) nor of who holds the blocks. A field that is
``None`` was left out by the producer; group ``None`` in particular is "no group named" and not group 0.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from kvyard.events.tier import Tier
from kvyard.hashing import Key, Run

__all__ = ["Cleared", "Event", "EventBatch", "GroupMeta", "Removed", "Sink", "Stored", "Tier"]


class GroupMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an attention group in events, beyond its index."""

    block_size: int
    """Tokens per block."""
    kind: str | None = None
    """The kind in the words of the wire: ``full_attention``, ``sliding_window``, ``mamba``, …"""
    window: int | None = None
    """Tokens a windowed group sees."""
    capacity: tuple[int, ...] = ()
    """Blocks per tier, closest first, where known."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of consecutive blocks of one chain became available.

    ``tokens`` is ``None`` where the producer knows hashes only; ``block_size`` is then 0 if it didn't say that either. Hashes
    and tokens may be packed. Packed tokens (an ``array``) compare unequal to a list: ask for ``list(tokens)``.
    """

    hashes: Sequence[Key]
    parent: Key | None
    tokens: Sequence[int] | None
    block_size: int
    group: int | None = None
    tier: Tier = Tier.G1
    lora_name: str | None = None
    lora_id: int | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    kind: str | None = None
    window: int | None = None
    salt: str | None = None
    locality: str | None = None
    """``LOCAL`` or ``REMOTE`` as seen from the producer."""
    ownership: str | None = None
    """Secondary tier that holds the copy, for producers with several."""
    session_id: str | None = None


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """The last copies of these blocks were removed from one (group, tier)."""

    hashes: Sequence[Key]
    group: int | None = None
    tier: Tier = Tier.G1
    reason: str | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """Every copy was removed; ``tier`` narrows it to one tier where the producer says so."""

    tier: Tier | None = None


Event: TypeAlias = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one stream in one iteration."""

    stream: str
    seq: int
    events: list[Event]
    ts: float = 0.0
    """Seconds."""
    rank: int | None = None
    epoch: int = 0
    first_id: int = 0
    """The id of the first event; the others count on from it. Ids have holes only where batches were lost."""


class Sink(Protocol):
    """The one place events leave from: every tier's map of cached copies calls it, and nothing else does.

    It is called in the middle of a change: it must neither raise nor call back.
    """

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        """Copies of ``run`` were registered; ``first`` where the map held none of these blocks before."""

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        """Copies of ``run`` were dropped; ``last`` where the map holds none of these blocks any more."""

    def cleared(self, tier: Tier | None = None) -> None:
        """All of ``tier`` was emptied at once; ``None`` means every tier there is."""
