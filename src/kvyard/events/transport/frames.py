"""Frames: the parts of a message, for live batches, replay and our own additions to it.

A live message is ``[topic, sequence, payload]``, the sequence 8 bytes, big endian. A request to a replay socket is
``[empty, word]``. Eight bytes ask for all batches from that sequence on, and the answer is ``[empty, topic, sequence,
payload]`` each (``[empty, sequence, payload]`` from SGLang and older vLLM), then an end marker with sequence 2^64 - 1.

Two longer words are ours. vLLM reads any word as a number; these are numbers that no sequence reaches, so it answers with
the end marker alone, which shows at once that nothing more follows. Payloads aren't decoded here.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import xxhash

from kvyard.decode_errors import DECODE_ERRORS

SEQUENCE_BYTES = 8
END_SEQUENCE = b"\xff" * SEQUENCE_BYTES
MAX_SEQUENCE = (1 << 63) - 1
TOPIC_BYTES = 1024
"""Of the longest topic; each is remembered."""

HEAD_WORD = b"kvyard.head/1"
"""Request for the publisher's position and a digest of everything sent so far."""
SNAPSHOT_WORD = b"kvyard.snapshot/1"
"""Request for everything the publisher holds."""
PART_WORD = b"kvyard.part/1"
"""Marks the batches of a snapshot."""


class Frame(msgspec.Struct, frozen=True):
    """One published batch, as bytes."""

    topic: bytes
    seq: int
    payload: bytes

    def parts(self) -> list[bytes]:
        """Return the frames of the live message."""
        return [self.topic, self.seq.to_bytes(SEQUENCE_BYTES, "big"), self.payload]


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """Publisher's description of itself, a msgpack map."""

    epoch: int
    """Differs between any two starts of publishers."""
    seq: int
    """The last sequence sent, -1 if there was none."""
    digest: int
    """Speaks for all payloads sent since everything was last cleared (``chained``)."""
    first: int | None = None
    """The oldest sequence that replay still has."""
    parts: int = 0
    """Batches of a snapshot that follow."""
    blocks: int = 0


class ReplyKind(IntEnum):
    """Kind of a message on the replay socket."""

    BATCH = 1
    HEAD = 2
    PART = 3
    END = 4


class Reply(msgspec.Struct, frozen=True):
    """One answer of a replay socket. ``topic`` is ``None`` where the publisher doesn't send it."""

    kind: ReplyKind
    topic: bytes | None = None
    seq: int = -1
    payload: bytes = b""
    head: StreamHead | None = None


_read_head = msgspec.msgpack.Decoder(StreamHead).decode
write_head = msgspec.msgpack.Encoder().encode


def read_live(parts: Sequence[bytes]) -> Frame | str:
    """Return the batch in a live message, or what is wrong with it."""
    if len(parts) != 3:
        return f"a message of {len(parts)} frames instead of 3"
    topic, sequence, payload = parts
    if len(topic) > TOPIC_BYTES:
        return f"a topic of {len(topic)} bytes"
    seq = _sequence(sequence)
    return Frame(topic, seq, payload) if isinstance(seq, int) else seq


def read_reply(parts: Sequence[bytes]) -> Reply | str:
    """Return the answer in a message of a replay socket, or what is wrong with it."""
    if len(parts) not in (3, 4) or parts[0]:
        return f"a reply of {len(parts)} frames"
    topic = parts[1] if len(parts) == 4 else None
    if topic is not None and len(topic) > TOPIC_BYTES:
        return f"a topic of {len(topic)} bytes"
    word, payload = parts[-2:]
    if word == END_SEQUENCE:
        return Reply(ReplyKind.END)
    if word == PART_WORD:
        return Reply(ReplyKind.PART, topic, payload=payload)
    if word in (HEAD_WORD, SNAPSHOT_WORD):
        try:
            return Reply(ReplyKind.HEAD, topic, head=_read_head(payload))
        except DECODE_ERRORS as error:
            return f"a head that can't be read: {error}"
    seq = _sequence(word)
    return Reply(ReplyKind.BATCH, topic, seq, payload) if isinstance(seq, int) else seq


def request(word: bytes | int) -> list[bytes]:
    """Return the message that asks for batches from a sequence on, or sends one of our words."""
    return [b"", word.to_bytes(SEQUENCE_BYTES, "big") if isinstance(word, int) else word]


def reply_parts(topic: bytes | None, word: bytes | int, payload: bytes) -> list[bytes]:
    """Return an answer: to one of our words, a part of a snapshot, or a replayed batch as vLLM sends it, by its sequence;
    without a topic, as SGLang does.
    """
    encoded = word.to_bytes(SEQUENCE_BYTES, "big") if isinstance(word, int) else word
    return [b"", encoded, payload] if topic is None else [b"", topic, encoded, payload]


def end_reply() -> list[bytes]:
    """Return the message that ends the answer to any request."""
    return [b"", b"", END_SEQUENCE, b""]


def fingerprint(payload: bytes) -> int:
    """Return 64-bit digest of a payload. Not against malice: who can forge a payload can send one."""
    return xxhash.xxh3_64_intdigest(payload)


def chained(digest: int, print_: int) -> int:
    """Return the digest after one more payload, by its fingerprint: equal on both sides if nothing was lost or damaged."""
    return xxhash.xxh3_64_intdigest(print_.to_bytes(8, "big"), digest)


def _sequence(frame: bytes) -> int | str:
    if len(frame) != SEQUENCE_BYTES:
        return f"a sequence of {len(frame)} bytes instead of {SEQUENCE_BYTES}"
    seq = int.from_bytes(frame, "big")
    return seq if seq <= MAX_SEQUENCE else f"sequence {seq} is out of range"
