"""Files behind HiCache's host memory, one for each page, and the threads that query, read and write them.

The threads are SGLang's: queries, reads and writes are carried out one after the other, each kind by itself. A query takes the
time of a link's first byte; a read or a write also that of its pages, up to ``BATCH`` of them at a time. A prefetch that was
given up before its turn takes no time.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from kvyard.blocks import Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.table import BlockTable
from kvyard.clock import SECOND
from kvyard.hashing import Key, Keys
from kvyard.integers import ceil_div
from kvyard.tiers.config import TierConfig

BATCH = 128
"""Pages that are read at a time: SGLang's ``STORAGE_BATCH_SIZE``."""
EVICTION_RATIO = 0.9
"""Share of their limit that files are evicted down to: ``eviction_ratio`` of SGLang's file backend."""


class Prefetch:
    """Pages of a waiting request on their way from storage to the host."""

    def __init__(self, request: Request, keys: Keys, start: int, stop: int, *, known: bool) -> None:
        """``known``: storage is known to have all of them, so it isn't asked."""
        self.request = request
        self.keys = keys
        self.start = start
        self.stop = stop
        """End of the pages that are asked for."""
        self.known = known
        self.found = 0
        """Pages that storage has, or as many of them as the host has room for."""
        self.read = 0
        """Pages that have been read, as far as the scheduler knows."""
        self.own: Extent | None = None
        """The host's pages that it reads into, as long as they belong to it."""
        self.anchor: BlockTable | None = None
        """The host's node that it continues, which isn't evicted."""
        self.ended_at: int | None = None
        """Time at which it was cancelled or cut short."""
        self.expired = False
        """True if it was cut short since it took too long."""

    def end(self, now: int) -> None:
        """Give it up, or cut it short."""
        if self.ended_at is None:
            self.ended_at = now

    def ended_by(self, instant: int) -> bool:
        return self.ended_at is not None and self.ended_at <= instant


class PageFiles:
    """Pages in files, the least recently read or written ones first, and what is asked of them."""

    def __init__(self, config: TierConfig, block_bytes: int) -> None:
        self.pages: OrderedDict[Key, None] = OrderedDict()
        self.limit = config.capacity(block_bytes)
        self._least = int(self.limit * block_bytes * EVICTION_RATIO) // block_bytes
        self._outward, self._inward = config.link.lanes
        self.page_bytes = block_bytes
        self._queries: deque[tuple[int, Prefetch]] = deque()
        self._reads: deque[tuple[int, Prefetch]] = deque()
        self._writes: deque[tuple[int, Sequence[Key], BlockTable]] = deque()
        self._reading: tuple[Prefetch, int, int, bool] | None = None
        """The prefetch being read: where its next batch begins, pages that were read, and true if none was missing."""
        self._queries_until = self._reads_until = self._writes_until = 0
        # What the scheduler takes when it next looks.
        self.answered: list[Prefetch] = []
        self.progress: list[tuple[Prefetch, int]] = []
        """Prefetches with the pages that were read of each; -1 for one that is over."""
        self.written: list[BlockTable] = []

    def query(self, now: int, prefetch: Prefetch) -> None:
        """Find out how many of the pages of ``prefetch`` there are."""
        self._queries.append((now, prefetch))

    def read(self, now: int, prefetch: Prefetch) -> None:
        """Read the pages that were found."""
        self._reads.append((now, prefetch))

    def write(self, now: int, keys: Sequence[Key], held: BlockTable) -> None:
        """Write pages of the host, which are ``held`` until they are written."""
        self._writes.append((now, keys, held))

    def reads(self) -> list[Prefetch]:
        """Return prefetches whose reads are not over."""
        reading = [self._reading[0]] if self._reading is not None else []
        return [prefetch for _, prefetch in self._reads] + reading

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_end(self) -> int | None:
        """Return when the next query, read or write ends."""
        return min([end for end, _ in self._steps()], default=None)

    def advance(self, now: int) -> None:
        """Carry out what has ended by ``now``."""
        while True:
            end, carry_out = min(self._steps(), key=lambda step: step[0], default=(now + 1, None))
            if end > now or carry_out is None:
                return
            carry_out(end)

    def _steps(self) -> list[tuple[int, Callable[[int], None]]]:
        """Return the ends of what is in flight, and what happens then."""
        steps: list[tuple[int, Callable[[int], None]]] = []
        if self._queries:
            put, prefetch = self._queries[0]
            start = max(put, self._queries_until)
            steps.append((start + (0 if prefetch.ended_by(start) else self._inward.first_byte_ns), self._answer))
        if self._reading is None and self._reads:
            put, prefetch = self._reads.popleft()
            self._reads_until = max(put, self._reads_until)
            self._reading = (prefetch, 0, 0, True)
        if self._reading is not None:
            prefetch, begin, _, whole = self._reading
            start, pages = self._reads_until, min(BATCH, prefetch.found - begin)
            goes_on = whole and not prefetch.ended_by(start)
            steps.append((start + (self._ns(pages, inward=True) if goes_on else 0), self._read))
        if self._writes:
            put, keys, _ = self._writes[0]
            steps.append((max(put, self._writes_until) + self._ns(len(keys), inward=False), self._write))
        return steps

    def _ns(self, pages: int, *, inward: bool) -> int:
        """Return the time that ``pages`` take."""
        lane = self._inward if inward else self._outward
        moving = ceil_div(pages * self.page_bytes * SECOND, lane.bandwidth) if lane.bandwidth is not None else 0
        return lane.first_byte_ns + moving

    def _answer(self, end: int) -> None:
        put, prefetch = self._queries.popleft()
        start, self._queries_until = max(put, self._queries_until), end
        if not prefetch.ended_by(start):
            keys = [prefetch.keys[index] for index in range(prefetch.start, prefetch.stop)]
            missing = (count for count, key in enumerate(keys) if not prefetch.known and key not in self.pages)
            prefetch.found = next(missing, len(keys))
        self.answered.append(prefetch)

    def _read(self, end: int) -> None:
        assert self._reading is not None
        prefetch, begin, read, whole = self._reading
        whole = whole and not prefetch.ended_by(self._reads_until)
        self._reads_until = end
        stop = min(begin + BATCH, prefetch.found)
        for index in range(begin, stop) if whole else ():
            key = prefetch.keys[prefetch.start + index]
            if key not in self.pages:
                whole = False
                break
            self.pages.move_to_end(key)
            read += 1
        self.progress.append((prefetch, read))
        self._reading = (prefetch, begin + BATCH, read, whole)
        if stop == prefetch.found:
            self.progress.append((prefetch, -1))
            self._reading = None

    def _write(self, end: int) -> None:
        _, keys, held = self._writes.popleft()
        self._writes_until = end
        for key in keys:
            if key in self.pages:
                self.pages.move_to_end(key)
                continue
            if len(self.pages) >= self.limit:
                while len(self.pages) + 1 > self._least and self.pages:
                    self.pages.popitem(last=False)
            self.pages[key] = None
        self.written.append(held)
