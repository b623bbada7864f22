"""The block manager: the one facade over pool, groups and coordinator.

It builds these parts and manages a request's blocks: lookup, allocation, caching of loaded blocks, rollback of drafts,
preemption, release.

The need of an allocation is computed in full before anything changes, so a refused one has no effect except that it released
out-of-window blocks. Its tokens, left to right::

    | computed before | local hit | external (to be loaded) | new | look-ahead |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NoReturn

from kvyard.blocks.coordinator import Coordinator, Hit
from kvyard.blocks.eviction import eviction_with_hints
from kvyard.blocks.extent import Extent
from kvyard.blocks.geometry import check_amounts, check_drafts, check_retention, resolve_geometry
from kvyard.blocks.group import NO_HIT, Demand, Group, GroupHit, group_class
from kvyard.blocks.hints import NO_HINTS, Hints
from kvyard.blocks.integrity import check_manager
from kvyard.blocks.ownership import end_session
from kvyard.blocks.pool import Pool, RadixTree
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.radix import RadixGroup
from kvyard.blocks.request import Request, RequestError
from kvyard.blocks.spec import GroupSpec
from kvyard.blocks.step import Stepper
from kvyard.blocks.table import BlockTable
from kvyard.events.types import Sink


class BlockManager:
    """Blocks for requests over hybrid groups with prefix caching."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        *,
        caching: bool = True,
        reuses: bool = True,
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        max_model_len: int = 1 << 20,
        max_in_flight_tokens: int | None = None,
        watermark: float = 0.0,
        retention_interval: int | None = None,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        junction_checkpoints: bool = False,
        context_shards: int = 1,
        eviction: str = "lru",
        hints: bool = False,
        quotas: Quotas | None = None,
        eviction_options: Mapping[str, float] | None = None,
        sink: Sink | None = None,
        now: Callable[[], int] | None = None,
        radix: RadixTree | None = None,
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        """Without ``reuses`` blocks are cached for lower tiers alone, and no request finds them here. ``hints``: requests may
        announce when their session ends or comes back. This needs an eviction policy that reads priorities; ``lru`` does
        with hints, and is plain LRU without. ``quotas``: shares of tenants (``RequestFacts.tenant``).
        ``junction_checkpoints``: states are kept where a sibling stopped, also inside a block, next to a draft head.
        ``context_shards``: ranks that share the tokens of a block of full attention, whose block size includes them.
        ``radix``: one group of full attention is cached in a radix tree. Raises ``ConfigError`` for settings that can't be
        combined.
        """
        self.geometry = resolve_geometry(
            groups,
            caching=caching,
            hash_block_size=hash_block_size,
            scheduler_block_size=scheduler_block_size,
            context_shards=context_shards,
        )
        in_flight = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        check_retention(retention_interval, groups, self.geometry.scheduler_block_size)
        check_amounts(
            watermark,
            max_model_len=max_model_len,
            max_in_flight_tokens=in_flight,
            num_prefill_lookahead=num_prefill_lookahead,
        )
        pairs = use_eagle and radix is not None and radix.states is None
        if radix is not None:
            use_eagle = False  # the tree is of pairs, and hits are whole
        if use_eagle or any(spec.eagle for spec in groups):
            check_drafts(groups, self.geometry, caching, num_prefill_lookahead)
        order = eviction_with_hints(eviction) if hints else eviction
        pool = Pool(
            num_blocks,
            len(groups),
            eviction=order,
            eviction_options=eviction_options,
            sink=sink,
            now=now or (lambda: 0),
            radix=radix,
            quotas=quotas,
        )
        self.pool = pool
        self.caching = caching
        self.reuses = reuses
        self.groups = self._make_groups(groups, in_flight, max_model_len)
        self.coordinator = coordinator(
            self.groups,
            self.geometry,
            use_eagle=use_eagle,
            retention=retention_interval,
            margin=max(0, num_prefill_lookahead - 1),
        )
        drafts = use_eagle or any(spec.eagle for spec in groups)
        self.marks_junctions = (
            junction_checkpoints and self.geometry.fine_hits and num_prefill_lookahead <= 1 and drafts
        )
        """True if states are kept where a sibling stopped."""
        for group in self.groups:
            group.marks_junctions = self.marks_junctions
            group.shares = group.shares and caching
        self.tree = self.groups[0] if isinstance(self.groups[0], RadixGroup) else None
        """The radix tree, if there is one."""
        if self.tree is not None:
            self.tree.caches = caching
            self.tree.pairs = int(pairs)
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)
        self.requests: dict[str, Request] = {}
        """Requests that hold blocks, or did when a call last failed, by id."""
        self._stepper = Stepper(self.coordinator, caching, max_model_len)
        self._cacheable = [group.spec.attention.cacheable for group in self.groups]
        self._plain = self._stepper.plain
        self._bounded = self.coordinator.estimates or any(group.cap is not None for group in self.groups)
        self._chain_size = self.geometry.hash_block_size
        self.keeps_by_priority = pool.order.reads_priorities
        """True if the eviction policy of any tier reads a request's ``retention``; lower tiers set it too."""
        self.quotas = quotas
        self.hints = hints
        """True if the hints of requests affect eviction."""
        learner = pool.learner
        self.reads_time = pool.order.reads_priorities or (learner is not None and learner.reads_time)
        """True if the eviction policy depends on the clock."""
        self.reads_queue = learner is not None and learner.reads_queue
        """True if it reads the waiting requests (``note_queue``)."""
        self._has_clock = now is not None
        self._nothing: tuple[Sequence[int], ...] = tuple(() for _ in groups)
        self._no_hits = [NO_HIT] * len(groups)
        self.begin_step()

    def _make_groups(self, specs: Sequence[GroupSpec], in_flight: int, max_model_len: int) -> list[Group]:
        unit, pool = self.geometry.hash_block_size, self.pool
        return [
            (RadixGroup if pool.tree is not None else group_class(spec, self.caching, unit))(
                index, spec, pool, hash_block_size=unit, max_in_flight=in_flight, max_model_len=max_model_len
            )
            for index, spec in enumerate(specs)
        ]

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1; cached blocks without a reference don't count."""
        return self.pool.usage

    def begin_step(self) -> None:
        """Begin a scheduler step: states registered in the previous one may be read now.

        With state groups this must be called once per step; others don't need it.
        """
        for group in self.groups:
            group.begin_step()

    def lookup(self, request: Request) -> Hit:
        """Return the longest cached prefix of ``request`` that all groups can use. Changes nothing but one field of the request
        (``shared_prefix_boundary``), by which a later registration chooses states to keep. Raises ``RequestError`` for
        a chain of another block size.
        """
        if not (self.caching and self.reuses and request.reads_cache):
            return Hit(request, 0, self._no_hits, 0, self.pool.version)
        if request.chain.block_size != self._chain_size:
            self._refuse_chain(request)
        hit = self.coordinator.lookup(request)
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        return hit

    # -- allocation ----------------------------------------------------------------------------------------------------

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit | None = None,
        *,
        external: int = 0,
        lookahead: int = 0,
        encoder: int = 0,
        delay_caching: bool = False,
        must_fit: bool = False,
        reserved: int = 0,
        has_running: bool = True,
    ) -> tuple[Sequence[int], ...] | None:
        """Give ``request`` slots for ``num_new_tokens`` more tokens, adopting ``hit`` first if it is its first time.

        ``external`` tokens after the hit will be loaded from elsewhere; ``lookahead`` slots are for drafts; ``encoder``
        tokens are for cross attention. ``must_fit`` refuses unless the whole sequence fits, ``reserved`` free blocks are
        left to others, and the watermark is too while others are running (``has_running``). With ``delay_caching``
        nothing is registered until ``cache`` is called after the load.

        Returns the new block ids per group (adopted ones not included), or ``None`` if too few are free; then nothing has
        changed but the release of blocks no longer in any window. The scheduler advances ``num_computed_tokens``.

        Raises ``RequestError``, changing nothing, for negative counts, nothing to do, an id that another request uses, a
        chain of another block size, a stale hit, or hits for a request that runs already.
        """
        if num_new_tokens > 0 <= lookahead and not (
            hit or external or must_fit or reserved or delay_caching or encoder
        ):
            # A step of a running request, and mostly one that fits, frees nothing and completes no block.
            computed = request.num_computed_tokens
            slots = computed + num_new_tokens + lookahead
            if slots <= request.quiet_until:
                return self._nothing
            if request.running and self.requests.get(request.id) is request:
                if self._plain and slots <= self.max_model_len:
                    return self._stepper.step(request, computed, computed + num_new_tokens, slots)
                return self._provide(request, self._no_hits, computed, 0, num_new_tokens, lookahead)
        hits = self._check(request, num_new_tokens, hit, external, lookahead, encoder, reserved)
        local = request.num_computed_tokens + (hit.tokens if hit is not None else 0)
        # Blocks left to others: reserved ones, and the watermark unless no other request runs.
        spare = 0 if request.running or not has_running else self.watermark_blocks
        fits = False
        if must_fit:
            total = min(local + external, self.max_model_len)
            whole = min(request.chain.num_tokens, self.max_model_len)
            demand = Demand(whole, whole, local, total, encoder, True)
            if self.coordinator.need(request, hits, demand) + spare > self.pool.free:
                if request.id not in self.requests:
                    request.tables = []
                return None
            # If no group has a cap, part of a sequence that fits fits too.
            fits = not (self._bounded or reserved) and total + num_new_tokens + lookahead <= whole
        taken = self._provide(
            request, hits, local, external, num_new_tokens, lookahead, encoder, delay_caching, spare + reserved, fits
        )
        if request.id not in self.requests:
            request.tables = []
        return taken

    def hold(self, request: Request, hit: Hit) -> None:
        """Adopt ``hit`` for a request that holds nothing yet; ``allocate`` gives it slots for more tokens later."""
        self.requests[request.id] = request
        request.tables = self._tables(request)
        self.coordinator.adopt(request, hit.groups, hit.tokens, 0)

    def remaining(self, request: Request) -> int:
        """Return the number of free blocks that ``request`` would need for all its known tokens, as counted for admission.
        Raises ``RequestError`` if it holds nothing here.
        """
        self._holding(request)
        whole, computed = min(request.chain.num_tokens, self.max_model_len), request.num_computed_tokens
        return self.coordinator.need(request, self._no_hits, Demand(whole, whole, computed, computed, 0, True))

    def _provide(
        self,
        request: Request,
        hits: Sequence[GroupHit],
        local: int,
        external: int,
        new: int,
        lookahead: int,
        encoder: int = 0,
        delay_caching: bool = False,
        spare: int = 0,
        fits: bool = False,
    ) -> tuple[Sequence[int], ...] | None:
        """Release stale blocks, check that the others are available while ``spare`` blocks stay free, and take them.

        ``fits`` means that they are known to be available.
        """
        groups, tables, pool = self.groups, request.tables, self.pool
        total = min(local + external, self.max_model_len)
        main = total + new
        processed = total - request.num_in_flight_tokens
        if processed > request.settled_until:
            for group, table in zip(groups, tables):
                if table.starts:
                    group.drop_stale(request, table, max(0, processed))
        slots = min(main + lookahead, self.max_model_len)
        taken = self._nothing
        if slots > request.fits_until:
            demand = Demand(slots, main, local, local + external, encoder)
            if not fits and not self.coordinator.fits(request, hits, demand, spare):
                return None
            self.requests[request.id] = request
            if external or hits is not self._no_hits:
                self.coordinator.adopt(request, hits, local, external)
            taken = tuple([group.take_new(table, demand) for group, table in zip(groups, tables)])
        elif spare > pool.free:
            return None
        tokens = min(main, request.chain.num_tokens)
        if tokens > request.registered_until and self.caching and not delay_caching and self.tree is None:
            self.coordinator.register(request, tokens)
        if request.running:
            self._stepper.note_limits(request)
        return taken

    def _check(
        self, request: Request, new: int, hit: Hit | None, external: int, lookahead: int, encoder: int, reserved: int
    ) -> Sequence[GroupHit]:
        """Refuse invalid calls; make tables for a request that has none. Returns the hits to adopt."""
        if new < 0 or external < 0 or lookahead < 0 or encoder < 0 or reserved < 0:
            raise RequestError(f"request {request.id}: token and block counts must not be negative")
        if self.requests.get(request.id, request) is not request:
            raise RequestError(f"request id {request.id!r} is in use by another request")
        if request.tables and request.id not in self.requests:
            raise RequestError(f"request {request.id} holds blocks of another manager")
        if self.caching and request.chain.block_size != self._chain_size:
            self._refuse_chain(request)
        if request.hints is not NO_HINTS:
            self._check_hints(request)
        if not new and not external and not (hit is not None and hit.tokens):
            raise RequestError(f"request {request.id}: nothing to allocate (no new, external or hit tokens)")
        hits: Sequence[GroupHit] = self._no_hits
        if hit is not None and (hit.tokens or any([group_hit.blocks for group_hit in hit.groups])):
            if hit.request is not request:
                raise RequestError(f"request {request.id}: the hit belongs to request {hit.request.id}")
            if hit.version != self.pool.version:
                raise RequestError(f"request {request.id}: the hit is out of date, look it up again")
            if request.num_computed_tokens or self.coordinator.has_adopted(request):
                raise RequestError(f"request {request.id} runs already and can't adopt hits again before a preemption")
            hits = hit.groups
        if not request.tables:
            request.tables = self._tables(request)
        return hits

    def _tables(self, request: Request) -> list[BlockTable]:
        """Return empty tables for ``request``, charged to its tenant."""
        tables = [BlockTable() for _ in self.groups]
        if request.facts.tenant:
            account = self.pool.open_ledger().account(request.facts.tenant)
            for table in tables:
                table.account = account
        return tables

    def _check_hints(self, request: Request) -> None:
        hints = request.hints
        if hints.marks and not self.hints:
            raise RequestError(f"request {request.id} says when its session ends or comes back: that needs hints=True")
        if request.retention and not self.keeps_by_priority:
            raise RequestError(f'request {request.id} asks for retention: that needs eviction="priority"')
        timed = hints.ttl is not None or any(directive.duration is not None for directive in request.retention)
        if timed and not self._has_clock:
            raise RequestError(f"request {request.id} asks for a retention duration: that needs a clock (now=)")

    def _refuse_chain(self, request: Request) -> NoReturn:
        raise RequestError(
            f"request {request.id}: its chain has blocks of {request.chain.block_size} tokens, "
            f"here they have {self._chain_size}"
        )

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def cache(self, request: Request, num_tokens: int) -> None:
        """Register the blocks of the first ``num_tokens`` tokens, once an asynchronous load has filled them."""
        self._holding(request)
        slots = min(
            # A cross group's slots are for the encoder's tokens, and never cached.
            table.length * group.block_size if cacheable else request.num_tokens
            for group, table, cacheable in zip(self.groups, request.tables, self._cacheable)
        )
        if not 0 <= num_tokens <= min(request.num_tokens, slots):
            raise RequestError(
                f"request {request.id} has {request.num_tokens} tokens and {slots} slots, can't cache {num_tokens}"
            )
        if self.caching:
            self.coordinator.register(request, num_tokens)
            request.forget_limits()

    def hand_over(self, request: Request, block_ids: list[int]) -> None:
        """Give a running request of a manager with one group blocks that were taken from the pool for it."""
        self._holding(request)
        request.tables[0].add_blocks(block_ids)
        self._stepper.note_limits(request)

    def note_limits(self, request: Request) -> None:
        """Compute how many tokens a running request can add before it needs the manager (see ``blocks.step``)."""
        self._holding(request)
        self._stepper.note_limits(request)

    def drop_stale(self, request: Request, num_tokens: int) -> None:
        """Release the blocks that are never read again once ``num_tokens`` tokens are computed."""
        self._holding(request)
        if num_tokens < 0:
            raise RequestError(f"request {request.id}: token counts must not be negative")
        for group, table in zip(self.groups, request.tables):
            group.drop_stale(request, table, num_tokens)
        request.forget_limits()

    def rollback(self, request: Request, num_tokens: int) -> None:
        """Take back ``num_tokens`` computed tokens: drafts that were rejected. Their slots stay with the request."""
        self._holding(request)
        if not 0 <= num_tokens <= request.num_computed_tokens:
            raise RequestError(
                f"request {request.id} has computed {request.num_computed_tokens} tokens, can't take back {num_tokens}"
            )
        request.num_computed_tokens -= num_tokens

    def free(self, request: Request) -> None:
        """Free all blocks of the request. Registered blocks stay findable until they are evicted.

        Raises ``RequestError`` if the request holds nothing here.
        """
        self._release(request, request.hints)

    def _release(self, request: Request, hints: Hints) -> None:
        self._holding(request)
        del self.requests[request.id]
        if self.hints:
            self._claim(request, hints)
        for group, table in zip(self.groups, request.tables):
            group.release(request, table)
        request.tables = []
        request.running = False
        request.forget_limits()

    def _claim(self, request: Request, hints: Hints) -> None:
        session = request.hints.session or request.id
        for group, table in zip(self.groups, request.tables):
            group.claim(request, table, session, hints)

    def end_session(self, session: str) -> int:
        """``session`` is over: blocks that it alone has used, and that are free, are the first to be evicted. Returns how many.

        For clients that say so afterwards; a request can say it itself (``Hints.session_end``). Without ``hints`` there are
        none. Takes time by the number of free extents.
        """
        return end_session(self.pool.order, session) if self.hints else 0

    def detach(self, request: Request) -> list[BlockTable]:
        """Remove the request as ``free`` does, but keep its blocks held until ``pool.holds.end_all`` receives the result.

        For an engine that has a step in flight which still writes to them. Raises ``RequestError`` if the request holds
        nothing here.
        """
        self._holding(request)
        del self.requests[request.id]
        if self.hints:
            self._claim(request, request.hints)
        tables = request.tables
        for group, table in zip(self.groups, tables):
            group.note_use(request, group.let_chain_go(request, table))
        self.pool.holds.tables.update(tables)
        request.tables = []
        request.running = False
        request.forget_limits()
        return tables

    def preempt(self, request: Request) -> None:
        """Give all blocks back and have the request start over; its next allocation may adopt hits again."""
        self._release(request, NO_HINTS)  # it isn't over
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    def note_queue(self, waiting: Iterable[Request]) -> None:
        """Pass the cached extents that ``waiting`` requests would hit, the next request first, to a policy that uses them."""
        learner = self.pool.learner
        if learner is None:
            return
        first = islice(waiting, learner.queue_depth)
        requests = [request if request.reads_cache and not request.tables else None for request in first]
        wanted: list[list[Extent]] = []
        for _ in range(2):  # one request may split an extent that another has matched before
            wanted = [
                [] if request is None else [e for group in self.groups for e in group.cached_extents(request)]
                for request in requests
            ]
        learner.protect(wanted)

    def evict(self, block_ids: Iterable[int]) -> None:
        """Unregister these physical blocks; requests that hold them keep them.

        Raises ``ValueError``, changing nothing, for an id outside the pool. Takes time by ids times cached blocks.
        """
        self.pool.evict(block_ids)

    def reset(self) -> bool:
        """Evict everything cached, if no request holds a block; returns true if it did."""
        return self.pool.reset()

    def block_ids(self, request: Request) -> list[list[int]]:
        """Return the request's block tables, one list of physical ids per group, 0 for null."""
        return [table.ids() for table in request.tables] or [[] for _ in self.groups]

    def take_copies(self) -> list[tuple[int, int]]:
        """Drain the block copies that the engine must run before its next step, as (source, destination).

        Both ends were held until now: a hit that ends inside a block is continued on a private copy.
        """
        pairs = [pair for group in self.groups for pair in group.take_copies()]
        self.pool.holds.end_copies([extent for pair in pairs for extent in pair])
        return [(source.ids[0], target.ids[0]) for source, target in pairs]

    def _holding(self, request: Request) -> None:
        if self.requests.get(request.id) is not request:
            raise RequestError(f"request {request.id!r} holds no blocks here")

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless invariants I1 to I3 hold."""
        check_manager(self.pool, self.requests.values())
