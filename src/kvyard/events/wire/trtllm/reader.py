"""TensorRT-LLM's event dicts in, events out.

This engine's tiers are exclusive: a stored block has one level, ``updated`` moves it, and ``removed`` takes it away without
saying from where. Our events name the tier, so the reader remembers which blocks it has seen below the device. Groups are
known by their window, or in newer versions by ``layer_group_id``; without the latter the window is the group's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeGuard

import msgspec

from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.events.wire.decoded import (
    GAP,
    GROUP,
    HASH,
    JSON_STARTS,
    MALFORMED,
    MAX_COUNT,
    MEDIUM,
    RESTART,
    UNKNOWN,
    UNREADABLE,
    Decoded,
    DecodeStats,
    EventRefused,
    Problem,
)
from kvyard.events.wire.keys import BadHash, read_hash, read_hex
from kvyard.events.wire.trtllm.shapes import (
    KNOWN,
    Block,
    Created,
    Envelope,
    Hash,
    RemovedData,
    StoredData,
    Token,
)
from kvyard.hashing import Key

DRAIN: msgspec.json.Decoder[list[Envelope]] = msgspec.json.Decoder(list[Envelope])

STATE_GROUP = 1 << 30
"""Managers of recurrent state have a negative window; their group's number is this minus that window."""

MAX_REMEMBERED = 1 << 20
MAX_NAMES = 4096
"""How many groups and ranks are told apart; no engine has as many, and a broken stream must not fill memory."""
_TIERS = {level: tier for level, tier in enumerate(Tier)}


class TrtllmReader:
    """Reads the events of one stream. Remembers ids, block sizes and what lies below the device."""

    def __init__(self, narrow: bool = False, block_size: int | None = None) -> None:
        self._narrow = narrow
        self._block_size = block_size
        self._learned: dict[int | None, int] = {}
        self._last_id: dict[int | None, int] = {}
        self._below: dict[tuple[int | None, int | None, Key], Tier] = {}
        self._forgot = False

    def read(self, payload: object, stats: DecodeStats) -> Decoded | None:
        if isinstance(payload, bytes):
            if payload[0] not in JSON_STARTS:
                payload = msgspec.msgpack.decode(payload)
            else:
                try:
                    return self._read_drain(DRAIN.decode(payload), stats)
                except UNREADABLE:
                    payload = msgspec.json.decode(payload)
            if _is_drain(payload):
                stats.slow_payloads += 1
        if not _is_drain(payload):
            return None
        return self._read_drain([payload] if isinstance(payload, Mapping) else payload, stats)

    def _read_drain(self, items: Sequence[Any], stats: DecodeStats) -> Decoded:
        """Read one drain. A bad event costs itself; ids that are missing or start again become problems."""
        events: list[Event] = []
        ranks: list[int | None] = []
        problems: list[Problem] = []
        capacities: dict[int | None, int] = {}
        for index, item in enumerate(items):
            try:
                envelope = item if isinstance(item, Envelope) else self._open(item, stats)
                rank = envelope.attention_dp_rank
                problem = self._follow(index, envelope)
                if problem is not None:
                    problems.append(problem)
                if isinstance(envelope.data, Created):
                    capacities |= _capacity(envelope, envelope.data)
                for event in self._read(envelope, stats):
                    events.append(event)
                    ranks.append(rank)
            except EventRefused as refusal:
                problems.append(Problem(index, refusal.reason, refusal.kind))
            except (msgspec.MsgspecError, BadHash, OverflowError, RecursionError) as error:
                kind = HASH if isinstance(error, BadHash) else MALFORMED
                problems.append(Problem(index, f"{error}"[:200], kind))
        one_rank = len(set(ranks)) <= 1
        return Decoded(
            rank=ranks[0] if ranks and one_rank else None,
            events=events,
            problems=problems,
            dialect="trtllm" if events else "none",
            ranks=None if one_rank else ranks,
            capacities=capacities,
        )

    def _open(self, item: object, stats: DecodeStats) -> Envelope:
        data = item.get("data") if isinstance(item, Mapping) else None
        tag = data.get("type") if isinstance(data, Mapping) else None
        if not isinstance(tag, str):
            raise EventRefused(MALFORMED, "an event without a kind")
        if tag not in KNOWN:
            stats.note_unknown(tag)
            raise EventRefused(UNKNOWN, f"unknown kind {tag[:40]!r}")
        return msgspec.convert(item, Envelope)

    def _follow(self, index: int, envelope: Envelope) -> Problem | None:
        """Check an event's id against the one before it, of the same rank."""
        at, rank = envelope.event_id, envelope.attention_dp_rank
        if at is None:
            return None
        if rank is not None and not 0 <= rank < MAX_COUNT:
            raise EventRefused(MALFORMED, f"rank {rank} is out of range")
        last = self._last_id.get(rank)
        if last is None and len(self._last_id) >= MAX_NAMES:
            return None
        self._last_id[rank] = at
        if last is None or at == last + 1:
            return None
        if at <= last:
            return Problem(index, f"event ids start again at {at} after {last}", RESTART)
        return Problem(index, f"events {last + 1} to {at - 1} are missing", GAP)

    def _read(self, envelope: Envelope, stats: DecodeStats) -> Iterable[Event]:
        data, rank = envelope.data, envelope.attention_dp_rank
        group, window = _place(envelope)
        if isinstance(data, Created):
            # A manager was built, so it holds nothing.
            return (Cleared(),)
        if isinstance(data, StoredData):
            return self._stored(data, group, window, rank, stats)
        if isinstance(data, RemovedData):
            return self._removed([self._key(key) for key in data.block_hashes], group, rank)
        move = data.cache_level
        if move is None or move.new_value == move.old_value:
            return ()
        key, new, old = self._key(data.block_hash), _tier(move.new_value), _tier(move.old_value)
        self._remember(rank, group, (key,), new)
        # The new copy first: a reader in between must not think the block gone.
        return (
            Stored(hashes=[key], parent=None, tokens=None, block_size=0, group=group, tier=new, window=window),
            Removed(hashes=[key], group=group, tier=old),
        )

    def _stored(
        self, data: StoredData, group: int | None, window: int | None, rank: int | None, stats: DecodeStats
    ) -> list[Event]:
        parent = None if data.parent_hash is None else self._key(data.parent_hash)
        blocks = self._full(data.blocks, group, stats)
        events: list[Event] = []
        for level, same in groupby(blocks, key=lambda block: block.cache_level or 0):
            part = list(same)
            tier = _tier(level)
            hashes = [self._key(block.block_hash) for block in part]
            tokens = [_token_id(token) for block in part for token in block.tokens or ()]
            extras = [_extras(block) for block in part] if any(block.mm_keys for block in part) else None
            self._remember(rank, group, hashes, tier)
            events.append(
                Stored(
                    hashes=hashes,
                    parent=parent,
                    tokens=tokens or None,
                    block_size=len(tokens) // len(part) or self._block_size or 0,
                    group=group,
                    tier=tier,
                    extra_keys=extras,
                    kind="mamba" if group is not None and group > STATE_GROUP else None,
                    window=window,
                    salt=part[0].cache_salt or None,
                )
            )
            parent = hashes[-1]
        return events

    def _full(self, blocks: list[Block], group: int | None, stats: DecodeStats) -> list[Block]:
        """``blocks`` up to the first that isn't full; those without tokens pass, since that can't be told."""
        sizes = [len(block.tokens or ()) for block in blocks]
        if not any(sizes):
            return blocks
        size = self._block_size
        if size is None:
            size = max(*sizes, self._learned.get(group, 0))
            if group in self._learned or len(self._learned) < MAX_NAMES:
                self._learned[group] = size
        full = next((at for at, count in enumerate(sizes) if count != size), len(sizes))
        stats.partial_blocks += len(sizes) - full
        return blocks[:full]

    def _removed(self, keys: list[Key], group: int | None, rank: int | None) -> list[Event]:
        below = self._below
        tiers = [below.pop((rank, group, key), Tier.G1) for key in keys] if below else [Tier.G1] * len(keys)
        events: list[Event] = []
        for tier in Tier:
            hashes = [
                key for key, at in zip(keys, tiers, strict=True) if at == tier or (self._forgot and at == Tier.G1)
            ]
            if hashes:
                events.append(Removed(hashes=hashes, group=group, tier=tier))
        return events

    def _remember(self, rank: int | None, group: int | None, keys: Iterable[Key], tier: Tier) -> None:
        below = self._below
        for key in keys:
            if tier == Tier.G1:
                below.pop((rank, group, key), None)
            elif len(below) < MAX_REMEMBERED:
                below[rank, group, key] = tier
            else:
                # From here on a removal is passed on for every tier: too many are harmless, one too few is not.
                self._forgot = True

    def _key(self, key: Hash) -> Key:
        return read_hex(key, self._narrow) if isinstance(key, str) else read_hash(key)


