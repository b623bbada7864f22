"""TensorRT-LLM's wire: JSON lists of numbered event dicts, fetched from ``/kv_cache_events``. Its own stream over ZeroMQ writes
vLLM's maps with signed hashes.

Every event is an envelope (id, window, rank, group) around one of four payloads. Tiers are exclusive: a stored block has one
level, ``updated`` moves it, and ``removed`` takes it away without saying from where. Our events name the tier, so the reader
remembers which blocks it has seen below the device, and the writer, per block, the tiers that hold a copy: it announces the
closest one only. There is no clear event: like the engine, the writer removes every block by name. Groups are known by
their window, or in newer versions by ``layer_group_id``; without the latter the window is the group's number.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, TypeGuard

import msgspec
from msgspec import Struct

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.events.packed import Packed, PackedEvents
from kvyard.events.types import Cleared, Event, EventBatch, GroupMeta, Removed, Stored, Tier
from kvyard.events.wire.decoded import (
    JSON_STARTS,
    LARGE,
    MAX_COUNT,
    MOST_EVENTS,
    UNREADABLE,
    Decoded,
    DecodeStats,
    EventRefused,
    Problem,
    ProblemKind,
    Problems,
    no_events,
)
from kvyard.events.wire.format import EngineGuess, StreamRules, WireFormat
from kvyard.events.wire.keys import U64, read_hash, read_hex
from kvyard.hashing import Key

Hash: TypeAlias = int | str
"""A 64-bit integer, or the hex digits of a SHA-256."""

DEFAULT_PRIORITY = 35


# -- shapes: tokens are objects of their own; the inner objects' ``type`` isn't needed to read them --------------------


class Token(Struct, kw_only=True, gc=False):
    type: str = "unique_token"
    token_id: int
    token_extra_id: int | None = 0


class MediaKey(Struct, kw_only=True, gc=False):
    type: str = "mm_key"
    hash: str
    """The content's hash; in older versions the user's own name for it, if there is one."""
    start_offset: int = 0
    """Offset into the item at which this block starts."""
    uuid: str | None = None


class Block(Struct, kw_only=True, gc=False):
    type: str = "stored_block"
    block_hash: Hash
    tokens: list[Token | int] | None = None
    cache_level: int | None = 0
    priority: int | None = DEFAULT_PRIORITY
    mm_keys: list[MediaKey] | None = None
    cache_salt: str | None = None


class Created(Struct, tag="created", gc=False):
    num_blocks_per_cache_level: Any = None


class StoredData(Struct, tag="stored", gc=False):
    parent_hash: Hash | None = None
    blocks: list[Block] = []


class RemovedData(Struct, tag="removed", gc=False):
    block_hashes: list[Hash]


class Diff(Struct, kw_only=True, gc=False):
    type: str = "event_diff"
    new_value: int
    old_value: int


class Updated(Struct, tag="updated", kw_only=True, gc=False):
    block_hash: Hash
    cache_level: Diff | None = None
    priority: Any = None


Payload: TypeAlias = Created | StoredData | RemovedData | Updated
KNOWN = frozenset(("created", "stored", "removed", "updated"))


class Envelope(Struct, omit_defaults=True, gc=False):
    event_id: int | None
    data: Payload
    window_size: int | None = None
    hash_algo: str | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


# -- reading -----------------------------------------------------------------------------------------------------------


DRAIN: msgspec.json.Decoder[list[Envelope]] = msgspec.json.Decoder(list[Envelope])
PACKED_DRAIN: msgspec.msgpack.Decoder[list[Envelope]] = msgspec.msgpack.Decoder(list[Envelope])

STATE_GROUP = 1 << 30
"""Managers of recurrent state have a negative window; their group's number is this minus that window."""

