"""Events in, TensorRT-LLM's event dicts out.

Its tiers are exclusive and ours aren't, so the writer keeps, per block, the tiers that hold a copy, and speaks of the closest
one only: a further copy below is silence, the loss of the closest with another left is ``updated``, the loss of the last is
``removed``. It has no word for a clear: like the engine, the writer removes every block by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.events.types import Cleared, EventBatch, GroupMeta, Removed, Stored, Tier
from kvyard.events.wire.keys import U64
from kvyard.events.wire.trtllm.shapes import (
    Block,
    Created,
    Diff,
    Envelope,
    MediaKey,
    Payload,
    RemovedData,
    StoredData,
    Token,
    Updated,
)
from kvyard.hashing import Key

MAX_WINDOW = (1 << 31) - 1
"""The window of a group that sees everything, where no longest sequence is given."""


class TrtllmWriter:
    """Writes one stream: remembers which tiers hold each block, and numbers events."""

    def __init__(self, groups: Sequence[GroupMeta] = (), max_window: int = MAX_WINDOW, announce: bool = True) -> None:
        """``groups`` go out as ``created`` before anything else, if ``announce``. ``max_window`` is the longest sequence."""
        self._groups = tuple(groups)
        self._max_window = max_window
        self._announce = announce
        self._held: dict[int | None, dict[Key, int]] = {}
        """Per group, per block: the tiers with a copy, as bits."""
        self._windows: dict[int | None, int] = {at: meta.window or max_window for at, meta in enumerate(self._groups)}
        self._next_id = 0
        self._expected: int | None = None
        self._out: list[Envelope] = []
        self._rank: int | None = None

    def encode(self, batch: EventBatch) -> bytes:
        """``batch`` as a JSON list. Ids are dense, with a hole wherever the batches' own ids have one."""
        self._rank = batch.rank
        if self._announce:
            self._announce = False
            for group, meta in enumerate(self._groups):
                self._put(Created(list(meta.capacity)), group)
        if self._expected is not None and batch.first_id > self._expected:
            self._next_id += batch.first_id - self._expected
        self._expected = batch.first_id + len(batch.events)
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event.hashes, event.group, event.tier)
            else:
                self._clear(event)
        out, self._out = self._out, []
        return msgspec.json.encode(out)

    def _store(self, event: Stored) -> None:
        held = self._held.setdefault(event.group, {})
        self._windows.setdefault(event.group, event.window or self._max_window)
        bit = 1 << event.tier
        level = event.tier - 1
        fresh: list[Block] = []
        parent = event.parent
        for at, key in enumerate(event.hashes):
            before = held.get(key, 0)
            held[key] = before | bit
            if not before:
                fresh.append(_block(event, at, key, level))
                continue
            # A known block in between ends the chain that goes into one event.
            self._put_stored(fresh, parent, event.group)
            fresh, parent = [], key
            self._move(key, before, before | bit, event.group)
        self._put_stored(fresh, parent, event.group)

    def _remove(self, hashes: Sequence[Key], group: int | None, tier: Tier) -> None:
        held = self._held.get(group, {})
        gone: list[Key] = []
        for key in hashes:
            before = held.get(key, 0)
            after = before & ~(1 << tier)
            if after:
                held[key] = after
                self._move(key, before, after, group)
            else:
                held.pop(key, None)
                gone.append(key)
        if gone:
            self._put(RemovedData([_hash(key) for key in gone]), group, gone[0])

    def _clear(self, event: Cleared) -> None:
        for group in list(self._held):
            for tier in Tier if event.tier is None else (event.tier,):
                self._remove([key for key, bits in self._held[group].items() if bits & 1 << tier], group, tier)

    def _move(self, key: Key, before: int, after: int, group: int | None) -> None:
        """Say that a block's closest copy is now in another tier, if it is."""
        old, new = _closest(before), _closest(after)
        if old != new:
            self._put(
                Updated(block_hash=_hash(key), cache_level=Diff(new_value=new - 1, old_value=old - 1)), group, key
            )

    def _put_stored(self, blocks: list[Block], parent: Key | None, group: int | None) -> None:
        if blocks:
            sample = blocks[0].block_hash
            self._put(StoredData(None if parent is None else _hash(parent), blocks), group, sample)

    def _put(self, data: Payload, group: int | None, sample: Key | str = 0) -> None:
        self._out.append(
            Envelope(
                event_id=self._next_id,
                data=data,
                window_size=self._windows.get(group, self._max_window),
                hash_algo="v2_sha256" if isinstance(sample, bytes | str) else None,
                attention_dp_rank=self._rank,
                layer_group_id=group,
            )
        )
        self._next_id += 1


def _closest(bits: int) -> int:
    """The tier of the lowest bit set."""
    return (bits & -bits).bit_length() - 1


def _hash(key: Key) -> int | str:
    return key.hex() if isinstance(key, bytes) else key & U64


def _block(event: Stored, at: int, key: Key, level: int) -> Block:
    size = event.block_size
    tokens = event.tokens[at * size : (at + 1) * size] if event.tokens is not None else ()
    extras = event.extra_keys[at] if event.extra_keys is not None and at < len(event.extra_keys) else None
    return Block(
        block_hash=_hash(key),
        tokens=[Token(token_id=token) for token in tokens],
        cache_level=level,
        mm_keys=[key for key in map(_media, extras or ()) if key is not None],
        cache_salt=event.salt,
    )


def _media(item: object) -> MediaKey | None:
    """An extra key that is a media item, seen from the item: how far into it the block starts."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int):
        return MediaKey(hash=item[0], start_offset=-item[1])
    return None
