"""vLLM's wire: msgpack batches of maps with names (0.24 and later; also newer SGLang and TensorRT-LLM's streaming sink) or of
positional arrays with the tag in front (up to 0.23, and SGLang). Ours is the same, with a reason for removals.

Almost every payload is exactly what its engine always sends, and those are read whole, by types, in C. When that fails the
payload is taken apart and its events are read one by one, so that a bad one costs itself and not its batch. Maps are written
byte for byte as vLLM's own encoder does; what it has no field for goes along under a name that others skip.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.events.packed import PackedEvents
from kvyard.events.types import Cleared, Event, EventBatch, Removed, Stored, Tier
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
    read_stamp,
)
from kvyard.events.wire.format import EngineGuess, StreamRules, WireFormat
from kvyard.events.wire.keys import BadHash, read_hash, read_hashes, write_hash, write_hashes
from kvyard.events.wire.media import NAMES, tier_of
from kvyard.hashing import Key

T = TypeVar("T")
"""A token id; or, asked only where that fails, also the pair of ids that SGLang sends under EAGLE."""

Lora = TypeVar("Lora")
Hash: TypeAlias = int | bytes
Extras: TypeAlias = list[tuple[Any, ...] | None]
Pair: TypeAlias = int | tuple[int, int]

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
KNOWN = frozenset((STORED, REMOVED, CLEARED))


# -- shapes: field order is the wire's; what is read may lack every field that can be done without ---------------------


class StoredShape(Struct, Generic[T, Lora], tag=STORED, kw_only=True, gc=False):
    """Fields that maps and arrays share."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[T]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: Lora | None = None
    extra_keys: Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class ArrayStored(StoredShape[T, str | dict[str, Any]], array_like=True, kw_only=True, gc=False):
    """A positional array, read. SGLang puts a map of metadata in place of the adapter's name."""