MAX_REMEMBERED = 1 << 20
MAX_NAMES = 4096
"""Limit of distinct groups and ranks; no engine has as many, and a broken stream must not fill memory."""
_TIERS = dict(enumerate(Tier))


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
            large, is_json = len(payload) > LARGE, payload[0] in JSON_STARTS
            if is_json or large:
                try:
                    drain = (DRAIN if is_json else PACKED_DRAIN).decode(payload)
                    if large and len(drain) <= MOST_EVENTS:
                        return self._read_drain(Packed(drain), stats, PackedEvents())
                    return self._read_drain(drain, stats, [])
                except UNREADABLE:
                    if large:
                        raise
            payload = (msgspec.json if is_json else msgspec.msgpack).decode(payload)
            if _is_drain(payload):
                stats.slow_payloads += 1
        if not _is_drain(payload):
            return None
        return self._read_drain([payload] if isinstance(payload, Mapping) else payload, stats, [])

    def _read_drain(self, items: Sequence[Any], stats: DecodeStats, events: list[Event] | PackedEvents) -> Decoded:
        """Read one drain into ``events``. A bad event costs itself; ids that are missing or start again become problems."""
        if len(items) > MOST_EVENTS:
            return no_events(f"a batch of more than {MOST_EVENTS} events")
        ranks: list[int | None] = []
        known: dict[int | None, int | None] = {}
        """Ranks, each as one object."""
        problems = Problems()
        capacities: dict[int | None, int] = {}
        for index, item in enumerate(items):
            try:
                envelope = item if isinstance(item, Envelope) else self._open(item, stats)
                problem = self._follow(index, envelope)
                if problem is not None:
                    problems.add(problem)
                problem = _unknown_level(index, envelope)
                if problem is not None:
                    problems.add(problem)
                if isinstance(envelope.data, Created):
                    capacities |= _capacity(envelope, envelope.data)
                read = self._read(envelope, stats)
                events.extend(read)
                rank = envelope.attention_dp_rank
                ranks += [known.setdefault(rank, rank)] * len(read)
            except EventRefused as refusal:
                problems.add(Problem(index, refusal.reason, refusal.kind))
            except (OverflowError, *DECODE_ERRORS) as error:
                problems.add(Problem(index, f"{error}"[:200], ProblemKind.MALFORMED))
        one_rank = len(set(ranks)) <= 1
        decoded = Decoded(
            rank=ranks[0] if ranks and one_rank else None,
            events=events,
            problems=problems.kept,
            dialect="trtllm" if events else "none",
            ranks=None if one_rank else ranks,
            capacities=capacities,
        )
        large = isinstance(events, PackedEvents)
        return msgspec.structs.replace(decoded, parts=decoded.by_rank()) if large and not one_rank else decoded

    def _open(self, item: object, stats: DecodeStats) -> Envelope:
        data = item.get("data") if isinstance(item, Mapping) else None
        tag = data.get("type") if isinstance(data, Mapping) else None
        stats.check_kind(tag, KNOWN)
        return msgspec.convert(item, Envelope)

    def _follow(self, index: int, envelope: Envelope) -> Problem | None:
        """Check an event's id against the one before it, of the same rank."""
        event_id, rank = envelope.event_id, envelope.attention_dp_rank
        if event_id is None:
            return None
        if rank is not None and not 0 <= rank < MAX_COUNT:
            raise EventRefused(ProblemKind.MALFORMED, f"rank {rank} is out of range")
        last = self._last_id.get(rank)
        if last is None and len(self._last_id) >= MAX_NAMES:
            return None
        self._last_id[rank] = event_id
        if last is None or event_id == last + 1:
            return None
        if event_id <= last:
            return Problem(index, f"event ids start again at {event_id} after {last}", ProblemKind.RESTART)
        return Problem(index, f"events {last + 1} to {event_id - 1} are missing", ProblemKind.GAP)

    def _read(self, envelope: Envelope, stats: DecodeStats) -> list[Event]:
        data, rank = envelope.data, envelope.attention_dp_rank
        group, window = _place(envelope)
        if isinstance(data, Created):
            # A manager was built, so it holds nothing.
            return [Cleared()]
        if isinstance(data, StoredData):
            return self._stored(data, group, window, rank, stats)
        if isinstance(data, RemovedData):
            return self._removed([self._key(key) for key in data.block_hashes], group, rank)
        move = data.cache_level
        if move is None or move.new_value == move.old_value:
            return []
        key, new, old = self._key(data.block_hash), _TIERS.get(move.new_value), _TIERS.get(move.old_value)
        moved: list[Event] = []
        # The new copy first: a reader in between must not think the block gone.
        if new is not None:
            self._remember(rank, group, (key,), new)
            moved.append(
                Stored(hashes=[key], parent=None, tokens=None, block_size=0, group=group, tier=new, window=window)
            )
        if old is not None:  # it left, wherever it went
            moved.append(Removed(hashes=[key], group=group, tier=old))
        return moved

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
            ids = [token for block in part for token in block.tokens or ()]
            tokens = [token if isinstance(token, int) else token.token_id for token in ids]
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
        """Return ``blocks`` up to the first that isn't full; blocks without tokens pass, since their size is unknown."""
        sizes = [len(block.tokens or ()) for block in blocks]
        if not any(sizes):
            return blocks
        size = self._block_size
        if size is None:
            size = max(*sizes, self._learned.get(group, 0))
            if group in self._learned or len(self._learned) < MAX_NAMES:
                self._learned[group] = size
        full = next((index for index, count in enumerate(sizes) if count != size), len(sizes))
        stats.partial_blocks += len(sizes) - full
        return blocks[:full]

    def _removed(self, keys: list[Key], group: int | None, rank: int | None) -> list[Event]:
        below = self._below
        tiers = [below.pop((rank, group, key), Tier.G1) for key in keys] if below else [Tier.G1] * len(keys)
        events: list[Event] = []
        for tier in Tier:
            meant = (tier, Tier.G1) if self._forgot else (tier,)
            hashes = [key for key, tier in zip(keys, tiers, strict=True) if tier in meant]
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
    """Return the group and window of an event."""
    group, window = envelope.layer_group_id, envelope.window_size
    if window is not None and abs(window) >= STATE_GROUP * 2:
        raise EventRefused(ProblemKind.GROUP, f"window {window} is out of range")
    if group is not None and not 0 <= group < MAX_COUNT:
        raise EventRefused(ProblemKind.GROUP, f"group {group} is out of range")
    if group is None and window is not None:
        group = window if window >= 0 else STATE_GROUP - window
    return group, window if window is not None and window >= 0 else None


