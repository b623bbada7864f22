"""Payloads of vLLM and SGLang in, events out: maps or arrays, as msgpack or as objects.

Almost every payload is exactly what its engine always sends, and those are read whole, by types, in C. When that fails the
payload is taken apart and its events are read one by one, so that a bad one costs itself and not its batch. What a value
means, and which values are refused, is the same for every encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Raw

from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.events.wire.decoded import (
    BATCH,
    GROUP,
    HASH,
    JSON_STARTS,
    MALFORMED,
    MAX_COUNT,
    MEDIUM,
    UNKNOWN,
    UNREADABLE,
    Decoded,
    DecodeStats,
    EventRefused,
    Problem,
    no_events,
    read_stamp,
)
from kvyard.events.wire.keys import BadHash, read_hash, read_hashes
from kvyard.events.wire.media import tier_of
from kvyard.events.wire.vllm.shapes import (
    KNOWN,
    AnyEvent,
    ArrayCleared,
    ArrayEvent,
    ArrayRemoved,
    ArrayStored,
    Extras,
    LooseArrayEvent,
    LooseMapEvent,
    MapCleared,
    MapEvent,
    MapRemoved,
    MapStored,
    Pair,
    VllmBatch,
)
from kvyard.hashing import Key

MAP, ARRAY = "map", "array"
_Decoders: TypeAlias = dict[str, msgspec.msgpack.Decoder[Any]]

_WHOLE: _Decoders = {
    MAP: msgspec.msgpack.Decoder(VllmBatch[MapEvent]),
    ARRAY: msgspec.msgpack.Decoder(VllmBatch[ArrayEvent]),
}
_STRICT: _Decoders = {MAP: msgspec.msgpack.Decoder(MapEvent), ARRAY: msgspec.msgpack.Decoder(ArrayEvent)}
_LOOSE_TYPES: dict[str, Any] = {MAP: LooseMapEvent, ARRAY: LooseArrayEvent}
_LOOSE: _Decoders = {shape: msgspec.msgpack.Decoder(kind) for shape, kind in _LOOSE_TYPES.items()}
_RAW_LIST: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_RAW_MAP: msgspec.msgpack.Decoder[dict[str, Raw]] = msgspec.msgpack.Decoder(dict[str, Raw])
_ANY: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class VllmReader:
    """Reads the payloads of one stream."""

    def __init__(self, narrow: bool, expected: str) -> None:
        """``expected`` is the shape to try first, ``MAP`` or ``ARRAY``."""
        self._narrow = narrow
        self._expected = expected

    def read(self, payload: object, stats: DecodeStats) -> Decoded | None:
        if not isinstance(payload, bytes):
            return self._read_batch(payload, stats)
        if payload[0] in JSON_STARTS:
            decoded = self._read_batch(msgspec.json.decode(payload), stats)
            stats.slow_payloads += decoded is not None
            return decoded
        for shape in (self._expected, ARRAY if self._expected == MAP else MAP):
            try:
                batch = _WHOLE[shape].decode(payload)
            except UNREADABLE:
                continue
            if batch.rank is None or 0 <= batch.rank < MAX_COUNT:
                self._expected = shape
                return self._read_whole(batch, shape)
        return self._read_parts(payload, stats)

    def _read_whole(self, batch: VllmBatch[AnyEvent], shape: str) -> Decoded:
        events: list[Event] = []
        problems: list[Problem] = []
        narrow = self._narrow
        for index, event in enumerate(batch.events):
            try:
                events.append(read_event(event, narrow))
            except EventRefused as refusal:
                problems.append(Problem(index, refusal.reason, refusal.kind))
        ts, bad = read_stamp(batch.ts)
        if bad:
            problems.append(bad)
        return Decoded(ts=ts, rank=batch.rank, events=events, problems=problems, dialect=shape if events else "none")

    def _read_parts(self, payload: bytes, stats: DecodeStats) -> Decoded | None:
        """Take a payload apart that isn't what it should be, and read what can be read."""
        if _shape_of(payload) == MAP:
            named = _RAW_MAP.decode(payload)
            if "data" in named:
                return None
            parts = [named.get("ts"), named.get("events"), named.get("data_parallel_rank")]
        else:
            parts = list(_RAW_LIST.decode(payload))
            if parts and _shape_of(bytes(parts[0])) == MAP:  # type: ignore[arg-type]
                return None
        stats.slow_payloads += 1
        if len(parts) < 2 or parts[1] is None:
            return no_events("a batch without events")
        rank = parts[2] if len(parts) > 2 else None
        return self._collect(_open(parts[0]), _RAW_LIST.decode(parts[1]), _open(rank), self._read_raw, stats)

    def _read_raw(self, raw: Any, seen: set[str], stats: DecodeStats) -> Event:
        data = bytes(raw)
        shape = _shape_of(data)
        if shape == "bin":
            # llm-d's connectors wrap each event once more.
            data = _ANY.decode(data)
            shape = _shape_of(data)
        if shape not in _STRICT:
            raise EventRefused(MALFORMED, f"an event that is a {shape}")
        seen.add(shape)
        try:
            return read_event(_STRICT[shape].decode(data), self._narrow)
        except UNREADABLE as error:
            if isinstance(error, EventRefused):
                raise
        _check_tag(_tag(data, shape), stats)
        return read_event(_LOOSE[shape].decode(data), self._narrow, loose=True)

    def _read_batch(self, payload: object, stats: DecodeStats) -> Decoded | None:
        """Read what was decoded already."""
        if isinstance(payload, Mapping):
            if "data" in payload:
                return None
            payload = [payload.get("ts"), payload.get("events"), payload.get("data_parallel_rank")]
        if not isinstance(payload, list | tuple) or len(payload) < 2 or not isinstance(payload[1], list | tuple):
            return None
        if any(isinstance(item, Mapping) for item in payload):
            return None
        rank = payload[2] if len(payload) > 2 else None
        return self._collect(payload[0], payload[1], rank, self._read_object, stats)

    def _read_object(self, item: Any, seen: set[str], stats: DecodeStats) -> Event:
        if isinstance(item, Mapping):
            shape, tag = MAP, item.get("type")
        elif isinstance(item, list | tuple) and item:
            shape, tag = ARRAY, item[0]
        else:
            raise EventRefused(MALFORMED, f"an event that is a {type(item).__name__}")
        _check_tag(tag, stats)
        seen.add(shape)
        return read_event(msgspec.convert(item, _LOOSE_TYPES[shape]), self._narrow, loose=True)

    def _collect(
        self, ts: Any, items: Any, rank: Any, read: Callable[[Any, set[str], DecodeStats], Event], stats: DecodeStats
    ) -> Decoded:
        events: list[Event] = []
        problems: list[Problem] = []
        seen: set[str] = set()
        for index, item in enumerate(items):
            try:
                events.append(read(item, seen, stats))
            except EventRefused as refusal:
                problems.append(Problem(index, refusal.reason, refusal.kind))
            except UNREADABLE as error:
                problems.append(Problem(index, f"{error}"[:200], MALFORMED))
        stamp, bad = read_stamp(ts)
        if bad:
            problems.append(bad)
        if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_COUNT):
            problems.append(Problem(-1, "a rank that isn't a number", BATCH))
            rank = None
        dialect = "none" if not events else "mixed" if len(seen) > 1 else seen.pop()
        return Decoded(ts=stamp, rank=rank, events=events, problems=problems, dialect=dialect)


