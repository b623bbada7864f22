"""A link between two workers, over which one sends blocks of its device's pool to the other's.

A transfer is like any other: its source is pinned and its destination reserved until it lands (I6), and it shares the link's
bandwidth with all others (I7). Who sends what, and when, is for the caller to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvyard.blocks.extent import Extent
from kvyard.blocks.pool import Pool
from kvyard.tiers.copies import Copy, CopyQueue
from kvyard.tiers.links import Direction, Link
from kvyard.tiers.pages import PageRange
from kvyard.tiers.store import enter_pages


class WorkerLink(CopyQueue):
    """Copies between the pools of two workers, in both directions. Here a page is a block."""

    def __init__(self, ends: tuple[str, str], pools: tuple[Pool, Pool], link: Link) -> None:
        super().__init__(ends, link)
        self.pools = pools
        self.inboxes: dict[str, deque[Copy]] = {name: deque() for name in ends}
        """By receiving worker, what has landed: its blocks are cached there and may be evicted like any others."""

    def send(self, now: int, sender: str, piece: PageRange, extents: Iterable[Extent], block_bytes: int) -> Copy | None:
        """Send the blocks of ``piece``, which are among the sender's ``extents``; ``None`` if the receiver has no room now.

        The sender is the client of the transfer, for links that limit what a client may use.
        """
        out = sender == self.ends[0]
        source, target = self.pools if out else self.pools[::-1]
        count = piece.stop - piece.start
        if count > target.free:
            return None
        sent = source.hold(source.cut(extents, piece.start, piece.stop))
        received = target.hold_new(count, piece.start)
        near, far = (sent, received) if out else (received, sent)
        direction = Direction.OUT if out else Direction.IN
        inbox = self.inboxes[self.ends[1] if out else self.ends[0]]
        copy = Copy(0, direction, sender, inbox, [piece], [near], [far])
        copy.blocks, copy.nbytes = count, count * block_bytes
        self.submit(now, copy)
        return copy

    def landed(self, copy: Copy) -> None:
        """The receiver has the blocks cached, and the sender may evict its own."""
        target, received = (1, copy.far) if copy.direction == Direction.OUT else (0, copy.near)
        for piece, held in zip(copy.pieces, received):
            enter_pages(self.pools[target], piece, held)
        self._let_go(copy)
        copy.inbox.append(copy)

    def cancel_all(self, now: int) -> None:
        """Give up everything under way, at a time that is not before the last: both ends let go, and nothing lands."""
        self.advance(now)
        for transfer, copy in self.under_way.items():
            self.link.cancel(now, transfer)
            self._let_go(copy)
        self.under_way.clear()

    def _let_go(self, copy: Copy) -> None:
        for pool, tables in zip(self.pools, (copy.near, copy.far)):
            for held in tables:
                pool.let_go(held)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless everything under way holds both its ends (I6) and the link keeps I7."""
        for transfer, copy in self.under_way.items():
            for name, pool, tables in zip(self.ends, self.pools, (copy.near, copy.far)):
                assert all(held in pool.holds for held in tables), f"I6: {transfer} has let go of its blocks at {name}"
        self.link.check_integrity()