def _unknown_level(index: int, envelope: Envelope) -> Problem | None:
    """Return the problem with a block that moves from or to a level that isn't known."""
    move = envelope.data.cache_level if isinstance(envelope.data, Updated) else None
    for level in () if move is None else (move.new_value, move.old_value):
        if level not in _TIERS:
            return Problem(index, f"unknown cache level {level}", ProblemKind.MEDIUM)
    return None


def _tier(level: int) -> Tier:
    tier = _TIERS.get(level)
    if tier is None:
        raise EventRefused(ProblemKind.MEDIUM, f"unknown cache level {level}")
    return tier


def _extras(block: Block) -> tuple[object, ...] | None:
    """Return media keys as vLLM has them: the item's hash, and where it starts as seen from the block."""
    return tuple((key.hash, -key.start_offset) for key in block.mm_keys or ()) or None


# -- writing -----------------------------------------------------------------------------------------------------------


MAX_WINDOW = (1 << 31) - 1
"""The window of a group that sees everything."""


class TrtllmWriter:
    """Writes one stream: remembers which tiers hold each block, and numbers events."""

    def __init__(self, groups: Sequence[GroupMeta]) -> None:
        """``groups`` go out as ``created`` before anything else."""
        self._unannounced = list(enumerate(groups))
        self._held: dict[int | None, dict[Key, int]] = {}
        """Per group, per block: the tiers with a copy, as bits."""
        self._windows: dict[int | None, int] = {group: meta.window or MAX_WINDOW for group, meta in enumerate(groups)}
        self._next_id = 0
        self._expected: int | None = None
        self._out: list[Envelope] = []
        self._rank: int | None = None

    def encode(self, batch: EventBatch) -> bytes:
        """Return ``batch`` as a JSON list. Ids are dense, with a hole wherever the batches' own ids have one."""
        self._rank = batch.rank
        for group, meta in self._unannounced:
            self._put(Created(list(meta.capacity)), group)
        self._unannounced = []
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
        self._windows.setdefault(event.group, event.window or MAX_WINDOW)
        bit = 1 << event.tier
        level = event.tier - 1
        fresh: list[Block] = []
        parent = event.parent
        for index, key in enumerate(event.hashes):
            before = held.get(key, 0)
            held[key] = before | bit
            if not before:
                fresh.append(_block(event, index, key, level))
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
                window_size=self._windows.get(group, MAX_WINDOW),
                hash_algo="v2_sha256" if isinstance(sample, bytes | str) else None,
                attention_dp_rank=self._rank,
                layer_group_id=group,
            )
        )
        self._next_id += 1