class MapStored(StoredShape[T, str], kw_only=True, gc=False):
    """A map with names, read."""

    parent_block_hash: Hash | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class WrittenStored(MapStored[int], kw_only=True, omit_defaults=True, gc=False):
    """A map with names, written: vLLM refuses one without the first seven, null or not."""

    parent_block_hash: Hash | None
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class MapRemoved(Struct, tag=REMOVED, kw_only=True, omit_defaults=True, gc=False):
    """Read and written; what we write always has a medium."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    reason: str | None = None
    """Ours; others skip it."""


class MapCleared(Struct, tag=CLEARED, kw_only=True, omit_defaults=True, gc=False):
    """Read and written. No engine gives it a payload, and whatever comes along must not spoil it."""

    medium: Any = None
    """Ours; others skip it and clear everything."""


class ArrayRemoved(Struct, tag=REMOVED, array_like=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class ArrayCleared(Struct, tag=CLEARED, array_like=True, gc=False):
    medium: Any = None


class VllmBatch(Struct, Generic[T], array_like=True, gc=False):
    """Any batch: two elements are enough, more are skipped."""

    ts: float
    events: list[T]
    rank: int | None = None


MapEvent: TypeAlias = MapStored[int] | MapRemoved | MapCleared
ArrayEvent: TypeAlias = ArrayStored[int] | ArrayRemoved | ArrayCleared
LooseMapEvent: TypeAlias = MapStored[Pair] | MapRemoved | MapCleared
LooseArrayEvent: TypeAlias = ArrayStored[Pair] | ArrayRemoved | ArrayCleared
AnyEvent: TypeAlias = MapEvent | ArrayEvent | LooseMapEvent | LooseArrayEvent


# -- reading -----------------------------------------------------------------------------------------------------------


MAP, ARRAY = "map", "array"
ReadEvent: TypeAlias = Callable[[Any, set[str], DecodeStats], Event]
_Decoders: TypeAlias = dict[str, msgspec.msgpack.Decoder[Any]]

_WHOLE: _Decoders = {
    MAP: msgspec.msgpack.Decoder(VllmBatch[MapEvent]),
    ARRAY: msgspec.msgpack.Decoder(VllmBatch[ArrayEvent]),
}
_STRICT: _Decoders = {MAP: msgspec.msgpack.Decoder(MapEvent), ARRAY: msgspec.msgpack.Decoder(ArrayEvent)}
_LOOSE_TYPES: dict[str, Any] = {MAP: LooseMapEvent, ARRAY: LooseArrayEvent}
_LOOSE: _Decoders = {shape: msgspec.msgpack.Decoder(kind) for shape, kind in _LOOSE_TYPES.items()}
_RAW_LIST: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_RAW_EVENTS: msgspec.msgpack.Decoder[tuple[Raw, ...]] = msgspec.msgpack.Decoder(tuple[Raw, ...])
"""A tuple: a search for garbage looks through it once, and through a list again and again."""
_RAW_MAP: msgspec.msgpack.Decoder[dict[str, Raw]] = msgspec.msgpack.Decoder(dict[str, Raw])
_ANY: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


MOST_FIELDS = 64
"""Elements of a batch or fields of an event; those that are known are far fewer."""
SMALL = 64
"""Bytes up to which a stamp or a rank is read."""


class VllmReader:
    """Reads the payloads of one stream."""

    def __init__(self, narrow: bool, expected: str) -> None:
        """``expected`` is the shape to try first, ``MAP`` or ``ARRAY``."""
        self._narrow = narrow
        self._expected = expected

    def read(self, payload: object, stats: DecodeStats) -> Decoded | None:
        if not isinstance(payload, bytes):
            return self._read_batch(payload, stats)
        large = len(payload) > LARGE
        if payload[0] in JSON_STARTS:
            if large:
                return None
            decoded = self._read_batch(msgspec.json.decode(payload), stats)
            stats.slow_payloads += decoded is not None
            return decoded
        if large:  # event by event: a reader in a thread of its own lets others have their turn
            return self._read_parts(payload, stats, slow=False)
        for shape in (self._expected, ARRAY if self._expected == MAP else MAP):
            try:
                batch = _WHOLE[shape].decode(payload)
            except UNREADABLE:
                continue
            if batch.rank is None or 0 <= batch.rank < MAX_COUNT:
                self._expected = shape
                return self._collect(batch.ts, batch.events, batch.rank, self._read_shape, stats, shape)
        return self._read_parts(payload, stats)

    def _read_shape(self, event: AnyEvent, seen: set[str], stats: DecodeStats) -> Event:
        return read_event(event, self._narrow)

    def _read_parts(self, payload: bytes, stats: DecodeStats, slow: bool = True) -> Decoded | None:
        """Take a payload apart that is large, or isn't what it should be, and read what can be read, event by event."""
        if _length(payload) > MOST_FIELDS:
            return None
        if _shape_of(payload) == MAP:
            named = _RAW_MAP.decode(payload)
            if "data" in named:
                return None
            parts = [named.get("ts"), named.get("events"), named.get("data_parallel_rank")]
        else:
            parts = list(_RAW_LIST.decode(payload))
            if parts and _shape_of(bytes(parts[0])) == MAP:  # type: ignore[arg-type]
                return None
        stats.slow_payloads += slow
        if len(parts) < 2 or parts[1] is None:
            return no_events("a batch without events")
        if _length(parts[1]) > MOST_EVENTS:
            return no_events(f"a batch of more than {MOST_EVENTS} events")
        rank = parts[2] if len(parts) > 2 else None
        large = len(payload) > LARGE
        return self._collect(_open(parts[0]), _each(parts[1]), _open(rank), self._read_raw, stats, packed=large)

    def _read_raw(self, data: Any, seen: set[str], stats: DecodeStats) -> Event:
        shape = _shape_of(data)
        if shape == "bin":
            # llm-d's connectors wrap each event once more.
            data = _ANY.decode(data)
            shape = _shape_of(data)
        if shape not in _STRICT:
            raise EventRefused(ProblemKind.MALFORMED, f"an event that is a {shape}")
        if _length(data) > MOST_FIELDS:
            raise EventRefused(ProblemKind.MALFORMED, f"an event of more than {MOST_FIELDS} fields")
        seen.add(shape)
        try:
            return read_event(_STRICT[shape].decode(data), self._narrow)
        except UNREADABLE as error:
            if isinstance(error, EventRefused):
                raise
        stats.check_kind(_tag(data, shape), KNOWN)
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
            raise EventRefused(ProblemKind.MALFORMED, f"an event that is a {type(item).__name__}")
        stats.check_kind(tag, KNOWN)
        seen.add(shape)
        return read_event(msgspec.convert(item, _LOOSE_TYPES[shape]), self._narrow, loose=True)

    def _collect(
        self,
        ts: Any,
        items: Iterable[Any],
        rank: Any,
        read: ReadEvent,
        stats: DecodeStats,
        *shapes: str,
        packed: bool = False,
    ) -> Decoded:
        """Decode each of ``items`` by ``read``, which adds to ``shapes``, the shapes that events are known to have."""
        events: list[Event] | PackedEvents = PackedEvents() if packed else []
        problems = Problems()
        seen = set(shapes)
        for index, item in enumerate(items):
            try:
                events.append(read(item, seen, stats))
            except UNREADABLE as error:
                if not problems.add(_problem(index, error)):
                    return no_events(f"more than {problems.losses - 1} events that can't be read")
        stamp, bad = read_stamp(ts)
        if bad:
            problems.add(bad)
        if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_COUNT):
            problems.add(Problem(-1, "a rank that isn't a number", ProblemKind.BATCH))
            rank = None
        dialect = "none" if not events else "mixed" if len(seen) > 1 else seen.pop()
        return Decoded(ts=stamp, rank=rank, events=events, problems=problems.kept, dialect=dialect)