def _is_drain(payload: object) -> TypeGuard[Mapping[str, Any] | Sequence[Any]]:
    if isinstance(payload, Mapping):
        return "data" in payload
    return isinstance(payload, list | tuple) and (not payload or any(isinstance(item, Mapping) for item in payload))


def _capacity(envelope: Envelope, data: Created) -> dict[int | None, int]:
    levels = data.num_blocks_per_cache_level
    device = levels[0] if isinstance(levels, list) and levels else None
    return {_place(envelope)[0]: device} if isinstance(device, int) and device > 0 else {}


def _place(envelope: Envelope) -> tuple[int | None, int | None]:
    """The group and window of an event."""
    group, window = envelope.layer_group_id, envelope.window_size
    if window is not None and abs(window) >= STATE_GROUP * 2:
        raise EventRefused(GROUP, f"window {window} is out of range")
    if group is not None and not 0 <= group < MAX_COUNT:
        raise EventRefused(GROUP, f"group {group} is out of range")
    if group is None and window is not None:
        group = window if window >= 0 else STATE_GROUP - window
    return group, window if window is not None and window >= 0 else None


def _tier(level: int) -> Tier:
    tier = _TIERS.get(level)
    if tier is None:
        raise EventRefused(MEDIUM, f"unknown cache level {level}")
    return tier


def _token_id(token: Token | int) -> int:
    return token if isinstance(token, int) else token.token_id


def _extras(block: Block) -> tuple[object, ...] | None:
    """Media keys as vLLM has them: the item's hash, and where it starts as seen from the block."""
    return tuple((key.hash, -key.start_offset) for key in block.mm_keys or ()) or None