def _closest(bits: int) -> int:
    """Return the tier of the lowest bit set."""
    return (bits & -bits).bit_length() - 1


def _hash(key: Key) -> int | str:
    return key.hex() if isinstance(key, bytes) else key & U64


def _block(event: Stored, index: int, key: Key, level: int) -> Block:
    size = event.block_size
    tokens = event.tokens[index * size : (index + 1) * size] if event.tokens is not None else ()
    extras = event.extra_keys[index] if event.extra_keys is not None and index < len(event.extra_keys) else None
    return Block(
        block_hash=_hash(key),
        tokens=[Token(token_id=token) for token in tokens],
        cache_level=level,
        mm_keys=[key for key in map(_media, extras or ()) if key is not None],
        cache_salt=event.salt,
    )


def _media(item: object) -> MediaKey | None:
    """Return an extra key that is a media item, seen from the item: how far into it the block starts."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int):
        return MediaKey(hash=item[0], start_offset=-item[1])
    return None


# -- the format --------------------------------------------------------------------------------------------------------


def look(payload: Any, guess: EngineGuess) -> bool:
    """Note what a list of event dicts looks like."""
    items = [payload] if isinstance(payload, Mapping) else payload
    if not isinstance(items, list) or not any(isinstance(item, Mapping) and "data" in item for item in items):
        return False
    for item in items:
        guess.encodings["trtllm"] += 1
        data = item.get("data") if isinstance(item, Mapping) else None
        if isinstance(data, Mapping):
            blocks = data.get("blocks")
            if isinstance(blocks, list):
                guess.note_hashes([block.get("block_hash") for block in blocks if isinstance(block, Mapping)])
            guess.note_hashes(data.get("block_hashes"))
    return True


def _likeness(guess: EngineGuess) -> int:
    if guess.encodings["trtllm"]:
        return 100
    # Its own stream: the first eight bytes of a digest, signed, and never another medium.
    signed = guess.encodings["map"] and guess.hashes["signed"]
    return 30 if signed and set(guess.media) <= {"GPU"} else 0


TRTLLM = WireFormat(
    title="TensorRT-LLM",
    reader=TrtllmReader,
    writer=lambda integers, groups: TrtllmWriter(groups),
    streamed=False,
    look=look,
    likeness=_likeness,
    rules=StreamRules(
        lower_tiers_in_chunks=True,
        made_from_hashes=True,
        partial_blocks=True,
        ranks_share_a_topic=True,
        removals_incomplete=True,
        cautions=(
            "Its V1 manager announces a reclaimed block, not those below it: hashes of these stay in any mirror for ever.",
            "Adapters aren't named in its dicts, so requests with adapters can't be matched.",
        ),
    ),
)