def _each(listed: Raw) -> Iterator[bytes]:
    """Yield the elements of a list as bytes. Only their sizes are kept: as many objects as there are elements would lie
    between those that the process makes meanwhile (see ``packed``).
    """
    elements = _RAW_EVENTS.decode(listed)
    sizes = array("I", map(len, map(memoryview, elements)))  # type: ignore[arg-type]
    data = b"".join(elements)
    del elements
    low = 0
    for size in sizes:
        yield data[low : low + size]
        low += size


def _problem(index: int, error: BaseException) -> Problem:
    if isinstance(error, EventRefused):
        return Problem(index, error.reason, error.kind)
    return Problem(index, f"{error}"[:200], ProblemKind.MALFORMED)


def _open(raw: Raw | None) -> object:
    """Return one small part of a batch; an object that is nothing in particular if it can't be read."""
    try:
        return None if raw is None else _ANY.decode(raw) if len(memoryview(raw)) <= SMALL else Ellipsis
    except UNREADABLE:
        return Ellipsis


def _tag(data: bytes, shape: str) -> object:
    """Return the kind of an event by its tag."""
    try:
        if shape == MAP:
            return _ANY.decode(_RAW_MAP.decode(data)["type"])
        return _ANY.decode(_RAW_LIST.decode(data)[0])
    except (*UNREADABLE, LookupError):
        return None


def _shape_of(data: object) -> str:
    """Return the kind of msgpack value that ``data`` begins with."""
    if not isinstance(data, bytes) or not data:
        return "nothing"
    head = data[0]
    if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
        return MAP
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        return ARRAY
    return "bin" if 0xC4 <= head <= 0xC6 else "scalar"


def _length(data: "bytes | Raw") -> int:
    """Return the number of elements in the header of a msgpack list or map; 0 for anything else."""
    head = bytes(memoryview(data)[:5])
    if not head:
        return 0
    if 0x80 <= head[0] <= 0x9F:
        return head[0] & 0x0F
    if head[0] in (0xDC, 0xDE):
        return int.from_bytes(head[1:3], "big")
    return int.from_bytes(head[1:], "big") if head[0] in (0xDD, 0xDF) else 0


_SCALARS = (str, int, float, bytes, type(None))


def read_event(shape: AnyEvent, narrow: bool = False, loose: bool = False) -> Event:
    """Return the event in ``shape``. Raises ``EventRefused``.

    ``narrow`` turns digests into 64-bit integers; ``loose`` says that tokens may be pairs.
    """
    if isinstance(shape, MapStored | ArrayStored):
        return _read_stored(shape, narrow, loose)
    if isinstance(shape, MapRemoved):
        return Removed(
            hashes=read_hashes(shape.block_hashes, narrow),
            group=_count(shape.group_idx, ProblemKind.GROUP, "group"),
            tier=_tier(shape.medium),
            reason=shape.reason,
            locality=shape.locality,
            ownership=shape.ownership,
        )
    if isinstance(shape, ArrayRemoved):
        return Removed(
            hashes=read_hashes(shape.block_hashes, narrow),
            group=_count(shape.group_idx, ProblemKind.GROUP, "group"),
            tier=_tier(shape.medium),
        )
    assert isinstance(shape, MapCleared | ArrayCleared)
    # A medium we can't read must not keep anything alive that may be gone.
    medium = shape.medium
    return Cleared(tier=tier_of(medium) if isinstance(medium, str) else None)


