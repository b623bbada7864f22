"""Wire formats: how one engine writes its events, in one place each. ``WIRES`` finds them by name.

A format is a ``WireFormat``: it reads payloads, writes them if anything but its engine does, recognises its engine by what
payloads look like, and says what is normal in its streams. ``vllm``, ``sglang`` and ``trtllm`` beside this file are examples
to start from; ``docs/reference/events.md`` shows one from outside the package.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.events.types import EventBatch, GroupMeta
from kvyard.events.wire.decoded import Decoded, DecodeStats
from kvyard.registry import Registry

_OURS = {
    "vllm": "kvyard.events.wire.vllm:VLLM",
    "vllm-array": "kvyard.events.wire.vllm:VLLM_ARRAY",
    "sglang": "kvyard.events.wire.sglang:SGLANG",
    "trtllm": "kvyard.events.wire.trtllm:TRTLLM",
    "kvyard": "kvyard.events.wire.vllm:KVYARD",
}
WIRES: "Registry[WireFormat]" = Registry("wire format", "kvyard.wires", _OURS)
"""Every format that can be read, by name."""
UNKNOWN = "unknown"
"""Stands for the engine of a stream that no format recognises."""


def reading_order(dialect: str) -> list[str]:
    """Return the formats to try for a payload: ``dialect``, then those from outside the package, then ours.

    Raises ``KvyardError`` for an unknown one; "auto" is no preference.
    """
    names = WIRES.names()
    if dialect != "auto":
        WIRES.get(dialect)
    outside = [name for name in names if name not in _OURS]
    return list(dict.fromkeys([*([] if dialect == "auto" else [dialect]), *outside, *_OURS]))


def dialects() -> list[str]:
    """Return the values that a reader's ``dialect`` may have."""
    return ["auto", *WIRES.names()]


def written_dialects() -> list[str]:
    """Return the formats that can be written."""
    return [name for name in WIRES.names() if WIRES.get(name).writer is not None]


class PayloadReader(Protocol):
    """Reads the payloads of one stream; it may remember what it has read."""

    def read(self, payload: object, stats: DecodeStats) -> Decoded | None:
        """Decode ``payload``: bytes, or the value that a JSON or msgpack decoder returned. ``None`` if it isn't of this
        format.

        An event that can't be used is a problem in the result. What msgspec raises costs the whole payload.
        """


class PayloadWriter(Protocol):
    """Writes the payloads of one stream; it may remember what it has written."""

    def encode(self, batch: EventBatch) -> bytes:
        """Return ``batch`` as one payload."""


class StreamRules(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine's healthy streams. A check reports everything else as a fault."""

    repeated_stores: str = ""
    """Why a block may be stored where a copy was announced already."""
    eviction_leaves_children: bool = False
    """Parents may be evicted before what follows them."""
    lower_tiers_in_chunks: bool = False
    """Below the device, blocks may be announced before their parents."""
    finer_entries: bool = False
    """Entries for the beginning of a block may hang on parents that aren't announced."""
    offload_forgets: bool = False
    """Below the device, removals may name what wasn't announced."""
    empty_stores: str = ""
    """Why a store may name no block."""
    made_from_hashes: bool = False
    """Stores may have no tokens."""
    partial_blocks: bool = False
    """Blocks that aren't full may be announced."""
    sizes_vary: bool = False
    """A group may have blocks of several sizes."""
    single_removals: bool = False
    """Every removal is an event of its own."""
    ranks_share_a_topic: bool = False
    removals_incomplete: bool = False
    """Blocks may be gone without a removal, so that more is announced than there is."""
    arrays_are_old: bool = False
    """Newer versions write maps in place of arrays."""
    cautions: tuple[str, ...] = ()
    """Properties that no check of the stream can see."""


class WireFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's format."""

    title: str
    """The engine's name, for people."""
    reader: Callable[[bool, int | None], PayloadReader]
    """Makes a reader for (narrow, block size): see ``Decoder``."""
    writer: Callable[[bool, Sequence[GroupMeta]], PayloadWriter] | None = None
    """Makes a writer for (integers, groups): see ``Encoder``. ``None``: it is only read."""
    streamed: bool = True
    """True if it goes over ZeroMQ; false if it is fetched."""
    look: "Callable[[Any, EngineGuess], bool] | None" = None
    """Notes what a decoded payload looks like; returns whether it was of this format."""
    likeness: "Callable[[EngineGuess], int]" = lambda guess: 0
    """Similarity of a stream to this engine's, from 0, none, to 100."""
    rules: StreamRules = StreamRules()


class EngineGuess(msgspec.Struct):
    """Features of a stream's raw payloads, and the engine that writes them.

    Decoding makes all engines look alike, which is its purpose. Here the differences are of interest. Payloads are read
    loosely and nothing is judged.
    """

    encodings: Counter[str] = msgspec.field(default_factory=Counter)
    """Events as ``map``, ``array``, ``wrapped`` or ``trtllm``, or as another format calls its own."""
    hashes: Counter[str] = msgspec.field(default_factory=Counter)
    """Hashes as ``unsigned``, ``signed``, ``digest`` or ``hex``."""
    media: Counter[str] = msgspec.field(default_factory=Counter)
    fields: list[str] = msgspec.field(default_factory=list)
    """Optional fields of vLLM's events that were set."""
    batch_lengths: Counter[int] = msgspec.field(default_factory=Counter)

    def look(self, payload: bytes) -> None:
        """Take in a payload; an unreadable one is ignored."""
        value: Any = payload
        try:
            if payload[:1] in (b"[", b"{"):
                value = msgspec.json.decode(payload)
            else:
                value = msgspec.msgpack.decode(payload)
        except (ValueError, *DECODE_ERRORS):
            pass  # it may be a format that is neither
        for name in reading_order("auto"):
            look = WIRES.get(name).look
            if look is not None and look(value, self):
                return

    def note_hashes(self, hashes: object) -> None:
        """Note how hashes are written; anything but a list of them is ignored."""
        for key in hashes if isinstance(hashes, list) else ():
            if isinstance(key, int):
                self.hashes["signed" if key < 0 else "unsigned"] += 1
            elif isinstance(key, bytes):
                self.hashes["digest"] += 1
            elif isinstance(key, str):
                self.hashes["hex"] += 1

    def engine(self) -> str:
        """Return the format that is most like this, or ``UNKNOWN``."""
        likeness = {name: WIRES.get(name).likeness(self) for name in WIRES.names()}
        best = max(likeness, key=lambda name: likeness[name])
        return best if likeness[best] > 0 else UNKNOWN
