"""Where a reader is in a stream: the last batch it applied, fingerprints of those before, and batches that came too early.

Only bookkeeping. What to do about a gap is decided in ``recovery``.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvyard.events.transport.frames import chained
from kvyard.events.transport.state import Origin
from kvyard.events.wire import Decoded


class ReceivedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was received and decoded."""

    seq: int
    print: int
    """The payload's fingerprint."""
    decoded: Decoded
    origin: Origin
    order: int
    """Counts arrivals."""
    size: int
    restates: bool
    """Whether it makes all before it irrelevant."""


class StreamPosition:
    """The last applied batch and the ones around it."""

    def __init__(self, remembered: int) -> None:
        self.applied = -1
        """The last sequence that was applied."""
        self.digest = 0
        """As the publisher's, where everything up to there was applied."""
        self.held: dict[int, ReceivedBatch] = {}
        """What came too early, by sequence."""
        self.held_bytes = 0
        self.anchor: int | None = None
        """The last batch before the connection broke, until the publisher has shown that it knows it."""
        self._remembered = remembered
        self._prints: OrderedDict[int, int] = OrderedDict()

    def print_of(self, seq: int) -> int | None:
        """The fingerprint of an applied batch, while it is remembered."""
        return self._prints.get(seq)

    def passed_over(self, seq: int) -> bool:
        """Whether ``seq`` was left out although batches before and after it were applied."""
        return seq not in self._prints and seq > next(iter(self._prints), self.applied)

    @property
    def witness(self) -> int | None:
        """A batch that identifies the publisher: another publisher has other bytes there. ``None``: none is remembered."""
        if self.anchor is not None and self.anchor in self._prints:
            return self.anchor
        return self.applied if self.applied in self._prints else None

    def advance(self, batch: ReceivedBatch) -> None:
        """``batch`` was applied; it may be further on than the next one."""
        self.applied = batch.seq
        self.digest = chained(0 if batch.restates else self.digest, batch.print)
        prints = self._prints
        prints.pop(batch.seq, None)
        prints[batch.seq] = batch.print
        if len(prints) > self._remembered:
            prints.popitem(last=False)

    def move(self, applied: int, digest: int) -> None:
        """Continue after ``applied``, as after a snapshot or a restart; fingerprints of what was before are dropped."""
        self.applied, self.digest = applied, digest
        self.anchor = None
        self._prints.clear()

    def hold(self, batch: ReceivedBatch) -> None:
        self.release(batch.seq)
        self.held[batch.seq] = batch
        self.held_bytes += batch.size

    def release(self, seq: int) -> ReceivedBatch | None:
        batch = self.held.pop(seq, None)
        if batch is not None:
            self.held_bytes -= batch.size
        return batch

    def next(self) -> ReceivedBatch | None:
        """Release the next batch if it is held and could be read in full."""
        batch = self.held.get(self.applied + 1)
        return None if batch is None or batch.decoded.lossy else self.release(batch.seq)

    def drop_covered(self) -> None:
        """Drop held batches that were applied by other ways: they must not be applied again, after what came later."""
        for seq in [seq for seq in self.held if seq <= self.applied]:
            self.release(seq)

    def drop_impossible(self, last: int, order: int) -> int:
        """Drop what had arrived by ``order`` although the publisher had only got to ``last`` after that; returns how many.

        Such a batch has a damaged number, or is from before a restart.
        """
        wrong = [seq for seq, batch in self.held.items() if seq > last and batch.order <= order]
        for seq in wrong:
            self.release(seq)
        return len(wrong)

    def drop_all(self) -> None:
        self.held.clear()
        self.held_bytes = 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if something is held that should not be: for tests."""
        assert self.held_bytes == sum(batch.size for batch in self.held.values()), "held bytes are miscounted"
        assert all(seq > self.applied for seq in self.held), "something is held that was applied"
        assert len(self._prints) <= self._remembered, "too many fingerprints are remembered"