def _read_stored(
    shape: MapStored[int] | MapStored[Pair] | ArrayStored[int] | ArrayStored[Pair], narrow: bool, loose: bool
) -> Stored:
    hashes = read_hashes(shape.block_hashes, narrow)
    parent: Key | None = shape.parent_block_hash
    if parent is not None:
        try:
            parent = read_hash(parent, narrow)
        except BadHash as error:
            raise BadHash(f"parent: {error}") from None
    block_size = _count(shape.block_size, ProblemKind.MALFORMED, "block size") or 0
    tokens = _tokens(shape.token_ids, loose) or None
    if tokens is None and not block_size and parent == 0:
        # A placeholder: the producer names blocks that it announced elsewhere. Some write "no parent" as 0 in these.
        parent = None
    name = shape.lora_name
    lora_name = name if isinstance(name, str) else None
    extras = None if shape.extra_keys is None else read_extras(shape.extra_keys)
    salt = None if extras is None or parent is not None else salt_of(extras, lora_name)
    # Arrays went out of use before these fields came.
    optional = (
        (shape.locality, shape.ownership, shape.session_id) if isinstance(shape, MapStored) else (None, None, None)
    )
    return Stored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size=block_size,
        group=_count(shape.group_idx, ProblemKind.GROUP, "group"),
        tier=_tier(shape.medium),
        lora_name=lora_name,
        lora_id=shape.lora_id,
        extra_keys=extras,
        kind=shape.kv_cache_spec_kind,
        window=_count(shape.kv_cache_spec_sliding_window, ProblemKind.MALFORMED, "window"),
        salt=salt,
        locality=optional[0],
        ownership=optional[1],
        session_id=optional[2],
    )


def read_extras(keys: Extras) -> Extras | None:
    """Return extra keys as nested tuples; ``None`` where no block has any. Raises ``EventRefused`` for anything but vLLM's
    forms.
    """
    if not any(keys):
        return None
    return [None if not key else tuple(_extra(item, block) for item in key) for block, key in enumerate(keys)]


def _extra(item: object, block: int) -> object:
    if isinstance(item, _SCALARS):
        return item
    if isinstance(item, list | tuple) and all(isinstance(part, _SCALARS) for part in item):
        return tuple(item)
    raise EventRefused(ProblemKind.MALFORMED, f"extra key of block {block} is neither a plain value nor a list of them")


def salt_of(extras: Extras, lora_name: str | None) -> str | None:
    """Return the salt among the extra keys of a chain's first block: the one bare text that isn't the adapter's name.

    The wire doesn't tag extra keys. With two bare texts the salt can't be identified.
    """
    first = extras[0] if extras else None
    if not first:
        return None
    if lora_name is not None and first[0] == lora_name:
        first = first[1:]
    texts = [item for item in first if isinstance(item, str)]
    return texts[0] if len(texts) == 1 else None


def _tokens(tokens: Sequence[int] | Sequence[Pair], loose: bool) -> list[int]:
    if loose:
        # Under EAGLE SGLang sends (this token, the next one); the first of each is the text.
        return [pair if isinstance(pair, int) else pair[0] for pair in tokens]
    return cast("list[int]", tokens)


def _tier(medium: str | None) -> Tier:
    tier = tier_of(medium)
    if tier is None:
        raise EventRefused(ProblemKind.MEDIUM, f"unknown medium {cast('str', medium)[:40]!r}")
    return tier


def _count(value: int | None, kind: ProblemKind, what: str) -> int | None:
    if value is None:
        return None
    if not 0 <= value < MAX_COUNT:
        raise EventRefused(kind, f"{what} {value} is out of range")
    return value


# -- writing -----------------------------------------------------------------------------------------------------------


_pack = msgspec.msgpack.Encoder().encode


class VllmWriter:
    """Writes batches; remembers nothing."""

    def __init__(self, integers: bool, arrays: bool = False) -> None:
        """``integers`` writes digests as vLLM does by default, as their last 64 bits; without it they go out whole."""
        self._integers = integers
        self._shape = self._array_shape if arrays else self._map_shape

    def encode(self, batch: EventBatch) -> bytes:
        return _pack(VllmBatch(batch.ts, [self._shape(event) for event in batch.events], batch.rank))

    def _map_shape(self, event: Any) -> Any:
        if isinstance(event, Stored):
            return WrittenStored(
                block_hashes=write_hashes(event.hashes, self._integers),
                parent_block_hash=write_hash(event.parent, self._integers),
                token_ids=list(event.tokens or ()),
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=NAMES[event.tier],
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
                group_idx=event.group,
                kv_cache_spec_kind=event.kind,
                kv_cache_spec_sliding_window=event.window,
                locality=event.locality,
                ownership=event.ownership,
                session_id=event.session_id,
            )
        if isinstance(event, Removed):
            return MapRemoved(
                block_hashes=write_hashes(event.hashes, self._integers),
                medium=NAMES[event.tier],
                group_idx=event.group,
                locality=event.locality,
                ownership=event.ownership,
                reason=event.reason,
            )
        return MapCleared(medium=None if event.tier is None else NAMES[event.tier])

    def _array_shape(self, event: Any) -> Any:
        """Arrays have the first fields of maps, in the same order; a clear has its medium only where it names one."""
        if isinstance(event, Stored):
            return (
                STORED,
                write_hashes(event.hashes, self._integers),
                write_hash(event.parent, self._integers),
                list(event.tokens or ()),
                event.block_size,
                event.lora_id,
                NAMES[event.tier],
                event.lora_name,
                event.extra_keys,
                event.group,
                event.kind,
                event.window,
            )
        if isinstance(event, Removed):
            return (REMOVED, write_hashes(event.hashes, self._integers), NAMES[event.tier], event.group)
        return (CLEARED,) if event.tier is None else (CLEARED, NAMES[event.tier])


