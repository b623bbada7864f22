"""Where a reader is in a stream."""

from __future__ import annotations

from kvyard.events.transport.frames import fingerprint
from kvyard.events.transport.outlet import Archive
from kvyard.events.transport.position import ReceivedBatch, StreamPosition
from kvyard.events.transport.state import Origin
from kvyard.events.types import Cleared, Event, Removed
from kvyard.events.wire.decoded import no_events


def test_its_digest_is_the_publishers_also_where_a_batch_says_everything_again() -> None:
    archive, position = Archive(topic=b"", rank=0, epoch=1, batches=10), StreamPosition(remembered=10)
    sent: list[tuple[bytes, list[Event]]] = [
        (b"first", [Removed(hashes=[1])]),
        (b"all again", [Cleared(), Removed(hashes=[2])]),
        (b"more", [Removed(hashes=[3])]),
    ]
    for seq, (payload, events) in enumerate(sent):
        archive.keep(seq, payload, events)
        batch = ReceivedBatch(
            seq=seq,
            print=fingerprint(payload),
            decoded=no_events(""),
            origin=Origin.LIVE,
            order=seq,
            size=len(payload),
            restates=seq == 1,
        )
        position.advance(batch)
        assert position.digest == archive.head().digest
