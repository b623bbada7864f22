"""The archive: what a publisher keeps of what it sent, and the answers it gives from it.

The last batches answer for short gaps, the mirror for everything else, and a digest over all payloads tells a reader in
eight bytes whether it has read what was sent. Nothing here opens a socket: an answer is an iterator of messages, so a slow
reader's can be handed out piece by piece, and it stays the answer as of the moment it was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.mirror import Mirror, restates
from kvyard.events.transport.frames import (
    HEAD_WORD,
    SEQUENCE_BYTES,
    SNAPSHOT_WORD,
    StreamHead,
    batch_reply,
    chained,
    end_reply,
    fingerprint,
    head_reply,
    part_reply,
)
from kvyard.events.types import Event, EventBatch, Stored
from kvyard.events.wire import Encoder

PART_BLOCKS = 4096
"""Blocks after which a snapshot goes on in another message."""


class ArchiveCounters(msgspec.Struct):
    """What was asked for."""

    replays: int = 0
    replayed_batches: int = 0
    heads: int = 0
    snapshots: int = 0
    snapshot_blocks: int = 0
    unknown_requests: int = 0


class Archive:
    """The recent past of one stream and its present map. Used by one thread."""

    def __init__(
        self,
        *,
        topic: bytes | None = b"",
        rank: int | None = None,
        epoch: int = 0,
        batches: int = 10_000,
        snapshots: bool = True,
        integers: bool = False,
        plain: bool = False,
    ) -> None:
        """Keep the last ``batches`` for replay and, with ``snapshots``, a mirror. ``topic`` is ``None`` until it is known.

        ``integers`` writes digests in snapshots as 64-bit integers, for a stream that does the same. ``plain`` answers as
        vLLM's publisher does, which knows neither heads nor snapshots. Raises ``KvyardError`` for a negative number.
        """
        if batches < 0:
            raise KvyardError(f"a replay buffer holds 0 batches or more, not {batches}")
        self.topic = topic
        self.rank = rank
        """Of the batches of a snapshot."""
        self.epoch = epoch
        self.last = -1
        """The last sequence that was kept."""
        self.counters = ArchiveCounters()
        self.mirror: Mirror | None = Mirror() if snapshots and not plain else None
        self._plain = plain
        self._digest = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=batches)
        self._encoder = Encoder(integers=integers)

    def keep(self, seq: int, payload: bytes, events: Sequence[Event]) -> None:
        """Remember that ``payload``, which says ``events``, was sent as ``seq``."""
        self._ring.append((seq, payload))
        self.last = seq
        self._digest = chained(0 if restates(events) else self._digest, fingerprint(payload))
        if self.mirror is not None:
            self.mirror.apply(events)

    def restart(self, epoch: int) -> None:
        """Forget everything and be another publisher, which starts again at sequence 0."""
        self.epoch = epoch
        self.last = -1
        self._digest = 0
        self._ring.clear()
        if self.mirror is not None:
            self.mirror.clear()

    @property
    def first(self) -> int | None:
        """The oldest sequence that can be replayed."""
        return self._ring[0][0] if self._ring else None

    def head(self) -> StreamHead:
        """Where the stream is now."""
        return StreamHead(epoch=self.epoch, seq=self.last, digest=self._digest, first=self.first)

    def answer(self, word: bytes) -> Iterator[list[bytes]]:
        """The messages that answer ``word``, each without the asker's address; the last is always the end marker."""
        if not self._plain and word == HEAD_WORD:
            self.counters.heads += 1
            return iter([head_reply(self.topic, word, self.head()), end_reply()])
        if not self._plain and word == SNAPSHOT_WORD:
            return self._snapshot()
        if len(word) != SEQUENCE_BYTES:
            self.counters.unknown_requests += 1
        # As in vLLM a word is a number, whatever its length; one beyond the last sequence gets the end marker alone.
        start = int.from_bytes(word, "big")
        batches = [entry for entry in self._ring if entry[0] >= start]
        self.counters.replays += 1
        self.counters.replayed_batches += len(batches)
        return self._replay(batches)

    def _replay(self, batches: list[tuple[int, bytes]]) -> Iterator[list[bytes]]:
        topic = self.topic
        for seq, payload in batches:
            yield batch_reply(topic, seq, payload)
        yield end_reply()

    def _snapshot(self) -> Iterator[list[bytes]]:
        if self.mirror is None:
            return iter([end_reply()])
        parts = list(_portions(self.mirror.events()))
        blocks = self.mirror.blocks
        self.counters.snapshots += 1
        self.counters.snapshot_blocks += blocks
        head = msgspec.structs.replace(self.head(), parts=len(parts), blocks=blocks)
        return self._parts(head, parts)

    def _parts(self, head: StreamHead, parts: list[list[Event]]) -> Iterator[list[bytes]]:
        topic, encode = self.topic, self._encoder.encode
        yield head_reply(topic, SNAPSHOT_WORD, head)
        for events in parts:
            # Encoded only when it is this part's turn: a large map must not hold up the stream.
            yield part_reply(topic, encode(EventBatch(stream="", seq=head.seq, events=events, rank=self.rank)))
        yield end_reply()


def _portions(events: Iterable[Event]) -> Iterator[list[Event]]:
    portion: list[Event] = []
    blocks = 0
    for event in events:
        portion.append(event)
        blocks += len(event.hashes) if isinstance(event, Stored) else 0
        if blocks >= PART_BLOCKS:
            yield portion
            portion, blocks = [], 0
    if portion:
        yield portion