# -- the formats -------------------------------------------------------------------------------------------------------


_OPTIONAL = ("group_idx", "kv_cache_spec_kind", "locality", "ownership", "session_id", "reason")


def look(payload: Any, guess: EngineGuess) -> bool:
    """Note what a batch of maps or arrays looks like."""
    if isinstance(payload, Mapping):
        payload = [payload.get("ts"), payload.get("events"), *([payload] if "data" in payload else [])]
    if not isinstance(payload, list) or any(isinstance(item, Mapping) and "data" in item for item in payload):
        return False
    guess.batch_lengths[len(payload)] += 1
    if len(payload) > 1 and isinstance(payload[1], list):
        for event in payload[1]:
            _look_at_event(event, guess)
    return True


def _look_at_event(event: Any, guess: EngineGuess) -> None:
    if isinstance(event, bytes):
        guess.encodings["wrapped"] += 1
        try:
            event = msgspec.msgpack.decode(event)
        except (ValueError, *DECODE_ERRORS):
            return
    if isinstance(event, Mapping):
        guess.encodings["map"] += 1
        named = [name for name in _OPTIONAL if event.get(name) is not None]
        hashes, medium = event.get("block_hashes"), event.get("medium")
    elif isinstance(event, list) and event:
        guess.encodings["array"] += 1
        stored = event[0] == "BlockStored"
        place = 6 if stored else 2
        hashes, medium = (event[1] if len(event) > 1 else None), (event[place] if len(event) > place else None)
        named = ["group_idx"] if stored and len(event) > 9 and event[9] is not None else []
    else:
        return
    guess.fields += [name for name in named if name not in guess.fields]
    if isinstance(medium, str):
        guess.media[medium[:40]] += 1
    guess.note_hashes(hashes)


def _likeness(guess: EngineGuess) -> int:
    if {"group_idx", "kv_cache_spec_kind", "locality"} & set(guess.fields):
        return 70
    if guess.encodings["array"]:
        return 0 if guess.hashes["signed"] else 50
    return 20 if guess.encodings["map"] else 0


RULES = StreamRules(
    repeated_stores="vLLM announces every copy: a block cached twice is stored twice and gone after two removals.",
    eviction_leaves_children=True,
    lower_tiers_in_chunks=True,
    finer_entries=True,
    offload_forgets=True,
    empty_stores="vLLM sends them when all blocks of a run are masked",
    sizes_vary=True,
    single_removals=True,
    arrays_are_old=True,
    cautions=(
        "A clear speaks of the GPU pool only, though it doesn't say so: copies in host memory may still be there.",
        "With adapters the hash covers the adapter's path, which isn't sent: such hashes can't be computed elsewhere.",
    ),
)

VLLM = WireFormat(
    title="vLLM",
    reader=lambda narrow, block_size: VllmReader(narrow, MAP),
    writer=lambda integers, groups: VllmWriter(integers),
    look=look,
    likeness=_likeness,
    rules=RULES,
)
VLLM_ARRAY = WireFormat(
    title="vLLM",
    reader=lambda narrow, block_size: VllmReader(narrow, MAP),
    writer=lambda integers, groups: VllmWriter(integers, arrays=True),
    rules=RULES,
)
KVYARD = WireFormat(
    title="kvyard",
    reader=lambda narrow, block_size: VllmReader(narrow, MAP),
    writer=lambda integers, groups: VllmWriter(integers),
    likeness=lambda guess: 90 if "reason" in guess.fields else 0,
    rules=StreamRules(made_from_hashes=True),
)
