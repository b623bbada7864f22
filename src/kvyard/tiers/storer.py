"""Stores: blocks that a request has computed go to the first tier below the device, and from each tier on to the next.

Blocks are offered at the end of a pass. Blocks that the policy wants and the first tier neither has nor is getting become
one *cohort*: it gets room for all of it or waits, without holding up others, until something has landed. Its batches go one
after the other, so a cohort has one transfer in flight at a time. The source stays held until its batch has landed.
"""

from math import ceil
from typing import Final

from kvyard.blocks import Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.rule import ENDLESS
from kvyard.blocks.spans import intersect
from kvyard.blocks.table import BlockTable
from kvyard.blocks.use import Use
from kvyard.tiers.copies import Copy
from kvyard.tiers.links import Direction
from kvyard.tiers.path_chain import whole_chain
from kvyard.tiers.policy import WriteThrough
from kvyard.tiers.state import OffloadState, RequestState
from kvyard.tiers.store import PageRange, total_pages

SPILL_AHEAD: Final = 2.5
"""With ``spill`` ``on_eviction``: copies as large as the latest for whose room a tier copies on what it would evict."""


class Storer:
    """Stores of one worker, into all its tiers."""

    def __init__(self, state: OffloadState, policy: WriteThrough) -> None:
        self.state = state
        self.policy = policy
        self.waiting: dict[Request, None] = {}
        """Requests whose cohort found no room, first come first."""
        self._tried = -1
        """Copies that had landed when one last found none."""
        size = state.config.offload_batch_size
        self._batch_pages = None if size is None else size // state.layout.chunk
        self._closed = False

    def offer(self, request: Request, now: int) -> None:
        """Store what the request has computed since it was last asked, as far as the policy wants it."""
        record = self.state.of(request)
        tokens = self.policy.reach(request)
        if tokens >= record.due and request.tables:
            self._offer(request, record, tokens, now)

    def quiet_until(self, request: Request) -> int:
        """``offer`` does nothing while fewer tokens than this are computed."""
        record = self.state.requests.get(request)
        due = record.due if record is not None else min(self.state.layout.page_tokens)
        limit = self.policy.limit(request)
        return ENDLESS if limit is not None and due > limit else due

    def retry(self, now: int) -> None:
        """Ask again for the cohorts that found no room, if anything has landed since."""
        if not self.waiting or self._tried == self.state.landings:
            return
        waiting, self.waiting = self.waiting, {}
        for request in waiting:
            self.state.requests[request].due = 0
            self.offer(request, now)

    def _offer(self, request: Request, record: RequestState, tokens: int, now: int) -> None:
        layout, store = self.state.layout, self.state.first
        pieces: list[PageRange] = []
        sources: dict[int, list[Extent]] = {}
        done: list[int] = []
        due = ENDLESS
        for group, size in enumerate(layout.page_tokens):
            first, last = record.stored[group], tokens // size
            due = min(due, (last + 1) * size)
            done.append(max(first, last))
            if first >= last:
                continue
            chain = layout.chain(request, group)
            if record.used[group] < last:
                self.policy.used(group, chain, record.used[group], last)
                record.used[group] = last
            missing = store.missing(group, chain.keys, first, last)
            if missing:
                missing = self.policy.choose(group, chain, missing)
            if missing:
                extents = sources[group] = layout.named(request, group, missing[0][0])
                missing = intersect(missing, layout.pages_of(extents))
            pieces += [PageRange(group, chain, low, high) for low, high in missing]
        record.due = due
        if pieces and not self._store(record, sources, pieces, self.state.use_of(request), now):
            # It is offered again, all of it, when something has landed.
            self.waiting[request] = None
            return
        record.stored = done

    def _store(
        self,
        record: RequestState,
        sources: dict[int, list[Extent]],
        pieces: list[PageRange],
        use: Use | None,
        now: int,
    ) -> bool:
        """Send a cohort; returns whether it needs no second try."""
        state = self.state
        if total_pages(pieces) > state.first.num_pages:
            state.counters.refused += 1
            return True
        batches = self.batches(pieces)
        wanted = pieces if len(batches) == 1 else [piece for batch in batches for piece in batch]
        far = state.first.reserve(wanted, use, record.tail)
        if far is None:
            state.counters.tiers[0].no_room += 1
            self._tried = state.landings
            return False
        record.tail = far[-1].extents[-1] if state.layout.num_groups == 1 else None
        hold = state.layout.hold_blocks
        near = [[hold(sources[piece.group], piece) for piece in batch] for batch in batches]
        self.send(0, batches, near, far, now, use=use)
        return True

    def batches(self, pieces: list[PageRange]) -> list[list[PageRange]]:
        """Return ``pieces`` cut into batches of the configured size."""
        size = self._batch_pages
        if size is None:
            return [pieces]
        batches: list[list[PageRange]] = []
        room = 0
        for piece in pieces:
            group, chain, start, stop = piece.group, piece.chain, piece.start, piece.stop
            while start < stop:
                if not room:
                    batches.append([])
                    room = size
                count = min(room, stop - start)
                batches[-1].append(PageRange(group, chain, start, start + count))
                start += count
                room -= count
        return batches

    def send(
        self,
        level: int,
        batches: list[list[PageRange]],
        near: list[list[BlockTable]],
        far: list[BlockTable],
        now: int,
        returns: bool = False,
        use: Use | None = None,
    ) -> None:
        """Make the copies of a cohort into tier ``level`` and submit the first; the others follow one by one."""
        state = self.state
        copies: list[Copy] = []
        start = 0
        store = state.tiers[level].store
        chunk = 1 if level else state.layout.chunk
        if store.keeps_by_priority:
            for source, target in zip([source for sources in near for source in sources], far):
                store.inherit(target, source, chunk)
        for batch, sources in zip(batches, near):
            targets = far if len(batches) == 1 else far[start : start + len(batch)]
            copy = Copy(level, Direction.OUT, state.name, state.inbox, batch, sources, targets)
            copy.returns = returns
            copy.use = use
            copy.arrive = self.arrived
            start += len(batch)
            copies.append(copy)
        first = copies[0]
        first.rest = copies[1:]
        state.send(now, first)

    def arrived(self, copy: Copy) -> None:
        """Send the next batch, and what ``copy``, which lands at this instant, brought on to the next tier."""
        if copy.rest:
            following = copy.rest[0]
            following.rest, copy.rest = copy.rest[1:], []
            self.state.send(copy.ended, following)
        tiers = self.state.tiers
        if copy.level and tiers[copy.level - 1].shared:
            self._release_copy(copy)
        if copy.level + 1 < len(tiers) and not self._closed:
            self._pass_on(copy)

    def landed(self, copy: Copy) -> None:
        """Release the source, unless it is shared and was released as the copy landed."""
        if not (copy.level and self.state.tiers[copy.level - 1].shared):
            self._release_copy(copy)

    def _release_copy(self, copy: Copy) -> None:
        """Release the source of ``copy``: the device, or the tier before."""
        pool = self.state.tiers[copy.level - 1].store.pool if copy.level else self.state.layout.pool
        if copy.returns:
            for held in copy.near:
                pool.holds.cancel(held)
            return
        for held in reversed(copy.near):
            pool.holds.end(held)

    def _pass_on(self, copy: Copy) -> None:
        """Copy on to the next tier what it doesn't have, if it has room: what has landed, whose pages are still held as a
        destination, or with ``spill`` ``on_eviction`` what the tier is likely to evict next.
        """
        state, level = self.state, copy.level + 1
        if state.config.spill == "on_eviction":
            self._spill(copy.level, total_pages(copy.pieces), copy.ended)
            return
        store = state.tiers[level].store
        pieces: list[PageRange] = []
        sources: list[BlockTable] = []
        for piece, held in zip(copy.pieces, copy.far):
            for low, high in store.missing(piece.group, piece.chain.keys, piece.start, piece.stop):
                pieces.append(PageRange(piece.group, piece.chain, low, high))
                sources.append(held)
        if not pieces:
            return
        if total_pages(pieces) > store.num_pages:
            state.counters.refused += 1
            return
        far = store.reserve(pieces, copy.use)
        if far is None:
            state.counters.tiers[level].no_room += 1
            return
        pool = state.tiers[copy.level].store.pool
        near = [pool.holds.pin(pool.cut(list(held), piece.start, piece.stop)) for piece, held in zip(pieces, sources)]
        self.send(level, [pieces], [near], far, copy.ended, use=copy.use)

    def _spill(self, level: int, landed: int, now: int) -> None:
        """Copy to the next tier what it lacks of the pages that tier ``level`` evicts next, for copies of ``landed`` pages."""
        state = self.state
        pool, store = state.tiers[level].store.pool, state.tiers[level + 1].store
        wanted = min(ceil(SPILL_AHEAD * landed) - pool.unnamed, store.num_pages)
        pieces: list[PageRange] = []
        extents: list[Extent] = []
        depth = 0
        for extent in pool.order:
            if depth >= wanted:
                break
            node = extent.node
            first = max(extent.start, extent.stop - (wanted - depth))
            depth += extent.stop - first
            if node is not None and node.copies[0] is extent:
                chain = whole_chain(node)
                for low, high in store.missing(node.group, chain.keys, first, extent.stop):
                    pieces.append(PageRange(node.group, chain, low, high))
                    extents.append(extent)
        if not pieces:
            return
        far = store.reserve(pieces)
        if far is None:
            state.counters.tiers[level + 1].no_room += 1
            return
        near = [pool.holds.pin(pool.cut([extent], piece.start, piece.stop)) for piece, extent in zip(pieces, extents)]
        self.send(level + 1, [pieces], [near], far, now, returns=True)

    def forget(self, request: Request) -> None:
        """Forget a request that ended; what was submitted still lands."""
        self.waiting.pop(request, None)

    def close(self) -> None:
        """Drop batches of a worker that is gone and that were not submitted; nothing goes on to lower tiers."""
        self._closed = True
        self.waiting.clear()
        store, pool = self.state.first, self.state.layout.pool
        for first in self.state.in_flight(0):
            for copy in first.rest:
                for piece, held in zip(copy.pieces, copy.far):
                    store.cancel(piece, held)
                for held in copy.near:
                    pool.holds.end(held)
            first.rest = []
