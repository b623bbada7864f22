"""The decoder: bytes off any engine's wire in, events and problems out, and never an exception.

Almost every payload is exactly what its engine always sends, and those are read whole, by types, in C. When that fails the
payload is taken apart and its events are read one by one, so that a bad one costs itself and not its batch. What a value
means is in ``reading``; TensorRT-LLM's dicts are in ``trtllm_reading``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from kvyard.errors import KvyardError
from kvyard.events.types import Event
from kvyard.events.wire.decoded import BATCH, MALFORMED, PAYLOAD, UNKNOWN, Decoded, DecodeStats, Problem, Refused
from kvyard.events.wire.reading import MAX_COUNT, read_event
from kvyard.events.wire.shapes import KNOWN, AnyEvent, ArrayEvent, Batch, LooseArrayEvent, LooseMapEvent, MapEvent
from kvyard.events.wire.trtllm_reading import DRAIN, TrtllmReader

DIALECTS = ("auto", "vllm", "sglang", "trtllm")
MAX_BYTES = 128 << 20

_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, MemoryError, OverflowError, ValueError, TypeError)
"""What msgspec raises for bytes that are no message."""

_MAP, _ARRAY = "map", "array"
_Decoders: TypeAlias = dict[str, msgspec.msgpack.Decoder[Any]]

_WHOLE: _Decoders = {
    _MAP: msgspec.msgpack.Decoder(Batch[MapEvent]),
    _ARRAY: msgspec.msgpack.Decoder(Batch[ArrayEvent]),
}
_STRICT: _Decoders = {_MAP: msgspec.msgpack.Decoder(MapEvent), _ARRAY: msgspec.msgpack.Decoder(ArrayEvent)}
_LOOSE_TYPES: dict[str, Any] = {_MAP: LooseMapEvent, _ARRAY: LooseArrayEvent}
_LOOSE: _Decoders = {shape: msgspec.msgpack.Decoder(kind) for shape, kind in _LOOSE_TYPES.items()}
_RAW_LIST: msgspec.msgpack.Decoder[list[Raw]] = msgspec.msgpack.Decoder(list[Raw])
_RAW_MAP: msgspec.msgpack.Decoder[dict[str, Raw]] = msgspec.msgpack.Decoder(dict[str, Raw])
_ANY: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class Decoder:
    """Reads the payloads of one stream and keeps count. Not for several threads at once."""

    def __init__(
        self,
        dialect: str = "auto",
        *,
        narrow: bool = False,
        block_size: int | None = None,
        max_bytes: int = MAX_BYTES,
        keep_bytes: int = 64 << 10,
    ) -> None:
        """``dialect`` says whose stream it is; "auto" finds out per payload.

        ``narrow`` turns digests into the 64-bit integers vLLM would have sent. ``block_size`` is the tokens per block of a
        TensorRT-LLM stream, which doesn't say; left out, it is learned. Raises ``KvyardError`` for an unknown dialect.
        """
        if dialect not in DIALECTS:
            raise KvyardError(f"unknown dialect {dialect!r}: choose one of {', '.join(DIALECTS)}")
        self.dialect = dialect
        self.stats = DecodeStats()
        self._narrow = narrow
        self._max_bytes = max_bytes
        self._keep_bytes = keep_bytes
        self._expected = _ARRAY if dialect == "sglang" else _MAP
        self._trtllm = TrtllmReader(narrow, block_size)

    def decode(self, payload: object) -> Decoded:
        """Read ``payload``: bytes, or what a JSON or msgpack decoder made of them. Never raises for any payload."""
        if isinstance(payload, bytearray | memoryview):
            payload = bytes(payload)
        try:
            decoded = self._decode_bytes(payload) if isinstance(payload, bytes) else self._decode_object(payload)
        except _UNREADABLE as error:
            decoded = _failed(f"{type(error).__name__}: {error}"[:200])
        except Exception as error:
            # Nothing is known to get here. A consumer must outlive a bug in here all the same.
            decoded = _failed(f"unexpected {type(error).__name__}: {error}"[:200])
        self.stats.note(decoded, payload, self._keep_bytes)
        return decoded

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _decode_bytes(self, payload: bytes) -> Decoded:
        if len(payload) > self._max_bytes:
            return _failed(f"{len(payload)} bytes are more than the limit of {self._max_bytes}")
        if not payload:
            return _failed("empty payload")
        if payload[0] in b"[{ \t\r\n":
            # As msgpack these would be a lone number, so this is JSON.
            return self._decode_json(payload)
        for shape in (self._expected, _ARRAY if self._expected == _MAP else _MAP):
            try:
                batch = _WHOLE[shape].decode(payload)
            except _UNREADABLE:
                continue
            if batch.rank is None or 0 <= batch.rank < MAX_COUNT:
                self._expected = shape
                return self._read_whole(batch, shape)
        return self._decode_parts(payload)

    def _read_whole(self, batch: Batch[AnyEvent], shape: str) -> Decoded:
        events: list[Event] = []
        problems: list[Problem] = []
        narrow = self._narrow
        for index, event in enumerate(batch.events):
            try:
                events.append(read_event(event, narrow))
            except Refused as refusal:
                problems.append(Problem(index, refusal.reason, refusal.kind))
        ts, bad = _stamp(batch.ts)
        if bad:
            problems.append(bad)
        return Decoded(ts=ts, rank=batch.rank, events=events, problems=problems, dialect=shape if events else "none")

    def _decode_parts(self, payload: bytes) -> Decoded:
        """Take a payload apart that isn't what it should be, and read what can be read."""
        self.stats.slow_payloads += 1
        if _shape_of(payload) == _MAP:
            named = _RAW_MAP.decode(payload)
            if "data" in named:
                return self._decode_object(_ANY.decode(payload))
            parts = [named.get("ts"), named.get("events"), named.get("data_parallel_rank")]
        else:
            parts = list(_RAW_LIST.decode(payload))
            if parts and _shape_of(bytes(parts[0])) == _MAP:  # type: ignore[arg-type]
                return self._decode_object(_ANY.decode(payload))
        if len(parts) < 2 or parts[1] is None:
            return _failed("a batch without events")
        rank = parts[2] if len(parts) > 2 else None
        return self._collect(_open(parts[0]), _RAW_LIST.decode(parts[1]), _open(rank), self._read_raw)

    def _read_raw(self, raw: Any, seen: set[str]) -> Event:
        data = bytes(raw)
        shape = _shape_of(data)
        if shape == "bin":
            # llm-d's connectors wrap each event once more.
            data = _ANY.decode(data)
            shape = _shape_of(data)
        if shape not in _STRICT:
            raise Refused(MALFORMED, f"an event that is a {shape}")
        seen.add(shape)
        try:
            return read_event(_STRICT[shape].decode(data), self._narrow)
        except _UNREADABLE as error:
            if isinstance(error, Refused):
                raise
        self._check_tag(_tag(data, shape))
        return read_event(_LOOSE[shape].decode(data), self._narrow, loose=True)

    # -- objects ----------------------------------------------------------------------------------------------------

    def _decode_json(self, payload: bytes) -> Decoded:
        try:
            return self._trtllm.read(DRAIN.decode(payload), self.stats)
        except _UNREADABLE:
            self.stats.slow_payloads += 1
        return self._decode_object(msgspec.json.decode(payload))

    def _decode_object(self, payload: object) -> Decoded:
        """Read what was decoded already: TensorRT-LLM's dicts, or a batch in either shape."""
        if isinstance(payload, Mapping):
            if "data" in payload:
                return self._trtllm.read([payload], self.stats)
            payload = [payload.get("ts"), payload.get("events"), payload.get("data_parallel_rank")]
        if not isinstance(payload, list | tuple):
            return _failed(f"a payload that is a {type(payload).__name__}")
        if not payload or any(isinstance(item, Mapping) for item in payload):
            return self._trtllm.read(payload, self.stats)
        if len(payload) < 2 or not isinstance(payload[1], list | tuple):
            return _failed("neither a batch [time, events, …] nor a list of TensorRT-LLM events")
        return self._collect(payload[0], payload[1], payload[2] if len(payload) > 2 else None, self._read_object)

    def _read_object(self, item: Any, seen: set[str]) -> Event:
        if isinstance(item, Mapping):
            shape, tag = _MAP, item.get("type")
        elif isinstance(item, list | tuple) and item:
            shape, tag = _ARRAY, item[0]
        else:
            raise Refused(MALFORMED, f"an event that is a {type(item).__name__}")
        self._check_tag(tag)
        seen.add(shape)
        return read_event(msgspec.convert(item, _LOOSE_TYPES[shape]), self._narrow, loose=True)

    # -- common -----------------------------------------------------------------------------------------------------

    def _collect(self, ts: Any, items: Any, rank: Any, read: Callable[[Any, set[str]], Event]) -> Decoded:
        events: list[Event] = []
        problems: list[Problem] = []
        seen: set[str] = set()
        for index, item in enumerate(items):
            try:
                events.append(read(item, seen))
            except Refused as refusal:
                problems.append(Problem(index, refusal.reason, refusal.kind))
            except _UNREADABLE as error:
                problems.append(Problem(index, f"{error}"[:200], MALFORMED))
        stamp, bad = _stamp(ts)
        if bad:
            problems.append(bad)
        if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_COUNT):
            problems.append(Problem(-1, "a rank that isn't a number", BATCH))
            rank = None
        dialect = "none" if not events else "mixed" if len(seen) > 1 else seen.pop()
        return Decoded(ts=stamp, rank=rank, events=events, problems=problems, dialect=dialect)

    def _check_tag(self, tag: object) -> None:
        if not isinstance(tag, str):
            raise Refused(MALFORMED, "an event without a kind")
        if tag not in KNOWN:
            self.stats.note_unknown(tag)
            raise Refused(UNKNOWN, f"unknown kind {tag[:40]!r}")


