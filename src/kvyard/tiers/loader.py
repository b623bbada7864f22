"""Loads: what lower tiers have of a prompt, beyond what the device has, is brought back instead of computed.

A load begins when all it needs is in the first tier. What only a lower one has is *fetched* first, one tier closer at a time,
while the request waits. Blocks on the device are reserved before the copy starts. What is on its way
already, for this request or another, is waited for and never brought twice.
"""

from __future__ import annotations

from typing import NamedTuple

from kvyard.blocks import Hit, Request
from kvyard.blocks.spans import Spans, intersect, overlaps, unite, without
from kvyard.tiers.answer import NO_ROOM, NOTHING, LoadAnswer, LoadStep
from kvyard.tiers.cleaner import Cleaner
from kvyard.tiers.copies import Copy
from kvyard.tiers.links import Direction
from kvyard.tiers.pages import PageRange, PendingPages, total_pages
from kvyard.tiers.state import OffloadState, RequestState


class _Need(NamedTuple):
    """What one group needs for a load."""

    low: int
    """Blocks ``low`` to ``high`` go to the device,"""
    high: int
    piece: PageRange
    """out of these pages."""


class _Found(NamedTuple):
    """Where one group's pages of a prompt are, as intervals."""

    local: Spans
    coming: Spans
    """On the way to the first tier."""
    tiers: list[Spans]


