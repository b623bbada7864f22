"""The way in: what lower tiers have of a prompt, beyond what the device has, is brought back instead of computed.

A load begins when all it needs is in the host; what only storage has is fetched into the host first, while the request waits.
Blocks on the device are reserved before the copy starts. What is on its way already, for whomever, is waited for and never
brought twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvyard.blocks import Hit, Request
from kvyard.blocks.spans import Spans, intersect, overlaps, unite, without
from kvyard.tiers.depot import Copy, Kind
from kvyard.tiers.outcome import NO_ROOM, NOTHING, Outcome, Step
from kvyard.tiers.pending import Pending
from kvyard.tiers.piece import Piece, total_pages
from kvyard.tiers.site import Site, Track

if TYPE_CHECKING:
    from kvyard.tiers.ahead import Cleaner


class _Need(NamedTuple):
    """What one group needs for a load."""

    low: int
    """Blocks ``low`` to ``high`` go to the device,"""
    high: int
    piece: Piece
    """out of these pages."""


class _View(NamedTuple):
    """What one group sees of a prompt, as intervals of pages."""

    local: Spans
    host: Spans
    coming: Spans
    storage: Spans


class Inward:
    """Loads and fetches of one worker."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.loading = [Pending() for _ in range(site.layout.num_groups)]
        """What is on its way to the device."""
        self.changes = 0
        """Counts loads that began or ended: whoever could do with one asks again then."""
        self.cleaner: Cleaner | None = None
        """Whom to ask before blocks of the device are taken."""
        full = all(group.spec.is_full for group in site.layout.manager.groups)
        self._last_block = site.config.last_block if full else "skip"

    def onboard(
        self, request: Request, hit: Hit, now: int, must_fit: bool, reserved: int, has_running: bool
    ) -> Outcome:
        """See ``Offload.onboard``; the deadline is the caller's to fill in."""
        site, layout = self.site, self.site.layout
        limit = self._limit(request)
        if limit - hit.tokens < layout.alignment or not request.reads_cache:
            return NOTHING
        track = site.track(request)
        stores = (site.host.store,) if site.storage is None else (site.host.store, site.storage.store)
        version = (hit.tokens, site.landings, self.changes, *[(store.arrivals, store.reservations) for store in stores])
        asked = track.asked == version
        if asked and track.answer is not None:
            return track.answer
        # A hit that ends inside a block can't be continued by a load: load it all, if that goes further.
        local = hit if all(hit.tokens % size == 0 for size in layout.block_sizes) else None
        views = self._look(request, local)
        if asked:
            # It may begin as far as lower tiers are concerned, and nothing has changed there: it is about the device only.
            return self._load(request, track, hit, local, views, now, (must_fit, reserved, has_running))
        site.counters.lookups += 1
        answer = self._decide(request, track, hit, local, views, now)
        track.asked, track.answer = version, answer
        if answer is NOTHING:
            self._release(track)
        if answer is None:
            return self._load(request, track, hit, local, views, now, (must_fit, reserved, has_running))
        return answer

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _look(self, request: Request, local: Hit | None) -> list[_View]:
        """What the tiers have of the request. No recency changes."""
        site, layout = self.site, self.site.layout
        chunk = layout.chunk
        storage = site.storage.store if site.storage is not None else None
        views: list[_View] = []
        for group, size in enumerate(layout.page_tokens):
            keys = layout.chain(request, group).keys
            limit = len(keys)
            here: Spans = ()
            if local is not None and local.tokens >= size:
                here = ((-(-local.groups[group].low // chunk), local.tokens // size),)
                here = here if here[0][0] < here[0][1] else ()
            store = site.host.store
            views.append(
                _View(
                    here,
                    store.resident(group, keys, limit),
                    store.on_the_way(group, keys, limit),
                    storage.resident(group, keys, limit) if storage is not None else (),
                )
            )
        return views

    def _decide(
        self, request: Request, track: Track, hit: Hit, local: Hit | None, views: list[_View], now: int
    ) -> Outcome | None:
        """``None`` if a load can begin, else the answer."""
        site = self.site
        for view in views:
            if view.host or view.coming or view.storage:
                break
        else:
            return NOTHING
        spans = [unite(view.local, view.host, view.coming, view.storage) for view in views]
        tokens = self._longest(request, spans)
        needs = self._needs(request, local, tokens, spans) if tokens > hit.tokens else None
        if needs is None:
            return NOTHING
        self._touch(request, tokens)
        for group, need in enumerate(needs):
            if need is None:
                continue
            piece = need.piece
            if overlaps(piece.start, piece.stop, views[group].coming) or self._is_loading(piece):
                site.counters.pending_waits += 1
                return Outcome(Step.WAITING)
        pieces = [
            Piece(group, need.piece.chain, low, high)
            for group, need in enumerate(needs)
            if need is not None
            for low, high in without(need.piece.start, need.piece.stop, views[group].host)
        ]
        if pieces and self._fetch(request, track, needs, pieces, views, tokens, now):
            site.counters.pending_waits += 1
            return Outcome(Step.WAITING)
        return None

    def _longest(self, request: Request, spans: list[Spans] | list[list[tuple[int, int]]]) -> int:
        chain = request.chain
        return self.site.layout.agreement.longest(spans, self._limit(request), len(chain.keys) * chain.block_size)

    def _limit(self, request: Request) -> int:
        """How many tokens of the request a load may bring."""
        return request.num_tokens - (self._last_block == "skip")

    def _counted(self, request: Request, tokens: int) -> int:
        """How many of ``tokens`` loaded tokens need not be computed again."""
        if tokens < request.num_tokens:
            return tokens
        return tokens - (1 if self._last_block == "recompute-token" else self.site.layout.alignment)

    def _needs(
        self, request: Request, local: Hit | None, tokens: int, spans: list[Spans] | list[list[tuple[int, int]]]
    ) -> list[_Need | None] | None:
        """What each group needs to resume after ``tokens``; ``None`` if some group's rule asks for more than is there."""
        layout = self.site.layout
        chunk = layout.chunk
        needs: list[_Need | None] = []
        for index, group in enumerate(layout.manager.groups):
            adopted = local.groups[index].blocks if local is not None else 0
            low = max(group.rule.stale(tokens) // group.block_size, adopted)
            high = tokens // group.block_size
            if low >= high:
                needs.append(None)
                continue
            first, last = low // chunk, -(-high // chunk)
            if without(first, last, spans[index]):
                return None
            needs.append(_Need(low, high, Piece(index, layout.chain(request, index), first, last)))
        return needs if any(needs) else None

    def _is_loading(self, piece: Piece) -> bool:
        loading = self.loading[piece.group]
        return bool(loading) and overlaps(piece.start, piece.stop, loading.spans(piece.chain.keys, piece.stop))

    def _touch(self, request: Request, tokens: int) -> None:
        """The match makes what it matched the most recently used, in every tier that has it."""
        layout = self.site.layout
        for depot in (self.site.host, self.site.storage):
            if depot is not None:
                for group, size in enumerate(layout.page_tokens):
                    depot.store.touch(group, layout.chain(request, group).keys, tokens // size)

    # -- fetching: storage to host ------------------------------------------------------------------------------------

    def _fetch(
        self,
        request: Request,
        track: Track,
        needs: list[_Need | None],
        pieces: list[Piece],
        views: list[_View],
        tokens: int,
        now: int,
    ) -> bool:
        """Bring ``pieces`` from storage into the host and keep there what the load will need; returns whether it began."""
        site = self.site
        assert site.storage is not None
        host, storage = site.host.store, site.storage.store
        if total_pages(pieces) > host.num_pages:
            site.counters.refused += 1
            return False
        # First keep what is there: making room for the rest must not cost it.
        kept = [
            host.hold(group, need.piece.chain.keys, low, high)
            for group, need in enumerate(needs)
            if need is not None
            for low, high in intersect([(need.piece.start, need.piece.stop)], views[group].host)
        ]
        near = host.reserve(pieces)
        if near is None:
            site.counters.no_host_room += 1
            for held in reversed(kept):
                host.let_go(held)
            return False
        track.keep += kept
        far = [storage.hold(piece.group, piece.chain.keys, piece.start, piece.stop) for piece in pieces]
        for target, source in zip(near, far):
            host.inherit(target, source, 1)
        copy = Copy(Kind.FETCH, site.name, site.inbox, pieces, near, far)
        # A shared host has it for everybody from the instant it lands, a private one when its worker hears of it.
        copy.arrive = self.fetched if site.host.shared else None
        copy.request = request
        track.fetch = copy
        track.storage_tokens = tokens - self._longest(request, [unite(view.local, view.host) for view in views])
        site.send(now, copy)
        return True

    def fetched(self, copy: Copy) -> None:
        """A fetch has landed: the host has it now, and keeps it for the request that waits for it."""
        host = self.site.host.store
        request = copy.request
        track = self.site.tracks.get(request) if request is not None else None
        wanted = track is not None and track.fetch is copy
        for piece, held in zip(copy.pieces, copy.near):
            host.land(piece, held, keep=wanted)
        if track is not None and wanted:
            track.fetch = None
            track.keep += copy.near

    # -- loading: host to device --------------------------------------------------------------------------------------

    def _load(
        self,
        request: Request,
        track: Track,
        hit: Hit,
        local: Hit | None,
        views: list[_View],
        now: int,
        terms: tuple[bool, int, bool],
    ) -> Outcome:
        """Begin the longest load for which the host has everything."""
        site, manager = self.site, self.site.layout.manager
        spans = [unite(view.local, view.host) for view in views]
        tokens = self._longest(request, spans)
        needs = self._needs(request, local, tokens, spans) if tokens > hit.tokens else None
        if needs is None:
            return NOTHING
        if any(need is not None and self._is_loading(need.piece) for need in needs):
            # A prefix shorter than was hoped for has another window, and that may be on its way for somebody else.
            site.counters.pending_waits += 1
            return Outcome(Step.WAITING)
        found = local.tokens if local is not None else 0
        must_fit, reserved, has_running = terms
        if self.cleaner is not None:
            needed = site.layout.demand(request, local, 0, tokens - found)
            wait = self.cleaner.make_clean(needed, now, site.host.earliest, local)
            if wait is not None or not self._still_there(needs):
                site.counters.no_device_room += 1
                return NO_ROOM
        taken = manager.allocate(
            request,
            0,
            local,
            external=tokens - found,
            delay_caching=True,
            must_fit=must_fit,
            reserved=reserved,
            has_running=has_running,
        )
        if taken is None:
            site.counters.no_device_room += 1
            return NO_ROOM
        present = [need for need in needs if need is not None]
        pieces = [need.piece for need in present]
        far = [site.host.store.hold(piece.group, piece.chain.keys, piece.start, piece.stop) for piece in pieces]
        copy = Copy(Kind.LOAD, site.name, site.inbox, pieces, [], far)
        copy.request, copy.tokens = request, tokens
        copy.first_block = [need.low for need in present]
        track.load = copy
        for piece in pieces:
            self.loading[piece.group].add(piece)
        self.changes += 1
        self._release(track)
        site.counters.hits += 1
        counted = self._counted(request, tokens)
        site.counters.hit_tokens += counted - hit.tokens
        staged = min(track.storage_tokens, counted - hit.tokens)
        site.counters.storage_tokens += staged
        track.storage_tokens = 0
        site.send(now, copy, sum(need.high - need.low for need in present))
        return Outcome(Step.STARTED, counted - hit.tokens, staged)

    def _still_there(self, needs: list[_Need | None]) -> bool:
        """Whether making room in the host, for what has to leave the device, has cost nothing of what is to be loaded."""
        store = self.site.host.store
        pieces = [need.piece for need in needs if need is not None]
        return not any(
            without(piece.start, piece.stop, store.resident(piece.group, piece.chain.keys, piece.stop))
            for piece in pieces
        )

    def _unmark(self, copy: Copy) -> None:
        """What ``copy`` brings is not on its way any more."""
        for piece in copy.pieces:
            self.loading[piece.group].remove(piece)
        self.changes += 1

    def loaded(self, copy: Copy) -> Request | None:
        """A load has landed: the request may go on after ``copy.tokens``. ``None`` if it has gone in the meantime."""
        site = self.site
        request = copy.request
        if request is None:
            site.counters.wasted_loads += 1
            for held in copy.near:
                site.layout.pool.let_go(held)
            return None
        self._unmark(copy)
        site.tracks[request].load = None
        site.layout.manager.cache(request, copy.tokens)
        request.num_computed_tokens = self._counted(request, copy.tokens)
        return request

    def forget(self, request: Request, track: Track) -> None:
        """The request goes: what was kept for it is released, and a load under way ends for nobody.

        A copy can't be called back, so its blocks on the device stay out of the pool until it has landed.
        """
        self._release(track)
        track.fetch = None
        copy = track.load
        if copy is not None:
            layout = self.site.layout
            self._unmark(copy)
            copy.request = None
            copy.near = [
                layout.hold_slots(request, piece.group, low, copy.tokens // layout.block_sizes[piece.group])
                for piece, low in zip(copy.pieces, copy.first_block)
            ]
            track.load = None

    def _release(self, track: Track) -> None:
        for held in reversed(track.keep):
            self.site.host.store.let_go(held)
        track.keep = []
