"""The way out: what a request has computed goes to the host, and from there to storage.

Blocks are offered at the end of a pass. What the policy wants and nobody has or is bringing becomes one *cohort*: it gets room
for all of it or waits, without blocking anybody, until something has landed. Its batches go one after the other, so a
cohort has one transfer under way at a time. The source stays held until its batch has landed.
"""

from __future__ import annotations

from kvyard.blocks import Request
from kvyard.blocks.extent import Extent
from kvyard.blocks.limits import ENDLESS
from kvyard.blocks.spans import intersect
from kvyard.blocks.table import Table
from kvyard.tiers.depot import Copy, Kind
from kvyard.tiers.piece import Piece, total_pages
from kvyard.tiers.policy import WriteThrough
from kvyard.tiers.site import Site, Track


class Outward:
    """Stores and spills of one worker."""

    def __init__(self, site: Site, policy: WriteThrough) -> None:
        self.site = site
        self.policy = policy
        self.waiting: dict[Request, None] = {}
        """Requests whose cohort found no room, first come first."""
        self._tried = -1
        """How many copies had landed when one last found none."""
        size = site.config.offload_batch_size
        self._batch_pages = None if size is None else size // site.layout.chunk
        self._closed = False

    def offer(self, request: Request, now: int) -> None:
        """Store what the request has computed since it was last asked, as far as the policy wants it."""
        track = self.site.track(request)
        tokens = self.policy.reach(request)
        if tokens >= track.due and request.tables:
            self._offer(request, track, tokens, now)

    def quiet_until(self, request: Request) -> int:
        """``offer`` does nothing while fewer tokens than this are computed."""
        track = self.site.tracks.get(request)
        due = track.due if track is not None else min(self.site.layout.page_tokens)
        limit = self.policy.limit(request)
        return ENDLESS if limit is not None and due > limit else due

    def retry(self, now: int) -> None:
        """Ask again for the cohorts that found no room, if anything has landed since."""
        if not self.waiting or self._tried == self.site.landings:
            return
        waiting, self.waiting = self.waiting, {}
        for request in waiting:
            self.site.tracks[request].due = 0
            self.offer(request, now)

    def _offer(self, request: Request, track: Track, tokens: int, now: int) -> None:
        layout, store = self.site.layout, self.site.host.store
        pieces: list[Piece] = []
        sources: dict[int, list[Extent]] = {}
        done: list[int] = []
        due = ENDLESS
        for group, size in enumerate(layout.page_tokens):
            first, last = track.stored[group], tokens // size
            due = min(due, (last + 1) * size)
            done.append(max(first, last))
            if first >= last:
                continue
            chain = layout.chain(request, group)
            if track.used[group] < last:
                self.policy.used(group, chain, track.used[group], last)
                track.used[group] = last
            missing = store.missing(group, chain.keys, first, last)
            if missing:
                missing = self.policy.choose(group, chain, missing)
            if missing:
                extents = sources[group] = layout.named(request, group, missing[0][0])
                missing = intersect(missing, layout.pages_of(extents))
            pieces += [Piece(group, chain, low, high) for low, high in missing]
        track.due = due
        if pieces and not self._store(sources, pieces, now):
            # The cursor stays where it is, and nobody asks again before something has landed.
            self.waiting[request] = None
            return
        track.stored = done

    def _store(self, sources: dict[int, list[Extent]], pieces: list[Piece], now: int) -> bool:
        """Send a cohort; returns whether it needs no second try."""
        site = self.site
        if total_pages(pieces) > site.host.store.num_pages:
            site.counters.refused += 1
            return True
        batches = self.batches(pieces)
        far = site.host.store.reserve(_joined(batches))
        if far is None:
            site.counters.no_host_room += 1
            self._tried = site.landings
            return False
        hold = site.layout.hold_blocks
        near = [[hold(sources[piece.group], piece) for piece in batch] for batch in batches]
        self.send(Kind.STORE, batches, near, far, now)
        return True

    def batches(self, pieces: list[Piece]) -> list[list[Piece]]:
        """``pieces`` cut into batches of the configured size."""
        size = self._batch_pages
        if size is None:
            return [pieces]
        batches: list[list[Piece]] = []
        room = 0
        for group, chain, start, stop in pieces:
            while start < stop:
                if not room:
                    batches.append([])
                    room = size
                count = min(room, stop - start)
                batches[-1].append(Piece(group, chain, start, start + count))
                start += count
                room -= count
        return batches

    def send(
        self,
        kind: Kind,
        batches: list[list[Piece]],
        near: list[list[Table]],
        far: list[Table],
        now: int,
        returns: bool = False,
    ) -> None:
        """Make the copies of a cohort and submit the first; the others follow one by one."""
        site = self.site
        copies: list[Copy] = []
        at = 0
        store = site.depot_of(kind).store
        chunk = site.layout.chunk if kind is Kind.STORE else 1
        for source, target in zip((source for sources in near for source in sources), far):
            store.inherit(target, source, chunk)
        for batch, sources in zip(batches, near):
            copy = Copy(kind, site.name, site.inbox, batch, sources, far[at : at + len(batch)])
            copy.returns = returns
            copy.arrive = self.arrived
            at += len(batch)
            copies.append(copy)
        first = copies[0]
        first.rest = copies[1:]
        site.send(now, first)

    def arrived(self, copy: Copy) -> None:
        """A store or a spill lands, at this very instant: send the next batch, and a copy of it on to storage."""
        if copy.rest:
            following = copy.rest[0]
            following.rest, copy.rest = copy.rest[1:], []
            self.site.send(copy.ended, following)
        if copy.kind is Kind.SPILL and self.site.host.shared:
            self._let_go(copy)
        if copy.kind is Kind.STORE and self.site.storage is not None and not self._closed:
            self._spill(copy)

    def landed(self, copy: Copy) -> None:
        """The worker hears of it: let go of the source."""
        if copy.kind is Kind.SPILL:
            if not self.site.host.shared:
                self._let_go(copy)
            return
        pool = self.site.layout.pool
        if copy.returns:
            for held in copy.near:
                pool.put_back(held)
        else:
            for held in reversed(copy.near):
                pool.let_go(held)

    def _let_go(self, spill: Copy) -> None:
        for held in reversed(spill.near):
            self.site.host.store.let_go(held)

    def _spill(self, copy: Copy) -> None:
        """Copy on to storage what it doesn't have, if it has room. The source is still held as the store's destination."""
        site = self.site
        assert site.storage is not None
        store = site.storage.store
        pieces: list[Piece] = []
        sources: list[Table] = []
        for (group, chain, start, stop), held in zip(copy.pieces, copy.far):
            for low, high in store.missing(group, chain.keys, start, stop):
                pieces.append(Piece(group, chain, low, high))
                sources.append(held)
        if not pieces:
            return
        if total_pages(pieces) > store.num_pages:
            site.counters.refused += 1
            return
        far = store.reserve(pieces)
        if far is None:
            site.counters.no_storage_room += 1
            return
        pool = site.host.store.pool
        near = [pool.hold(pool.cut(list(held), piece.start, piece.stop)) for piece, held in zip(pieces, sources)]
        self.send(Kind.SPILL, [pieces], [near], far, copy.ended)

    def forget(self, request: Request) -> None:
        """The request has gone; what was submitted still lands."""
        self.waiting.pop(request, None)

    def close(self) -> None:
        """The worker has gone: batches that have not been submitted won't be, and nothing more goes on to storage."""
        self._closed = True
        self.waiting.clear()
        store, pool = self.site.host.store, self.site.layout.pool
        for first in (*self.site.host.under_way.values(), *self.site.inbox):
            if first.inbox is self.site.inbox:
                for copy in first.rest:
                    for piece, held in zip(copy.pieces, copy.far):
                        store.cancel(piece, held)
                    for held in copy.near:
                        pool.let_go(held)
                first.rest = []


def _joined(batches: list[list[Piece]]) -> list[Piece]:
    return batches[0] if len(batches) == 1 else [piece for batch in batches for piece in batch]
