"""A publisher's archive of its past."""

from __future__ import annotations

from kvyard.events.transport.outlet import Archive
from kvyard.events.types import Cleared, Removed, Tier


def test_a_batch_that_says_everything_again_begins_the_digest_again() -> None:
    """A reader that came with it has read all that counts, and must arrive at the same digest as one that read all."""
    old, new, other = (Archive(topic=b"", rank=0, epoch=1, batches=10) for _ in range(3))
    old.keep(0, b"first", [Removed(hashes=[1])])
    for archive in (old, new):
        archive.keep(1, b"all again", [Cleared(), Removed(hashes=[2])])
        archive.keep(2, b"more", [Removed(hashes=[3])])
    assert old.head().digest == new.head().digest
    # A clear of one tier leaves the others as they were.
    other.keep(0, b"first", [Removed(hashes=[1])])
    other.keep(1, b"all again", [Cleared(tier=Tier.G1)])
    other.keep(2, b"more", [Removed(hashes=[3])])
    assert other.head().digest != new.head().digest