def _check_tag(tag: object, stats: DecodeStats) -> None:
    if not isinstance(tag, str):
        raise EventRefused(MALFORMED, "an event without a kind")
    if tag not in KNOWN:
        stats.note_unknown(tag)
        raise EventRefused(UNKNOWN, f"unknown kind {tag[:40]!r}")


def _open(raw: Raw | None) -> object:
    """One small part of a batch; an object that is nothing in particular where it can't be read."""
    try:
        return None if raw is None else _ANY.decode(raw)
    except UNREADABLE:
        return Ellipsis


def _tag(data: bytes, shape: str) -> object:
    """The kind an event says it is."""
    try:
        if shape == MAP:
            return _ANY.decode(_RAW_MAP.decode(data)["type"])
        return _ANY.decode(_RAW_LIST.decode(data)[0])
    except (*UNREADABLE, LookupError):
        return None


def _shape_of(data: object) -> str:
    """What kind of msgpack value ``data`` begins with."""
    if not isinstance(data, bytes) or not data:
        return "nothing"
    head = data[0]
    if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
        return MAP
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        return ARRAY
    return "bin" if 0xC4 <= head <= 0xC6 else "scalar"


_SCALARS = (str, int, float, bytes, type(None))


def read_event(shape: AnyEvent, narrow: bool = False, loose: bool = False) -> Event:
    """The event that ``shape`` says. Raises ``EventRefused``.

    ``narrow`` turns digests into 64-bit integers; ``loose`` says that tokens may be pairs.
    """
    if isinstance(shape, MapStored | ArrayStored):
        return _read_stored(shape, narrow, loose)
    if isinstance(shape, MapRemoved):
        return Removed(
            hashes=_hashes(shape.block_hashes, narrow),
            group=_count(shape.group_idx, GROUP, "group"),
            tier=_tier(shape.medium),
            reason=shape.reason,
            locality=shape.locality,
            ownership=shape.ownership,
        )
    if isinstance(shape, ArrayRemoved):
        return Removed(
            hashes=_hashes(shape.block_hashes, narrow),
            group=_count(shape.group_idx, GROUP, "group"),
            tier=_tier(shape.medium),
        )
    assert isinstance(shape, MapCleared | ArrayCleared)
    # A medium we can't read must not keep anything alive that may be gone.
    medium = shape.medium
    return Cleared(tier=tier_of(medium) if isinstance(medium, str) else None)