def decode(payload: object, *, dialect: str = "auto") -> Decoded:
    """Read one payload by itself; for a stream keep a ``Decoder``. Never raises but for an unknown ``dialect``."""
    return Decoder(dialect).decode(payload)


def _failed(reason: str) -> Decoded:
    return Decoded(problems=[Problem(-1, reason, PAYLOAD)])


def _stamp(ts: object) -> tuple[float, Problem | None]:
    if _is_number(ts) and abs(ts) < 1e300:  # type: ignore[arg-type]
        return float(ts), None  # type: ignore[arg-type]
    return 0.0, Problem(-1, "a time stamp that isn't a number", BATCH)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _open(raw: Raw | None) -> object:
    """One small part of a batch; an object that is nothing in particular where it can't be read."""
    try:
        return None if raw is None else _ANY.decode(raw)
    except _UNREADABLE:
        return Ellipsis


def _tag(data: bytes, shape: str) -> object:
    """The kind an event says it is."""
    try:
        if shape == _MAP:
            return _ANY.decode(_RAW_MAP.decode(data)["type"])
        return _ANY.decode(_RAW_LIST.decode(data)[0])
    except (*_UNREADABLE, LookupError):
        return None


def _shape_of(data: object) -> str:
    """What kind of msgpack value ``data`` begins with."""
    if not isinstance(data, bytes) or not data:
        return "nothing"
    head = data[0]
    if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
        return _MAP
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        return _ARRAY
    return "bin" if 0xC4 <= head <= 0xC6 else "scalar"
