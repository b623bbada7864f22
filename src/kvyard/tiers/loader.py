"""Loads: a prefix in lower tiers, beyond that of the device, is brought back instead of computed.

A load begins when all it needs is in the first tier. Pages that only a lower tier has are *fetched* first, one tier closer
at a time, while the request waits; those that only another worker has are *pulled*. Blocks on the device are reserved
before the copy starts. Pages in flight already, for this request or another, are waited for and never brought twice.
"""

from collections.abc import Callable

from kvyard.blocks import Hit, Request
from kvyard.blocks.spans import overlaps, without
from kvyard.blocks.table import BlockTable
from kvyard.tiers.cleaner import Cleaner
from kvyard.tiers.copies import Copy
from kvyard.tiers.forecast import load_time
from kvyard.tiers.links import Direction
from kvyard.tiers.load_policy import LoadOffer, LoadPolicy, LoadQuestion
from kvyard.tiers.prefix_lookup import Need, PrefixLookup
from kvyard.tiers.state import NO_ROOM, NOTHING, LoadAnswer, LoadStep, OffloadState, RequestState
from kvyard.tiers.store import PageRange, PendingPages, TierStore, total_pages


class Loader:
    """Loads and fetches of one worker."""

    def __init__(self, state: OffloadState, cleaner: Cleaner | None, policy: LoadPolicy, moves: bool = False) -> None:
        """``cleaner`` is asked before blocks of the device are taken, ``policy`` before anything is loaded. ``moves``: what is
        loaded leaves the first tier.
        """
        self._moves = moves
        self.state = state
        self.cleaner = cleaner
        self.policy = policy
        self.loading = [PendingPages() for _ in range(state.layout.num_groups)]
        """Pages in flight to the device."""
        self.changes = 0
        """Counts loads that began or ended: a request that waits for one asks again then."""
        full = all(group.spec.is_full for group in state.layout.manager.groups)
        self._full = full
        self._last_block = state.config.last_block if full else "skip"

    def onboard(
        self, request: Request, hit: Hit, now: int, must_fit: bool, has_running: bool, backlog: int
    ) -> LoadAnswer:
        """See ``Offload.onboard``; the deadline is the caller's to fill in."""
        state = self.state
        limit = request.num_tokens - (self._last_block == "skip")
        if limit - hit.tokens < state.layout.alignment or not request.reads_cache:
            return NOTHING
        record = state.of(request)
        stores = [(tier.store.arrivals, tier.store.reservations) for tier in state.tiers]
        version = (hit.tokens, state.landings, self.changes, *stores)
        asked = record.asked == version
        if asked and record.answer is not None:
            return record.answer
        peers = state.peers
        peer = peers.pages(request, now) if peers is not None and not asked and record.fetch is None else None
        lookup = PrefixLookup(state, request, hit, limit, peer)
        if not asked:
            state.counters.lookups += 1
            record.left = 0
            record.asked, record.answer = version, self._decide(lookup, record, now, backlog)
            if record.answer is not None and record.answer.step is LoadStep.NOTHING:
                self._release(record)
                record.fetch = None  # it lands, and is kept for no request
            if record.answer is not None:
                return record.answer
        # Otherwise nothing has changed in lower tiers since a load could begin there: it is about the device only.
        return self._load(lookup, record, now, must_fit, has_running)

    def _decide(self, lookup: PrefixLookup, record: RequestState, now: int, backlog: int) -> LoadAnswer | None:
        """Return ``None`` if a load can begin, else the answer."""
        if lookup.peer is not None and self._finds_nothing(lookup, record, now):
            return self._wait()
        if not any(pages.coming or any(pages.tiers) for pages in lookup.groups):
            return NOTHING
        if self._full and not lookup.goes_on():
            return NOTHING
        spans = lookup.everywhere()
        tokens = lookup.longest(spans)
        needs = lookup.needs(tokens, spans)
        if not needs:
            return NOTHING
        if self.policy.asks:
            whole, all_depths = tokens, lookup.depth
            chosen = self._choose(lookup, record, now, backlog)
            if lookup.depth < all_depths == lookup.own + 1 and not record.pull_refused:
                record.pull_refused = True
                refused = self.state.counters.pulls.refused
                refused[record.why] = refused.get(record.why, 0) + 1
            if not chosen:
                record.left = whole - lookup.hit.tokens
                return NOTHING._replace(left=record.left)
            spans = lookup.everywhere()
            tokens = lookup.longest(spans)
            needs = lookup.needs(tokens, spans)
            record.left = whole - tokens
        self._touch(lookup.request, tokens)
        for need in needs:
            piece = need.piece
            if overlaps(piece.start, piece.stop, lookup.groups[piece.group].coming) or self._is_loading(piece):
                return self._wait()
        if lookup.depth > lookup.own:
            pieces = lookup.only_from(lookup.own, needs)
            if pieces and (self._is_coming(0, pieces) or self._pull(lookup, record, needs, pieces, tokens, now)):
                return self._wait()
        for level in range(min(lookup.depth, lookup.own) - 1, 0, -1):
            pieces = lookup.only_from(level, needs)
            if pieces and (
                self._is_coming(level - 1, pieces) or self._fetch(level, lookup, record, needs, pieces, tokens, now)
            ):
                return self._wait()
        return None

    def _choose(self, lookup: PrefixLookup, record: RequestState, now: int, backlog: int) -> bool:
        """Ask the load policy how deep to look; returns True if there is anything to load then."""
        state, hit = self.state, lookup.hit.tokens
        offers: list[LoadOffer] = []
        for depth in range(1, lookup.depth + 1):
            lookup.depth = depth
            spans = lookup.everywhere()
            tokens = lookup.longest(spans)
            needs = lookup.needs(tokens, spans)
            if needs and (not offers or tokens - hit > offers[-1].tokens):
                takes = load_time(state, self.loading, lookup, depth, needs, now)
                offers.append(LoadOffer(depth, tokens - hit, takes))
        in_flight = sum(
            [transfer.load is not None or transfer.fetch is not None for transfer in state.requests.values()]
        )
        if record.fetch is not None:
            in_flight -= 1  # its own
        question = LoadQuestion(offers, hit, lookup.request.num_tokens, in_flight, backlog)
        choice = self.policy.choose(question)
        record.why = choice.why
        lookup.depth = offers[choice.taken].depth if choice.taken >= 0 else 0
        return choice.taken >= 0

    def _wait(self) -> LoadAnswer:
        self.state.counters.pending_waits += 1
        return LoadAnswer(LoadStep.WAITING)

    def _counted(self, request: Request, tokens: int) -> int:
        """Return how many of ``tokens`` loaded tokens need not be computed again."""
        if tokens < request.num_tokens:
            return tokens
        return tokens - (1 if self._last_block == "recompute-token" else self.state.layout.alignment)

    def _is_loading(self, piece: PageRange) -> bool:
        loading = self.loading[piece.group]
        return bool(loading) and overlaps(piece.start, piece.stop, loading.spans(piece.chain.keys, piece.stop))

    def _is_coming(self, level: int, pieces: list[PageRange]) -> bool:
        """Return true if any of ``pieces`` is in flight into tier ``level``, for another request."""
        store = self.state.tiers[level].store
        return any(
            overlaps(piece.start, piece.stop, store.on_the_way(piece.group, piece.chain.keys, piece.stop))
            for piece in pieces
        )

    def _touch(self, request: Request, tokens: int) -> None:
        """Make what the match covers the most recently used, in every tier that has it."""
        layout, use = self.state.layout, self.state.use_of(request)
        for tier in self.state.tiers:
            for group, size in enumerate(layout.page_tokens):
                tier.store.touch(group, layout.chain(request, group), tokens // size, use)

    # -- pulling: from another worker to the first tier ---------------------------------------------------------------

    def _finds_nothing(self, lookup: PrefixLookup, record: RequestState, now: int) -> bool:
        """Return true if the peer lacks the expected prefix, which takes one latency to find out. Has ``lookup`` leave the
        peer out if it is of no use.
        """
        peers, peer, pulls = self.state.peers, lookup.peer, self.state.counters.pulls
        assert peers is not None and peer is not None
        with_peer = lookup.longest(lookup.everywhere())
        lookup.depth = lookup.own
        mine = max(lookup.longest(lookup.everywhere()), lookup.hit.tokens)
        if peer.expected - mine < peers.min_lead:
            peers.forget(lookup.request)  # it has come by other ways
        elif with_peer - mine < peers.min_lead:
            pulls.gone += 1
            copy = Copy(lookup.own, Direction.IN, self.state.name, self.state.inbox, [], [], [])
            copy.request = lookup.request
            record.fetch = copy
            peers.start(lookup.request, copy, now)
            return True
        elif peers.full:
            if not record.pull_refused:
                record.pull_refused = True
                pulls.busy += 1
        else:
            lookup.depth = lookup.own + 1
        return False

    def _pull(
        self,
        lookup: PrefixLookup,
        record: RequestState,
        needs: list[Need],
        pieces: list[PageRange],
        tokens: int,
        now: int,
    ) -> bool:
        """Bring ``pieces`` from the peer into the first tier and keep there what the load needs; returns whether it began."""
        peer, peers, pulls = lookup.peer, self.state.peers, self.state.counters.pulls
        assert peer is not None and peers is not None
        copy = self._bring(peer.hold, lookup.own, 0, lookup, record, needs, pieces)
        if copy is None:
            pulls.no_room += 1
            peers.forget(lookup.request)
            return False
        self.state.measure(copy)
        record.pulled = tokens - lookup.longest(lookup.above(lookup.own))
        pulls.begun += 1
        peers.start(lookup.request, copy, now)
        return True

    def pulled(self, copy: Copy) -> None:
        """Finish a pull: the first tier has the blocks now, or its room is free again."""
        state, pulls = self.state, self.state.counters.pulls
        state.pull_landings += 1
        if not copy.failed:
            if copy.pieces:
                pulls.landed += 1
                pulls.blocks += copy.blocks
                pulls.bytes += copy.nbytes
                pulls.ns += copy.ended - copy.began
                pulls.queued_ns += copy.queued
            self._arrive(copy, state.first)
            return
        pulls.failed += 1
        for piece, held in zip(copy.pieces, copy.near):
            state.first.cancel(piece, held)
        request = copy.request
        record = state.requests.get(request) if request is not None else None
        if record is not None and record.fetch is copy:
            record.fetch = None
            record.pulled = 0
            self._release(record)

    # -- fetching: from a lower tier to the next closer one -----------------------------------------------------------

    def _fetch(
        self,
        level: int,
        lookup: PrefixLookup,
        record: RequestState,
        needs: list[Need],
        pieces: list[PageRange],
        tokens: int,
        now: int,
    ) -> bool:
        """Bring ``pieces`` from tier ``level`` one closer and keep there what the load will need; returns whether it began."""
        state = self.state
        if total_pages(pieces) > state.tiers[level - 1].store.num_pages:
            state.counters.refused += 1
            return False
        copy = self._bring(state.tiers[level].store.hold, level, level - 1, lookup, record, needs, pieces)
        if copy is None:
            state.counters.tiers[level - 1].no_room += 1
            return False
        # A shared target has it for all workers from the instant it lands, a private one when its worker next ticks.
        copy.arrive = self.fetched if state.tiers[level - 1].shared else None
        record.fetched[level] = tokens - lookup.longest(lookup.above(level))
        state.send(now, copy)
        return True

    def fetched(self, copy: Copy) -> None:
        """Finish a fetch: the closer tier has the blocks now, and keeps them for the request that waits for them."""
        self._arrive(copy, self.state.tiers[copy.level - 1].store)

    def _bring(
        self,
        hold: Callable[[PageRange], BlockTable],
        level: int,
        target_level: int,
        lookup: PrefixLookup,
        record: RequestState,
        needs: list[Need],
        pieces: list[PageRange],
    ) -> Copy | None:
        """Make the copy of ``pieces`` from ``level``, where ``hold`` holds them, into a closer tier for the waiting request.
        Keep in that tier what else the load needs. ``None`` if it has no room.
        """
        state = self.state
        target = state.tiers[target_level].store
        # First keep what is there: making room for the rest must not cost it.
        kept = [target.hold(piece) for piece in lookup.held_by(target_level, needs)]
        use = state.use_of(lookup.request)
        near = target.reserve(pieces, use) if total_pages(pieces) <= target.num_pages else None
        if near is None:
            for held in reversed(kept):
                target.pool.holds.end(held)
            return None
        record.keep += [(target, held) for held in kept]
        far = [hold(piece) for piece in pieces]
        if target.keeps_by_priority:
            for copied, original in zip(near, far):
                target.inherit(copied, original, 1)
        copy = Copy(level, Direction.IN, state.name, state.inbox, pieces, near, far)
        copy.request, copy.use = lookup.request, use
        record.fetch = copy
        return copy

    def _arrive(self, copy: Copy, store: TierStore) -> None:
        request = copy.request
        record = self.state.requests.get(request) if request is not None else None
        wanted = record is not None and record.fetch is copy
        for piece, held in zip(copy.pieces, copy.near):
            store.land(piece, held, keep=wanted, use=copy.use)
        if record is not None and wanted:
            record.fetch = None
            record.keep += [(store, held) for held in copy.near]

    # -- loading: from the first tier to the device -------------------------------------------------------------------

    def _load(
        self, lookup: PrefixLookup, record: RequestState, now: int, must_fit: bool, has_running: bool
    ) -> LoadAnswer:
        """Begin the longest load for which the first tier has everything."""
        state, request, hit, local = self.state, lookup.request, lookup.hit, lookup.local
        spans = lookup.above(1)
        tokens = lookup.longest(spans)
        needs = lookup.needs(tokens, spans)
        if not needs:
            return NOTHING
        pieces = [need.piece for need in needs]
        if any(self._is_loading(piece) for piece in pieces):
            # A shorter prefix than expected has another window, which may be in flight for another request.
            return self._wait()
        external = tokens - (local.tokens if local is not None else 0)
        allocate = state.layout.manager.allocate
        if (
            not self._is_clean(request, local, external, pieces, now)
            or allocate(
                request, 0, local, external=external, delay_caching=True, must_fit=must_fit, has_running=has_running
            )
            is None
        ):
            state.counters.no_device_room += 1
            return NO_ROOM
        copy = Copy(0, Direction.IN, state.name, state.inbox, pieces, [], [state.first.hold(piece) for piece in pieces])
        copy.request, copy.tokens = request, tokens
        copy.moves = self._moves
        copy.first_block = [need.low for need in needs]
        record.load = copy
        for piece in pieces:
            self.loading[piece.group].add(piece)
        self.changes += 1
        self._release(record)
        loaded = self._counted(request, tokens) - hit.tokens
        by_tier = _by_tier(record.fetched, loaded)
        record.fetched = [0] * len(state.tiers)
        pulled, record.pulled = min(record.pulled, loaded), 0
        state.counters.pulls.tokens += pulled
        state.counters.hits += 1
        state.counters.hit_tokens += loaded
        for counters, brought in zip(state.counters.tiers, by_tier):
            counters.tokens += brought
        state.send(now, copy, sum(need.high - need.low for need in needs))
        return LoadAnswer(LoadStep.STARTED, loaded, tuple(by_tier), pulled=pulled, left=record.left)

    def _is_clean(self, request: Request, local: Hit | None, external: int, pieces: list[PageRange], now: int) -> bool:
        """Return true if the blocks that a load takes may be taken: under ``on_eviction`` they must have been copied first,
        and making room for that in the first tier must not have cost any of the ``pieces`` that are to be loaded.
        """
        if self.cleaner is None:
            return True
        needed = self.state.layout.demand(request, local, 0, external)
        wait = self.cleaner.make_clean(needed, now, self.state.tiers[0].earliest, local)
        resident = self.state.first.resident
        return wait is None and not any(
            without(piece.start, piece.stop, resident(piece.group, piece.chain.keys, piece.stop)) for piece in pieces
        )

    def _unmark(self, copy: Copy) -> None:
        """Mark the pages of ``copy`` as no longer in flight."""
        for piece in copy.pieces:
            self.loading[piece.group].remove(piece)
        self.changes += 1

    def loaded(self, copy: Copy) -> Request | None:
        """End a load that has landed. Returns its request, which continues after ``copy.tokens``; ``None`` if it has ended."""
        state = self.state
        request = copy.request
        if request is None:
            state.counters.wasted_loads += 1
            for held in copy.near:
                state.layout.pool.holds.end(held)
            return None
        self._unmark(copy)
        state.requests[request].load = None
        state.layout.manager.cache(request, copy.tokens)
        request.num_computed_tokens = self._counted(request, copy.tokens)
        return request

    def forget(self, request: Request, record: RequestState) -> None:
        """Forget the request: release what was kept for it, and give back what a load in flight brings.

        A copy isn't cancelled, so its blocks on the device stay out of the pool until it has landed.
        """
        self._release(record)
        record.fetch = None
        copy = record.load
        if copy is not None:
            layout = self.state.layout
            self._unmark(copy)
            copy.request = None
            copy.near = [
                layout.hold_slots(request, piece.group, low, copy.tokens // layout.block_sizes[piece.group])
                for piece, low in zip(copy.pieces, copy.first_block)
            ]
            record.load = None

    def _release(self, record: RequestState) -> None:
        for store, held in reversed(record.keep):
            store.pool.holds.end(held)
        record.keep = []


def _by_tier(fetched: list[int], tokens: int) -> list[int]:
    """``tokens`` that a load brings by the tier that had them; ``fetched`` says how many came from each or from below it."""
    by_tier = [0] * len(fetched)
    below = 0
    for level in range(len(fetched) - 1, 0, -1):
        from_here_on = min(max(fetched[level], below), tokens)
        by_tier[level] = from_here_on - below
        below = from_here_on
    by_tier[0] = tokens - below
    return by_tier