def _read_stored(
    shape: MapStored[int] | MapStored[Pair] | ArrayStored[int] | ArrayStored[Pair], narrow: bool, loose: bool
) -> Stored:
    hashes = _hashes(shape.block_hashes, narrow)
    parent: Key | None = shape.parent_block_hash
    if parent is not None:
        try:
            parent = read_hash(parent, narrow)
        except BadHash as error:
            raise EventRefused(HASH, f"parent: {error}") from None
    block_size = _count(shape.block_size, MALFORMED, "block size") or 0
    tokens = _tokens(shape.token_ids, loose) or None
    if tokens is None and not block_size and parent == 0:
        # A placeholder: the producer names blocks that it announced elsewhere. Some write "no parent" as 0 in these.
        parent = None
    name = shape.lora_name
    lora_name = name if isinstance(name, str) else None
    extras = None if shape.extra_keys is None else read_extras(shape.extra_keys)
    salt = None if extras is None or parent is not None else salt_of(extras, lora_name)
    # Arrays went out of use before these fields came.
    said = (shape.locality, shape.ownership, shape.session_id) if isinstance(shape, MapStored) else (None, None, None)
    return Stored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size=block_size,
        group=_count(shape.group_idx, GROUP, "group"),
        tier=_tier(shape.medium),
        lora_name=lora_name,
        lora_id=shape.lora_id,
        extra_keys=extras,
        kind=shape.kv_cache_spec_kind,
        window=_count(shape.kv_cache_spec_sliding_window, MALFORMED, "window"),
        salt=salt,
        locality=said[0],
        ownership=said[1],
        session_id=said[2],
    )


def read_extras(keys: Extras) -> Extras | None:
    """Extra keys as nested tuples; ``None`` where no block has any. Raises ``EventRefused`` for anything but vLLM's forms."""
    if not any(keys):
        return None
    return [None if not key else tuple(_extra(item, at) for item in key) for at, key in enumerate(keys)]


def _extra(item: object, at: int) -> object:
    if isinstance(item, _SCALARS):
        return item
    if isinstance(item, list | tuple) and all(isinstance(part, _SCALARS) for part in item):
        return tuple(item)
    raise EventRefused(MALFORMED, f"extra key of block {at} is neither a plain value nor a list of them")


def salt_of(extras: Extras, lora_name: str | None) -> str | None:
    """The salt among the extra keys of a chain's first block: the one bare text that isn't the adapter's name.

    The wire doesn't tag extra keys. Two bare texts can't be told apart, and then there is no saying.
    """
    first = extras[0] if extras else None
    if not first:
        return None
    if lora_name is not None and first[0] == lora_name:
        first = first[1:]
    texts = [item for item in first if isinstance(item, str)]
    return texts[0] if len(texts) == 1 else None


def _hashes(hashes: list[Key], narrow: bool) -> list[Key]:
    try:
        return read_hashes(hashes, narrow)
    except BadHash as error:
        raise EventRefused(HASH, str(error)) from None


def _tokens(tokens: Sequence[int] | Sequence[Pair], loose: bool) -> list[int]:
    if loose:
        # Under EAGLE SGLang sends (this token, the next one); the first of each is the text.
        return [pair if isinstance(pair, int) else pair[0] for pair in tokens]
    return cast("list[int]", tokens)


def _tier(medium: str | None) -> Tier:
    tier = tier_of(medium)
    if tier is None:
        raise EventRefused(MEDIUM, f"unknown medium {cast('str', medium)[:40]!r}")
    return tier


def _count(value: int | None, kind: str, what: str) -> int | None:
    if value is None:
        return None
    if not 0 <= value < MAX_COUNT:
        raise EventRefused(kind, f"{what} {value} is out of range")
    return value