class Loader:
    """Loads and fetches of one worker."""

    def __init__(self, state: OffloadState, cleaner: Cleaner | None) -> None:
        """``cleaner`` is asked before blocks of the device are taken."""
        self.state = state
        self.cleaner = cleaner
        self.loading = [PendingPages() for _ in range(state.layout.num_groups)]
        """What is on its way to the device."""
        self.changes = 0
        """Counts loads that began or ended: a request that waits for one asks again then."""
        full = all(group.spec.is_full for group in state.layout.manager.groups)
        self._last_block = state.config.last_block if full else "skip"

    def onboard(
        self, request: Request, hit: Hit, now: int, must_fit: bool, reserved: int, has_running: bool
    ) -> LoadAnswer:
        """See ``Offload.onboard``; the deadline is the caller's to fill in."""
        state, layout = self.state, self.state.layout
        limit = self._limit(request)
        if limit - hit.tokens < layout.alignment or not request.reads_cache:
            return NOTHING
        track = state.of(request)
        stores = [(tier.store.arrivals, tier.store.reservations) for tier in state.tiers]
        version = (hit.tokens, state.landings, self.changes, *stores)
        asked = track.asked == version
        if asked and track.answer is not None:
            return track.answer
        # A hit that ends inside a block can't be continued by a load: load it all, if that goes further.
        local = hit if all(hit.tokens % size == 0 for size in layout.block_sizes) else None
        views = self._look(request, local)
        if asked:
            # It may begin as far as lower tiers are concerned, and nothing has changed there: it is about the device only.
            return self._load(request, track, hit, local, views, now, (must_fit, reserved, has_running))
        state.counters.lookups += 1
        answer = self._decide(request, track, hit, local, views, now)
        track.asked, track.answer = version, answer
        if answer is NOTHING:
            self._release(track)
        if answer is None:
            return self._load(request, track, hit, local, views, now, (must_fit, reserved, has_running))
        return answer

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _look(self, request: Request, local: Hit | None) -> list[_Found]:
        """What the tiers have of the request. No recency changes."""
        state, layout = self.state, self.state.layout
        chunk = layout.chunk
        stores = [tier.store for tier in state.tiers]
        views: list[_Found] = []
        for group, size in enumerate(layout.page_tokens):
            keys = layout.chain(request, group).keys
            limit = len(keys)
            here: Spans = ()
            if local is not None and local.tokens >= size:
                here = ((-(-local.groups[group].low // chunk), local.tokens // size),)
                here = here if here[0][0] < here[0][1] else ()
            coming = state.first.on_the_way(group, keys, limit)
            views.append(_Found(here, coming, [store.resident(group, keys, limit) for store in stores]))
        return views

    def _decide(
        self, request: Request, track: RequestState, hit: Hit, local: Hit | None, views: list[_Found], now: int
    ) -> LoadAnswer | None:
        """``None`` if a load can begin, else the answer."""
        state = self.state
        if not any(view.coming or any(view.tiers) for view in views):
            return NOTHING
        spans = [unite(view.local, view.coming, *view.tiers) for view in views]
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
                state.counters.pending_waits += 1
                return LoadAnswer(LoadStep.WAITING)
        for level in range(len(state.tiers) - 1, 0, -1):
            pieces = _only_from(level, needs, views)
            if pieces and (
                self._is_coming(level - 1, pieces)
                or self._fetch(level, request, track, needs, pieces, views, tokens, now)
            ):
                state.counters.pending_waits += 1
                return LoadAnswer(LoadStep.WAITING)
        return None

    def _longest(self, request: Request, spans: list[Spans] | list[list[tuple[int, int]]]) -> int:
        chain = request.chain
        return self.state.layout.agreement.longest(spans, self._limit(request), len(chain.keys) * chain.block_size)

    def _limit(self, request: Request) -> int:
        """How many tokens of the request a load may bring."""
        return request.num_tokens - (self._last_block == "skip")

    def _counted(self, request: Request, tokens: int) -> int:
        """How many of ``tokens`` loaded tokens need not be computed again."""
        if tokens < request.num_tokens:
            return tokens
        return tokens - (1 if self._last_block == "recompute-token" else self.state.layout.alignment)

    def _needs(
        self, request: Request, local: Hit | None, tokens: int, spans: list[Spans] | list[list[tuple[int, int]]]
    ) -> list[_Need | None] | None:
        """What each group needs to resume after ``tokens``; ``None`` if some group's rule asks for more than is there."""
        layout = self.state.layout
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
            needs.append(_Need(low, high, PageRange(index, layout.chain(request, index), first, last)))
        return needs if any(needs) else None

    def _is_loading(self, piece: PageRange) -> bool:
        loading = self.loading[piece.group]
        return bool(loading) and overlaps(piece.start, piece.stop, loading.spans(piece.chain.keys, piece.stop))

    def _is_coming(self, level: int, pieces: list[PageRange]) -> bool:
        """Whether any of ``pieces`` is on its way into tier ``level``, for another request."""
        store = self.state.tiers[level].store
        return any(
            overlaps(piece.start, piece.stop, store.on_the_way(piece.group, piece.chain.keys, piece.stop))
            for piece in pieces
        )

    def _touch(self, request: Request, tokens: int) -> None:
        """The match makes what it matched the most recently used, in every tier that has it."""
        layout = self.state.layout
        for tier in self.state.tiers:
            for group, size in enumerate(layout.page_tokens):
                tier.store.touch(group, layout.chain(request, group).keys, tokens // size)

    # -- fetching: from a lower tier to the next closer one -----------------------------------------------------------

    def _fetch(
        self,
        level: int,
        request: Request,
        track: RequestState,
        needs: list[_Need | None],
        pieces: list[PageRange],
        views: list[_Found],
        tokens: int,
        now: int,
    ) -> bool:
        """Bring ``pieces`` from tier ``level`` one closer and keep there what the load will need; returns whether it began."""
        state = self.state
        source, target = state.tiers[level].store, state.tiers[level - 1].store
        if total_pages(pieces) > target.num_pages:
            state.counters.refused += 1
            return False
        # First keep what is there: making room for the rest must not cost it.
        kept = [
            target.hold(group, need.piece.chain.keys, low, high)
            for group, need in enumerate(needs)
            if need is not None
            for low, high in intersect([(need.piece.start, need.piece.stop)], views[group].tiers[level - 1])
        ]
        near = target.reserve(pieces)
        if near is None:
            state.counters.tiers[level - 1].no_room += 1
            for held in reversed(kept):
                target.let_go(held)
            return False
        track.keep += [(target, held) for held in kept]
        far = [source.hold(piece.group, piece.chain.keys, piece.start, piece.stop) for piece in pieces]
        for copied, original in zip(near, far):
            target.inherit(copied, original, 1)
        copy = Copy(level, Direction.IN, state.name, state.inbox, pieces, near, far)
        # A shared target has it for all workers from the instant it lands, a private one when its worker next ticks.
        copy.arrive = self.fetched if state.tiers[level - 1].shared else None
        copy.request = request
        track.fetch = copy
        closer = [unite(view.local, *view.tiers[:level]) for view in views]
        track.fetched[level] = tokens - self._longest(request, closer)
        state.send(now, copy)
        return True

    def fetched(self, copy: Copy) -> None:
        """A fetch has landed: the closer tier has it now, and keeps it for the request that waits for it."""
        store = self.state.tiers[copy.level - 1].store
        request = copy.request
        track = self.state.requests.get(request) if request is not None else None
        wanted = track is not None and track.fetch is copy
        for piece, held in zip(copy.pieces, copy.near):
            store.land(piece, held, keep=wanted)
        if track is not None and wanted:
            track.fetch = None
            track.keep += [(store, held) for held in copy.near]

    # -- loading: from the first tier to the device ---------------------------------------------------------------

    def _load(
        self,
        request: Request,
        track: RequestState,
        hit: Hit,
        local: Hit | None,
        views: list[_Found],
        now: int,
        terms: tuple[bool, int, bool],
    ) -> LoadAnswer:
        """Begin the longest load for which the first tier has everything."""
        state, manager = self.state, self.state.layout.manager
        spans = [unite(view.local, view.tiers[0]) for view in views]
        tokens = self._longest(request, spans)
        needs = self._needs(request, local, tokens, spans) if tokens > hit.tokens else None
        if needs is None:
            return NOTHING
        if any(need is not None and self._is_loading(need.piece) for need in needs):
            # A prefix shorter than was hoped for has another window, and that may be on its way for another request.
            state.counters.pending_waits += 1
            return LoadAnswer(LoadStep.WAITING)
        found = local.tokens if local is not None else 0
        must_fit, reserved, has_running = terms
        if self.cleaner is not None:
            needed = state.layout.demand(request, local, 0, tokens - found)
            wait = self.cleaner.make_clean(needed, now, state.tiers[0].earliest, local)
            if wait is not None or not self._still_there(needs):
                state.counters.no_device_room += 1
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
            state.counters.no_device_room += 1
            return NO_ROOM
        present = [need for need in needs if need is not None]
        pieces = [need.piece for need in present]
        far = [state.first.hold(piece.group, piece.chain.keys, piece.start, piece.stop) for piece in pieces]
        copy = Copy(0, Direction.IN, state.name, state.inbox, pieces, [], far)
        copy.request, copy.tokens = request, tokens
        copy.first_block = [need.low for need in present]
        track.load = copy
        for piece in pieces:
            self.loading[piece.group].add(piece)
        self.changes += 1
        self._release(track)
        state.counters.hits += 1
        counted = self._counted(request, tokens)
        loaded = counted - hit.tokens
        state.counters.hit_tokens += loaded
        by_tier = _by_tier(track.fetched, loaded)
        for counters, brought in zip(state.counters.tiers, by_tier):
            counters.tokens += brought
        track.fetched = [0] * len(state.tiers)
        state.send(now, copy, sum(need.high - need.low for need in present))
        return LoadAnswer(LoadStep.STARTED, loaded, tuple(by_tier))

    def _still_there(self, needs: list[_Need | None]) -> bool:
        """Whether making room in the first tier, for what has to leave the device, has cost nothing of what is to be loaded."""
        store = self.state.first
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
        state = self.state
        request = copy.request
        if request is None:
            state.counters.wasted_loads += 1
            for held in copy.near:
                state.layout.pool.let_go(held)
            return None
        self._unmark(copy)
        state.requests[request].load = None
        state.layout.manager.cache(request, copy.tokens)
        request.num_computed_tokens = self._counted(request, copy.tokens)
        return request

    def forget(self, request: Request, track: RequestState) -> None:
        """The request goes: what was kept for it is released, and what a load under way brings is given back.

        A copy isn't called back, so its blocks on the device stay out of the pool until it has landed.
        """
        self._release(track)
        track.fetch = None
        copy = track.load
        if copy is not None:
            layout = self.state.layout
            self._unmark(copy)
            copy.request = None
            copy.near = [
                layout.hold_slots(request, piece.group, low, copy.tokens // layout.block_sizes[piece.group])
                for piece, low in zip(copy.pieces, copy.first_block)
            ]
            track.load = None

    def _release(self, track: RequestState) -> None:
        for store, held in reversed(track.keep):
            store.let_go(held)
        track.keep = []


def _only_from(level: int, needs: list[_Need | None], views: list[_Found]) -> list[PageRange]:
    """What of ``needs`` tier ``level`` has and no closer one does."""
    pieces: list[PageRange] = []
    for group, need in enumerate(needs):
        if need is not None:
            tiers = views[group].tiers
            missing = without(need.piece.start, need.piece.stop, unite(*tiers[:level]))
            for low, high in intersect(missing, tiers[level]):
                pieces.append(PageRange(group, need.piece.chain, low, high))
    return pieces


def _by_tier(fetched: list[int], tokens: int) -> list[int]:
    """``tokens`` that a load brings by the tier that had them; ``fetched`` says how many came from each or from below it."""
    found = [0] * len(fetched)
    below = 0
    for level in range(len(fetched) - 1, 0, -1):
        from_here_on = min(max(fetched[level], below), tokens)
        found[level] = from_here_on - below
        below = from_here_on
    found[0] = tokens - below
    return found
