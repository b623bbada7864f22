"""The block manager: the one facade over pool, groups and coordinator.

Here it is put together, and here is the life of a request's blocks around their allocation: looking up, caching what was
loaded, taking drafts back, preempting, releasing. Allocation itself is in ``allocation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvyard.blocks.allocation import Allocator, RequestError
from kvyard.blocks.coordinator import Coordinator, Hit
from kvyard.blocks.extent import Extent
from kvyard.blocks.geometry import check_options, resolve_geometry
from kvyard.blocks.group import group_class
from kvyard.blocks.integrity import check_manager
from kvyard.blocks.pool import Pool
from kvyard.blocks.request import Request
from kvyard.blocks.spec import GroupSpec
from kvyard.events.types import Sink, Tier


class BlockManager(Allocator):
    """Blocks for requests over hybrid groups with prefix caching."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        *,
        caching: bool = True,
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        max_model_len: int = 1 << 20,
        max_in_flight_tokens: int | None = None,
        watermark: float = 0.0,
        retention_interval: int | None = None,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        eviction: str = "lru",
        sink: Sink | None = None,
        tier: Tier = Tier.G1,
        now: Callable[[], int] | None = None,
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        """Raises ``ConfigError`` for anything the groups can't honour."""
        self.geometry = resolve_geometry(
            groups, caching=caching, hash_block_size=hash_block_size, scheduler_block_size=scheduler_block_size
        )
        in_flight = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        check_options(
            groups,
            self.geometry,
            caching=caching,
            use_eagle=use_eagle,
            retention_interval=retention_interval,
            watermark=watermark,
            max_model_len=max_model_len,
            max_in_flight_tokens=in_flight,
            num_prefill_lookahead=num_prefill_lookahead,
        )
        pool = Pool(num_blocks, len(groups), eviction=eviction, sink=sink, tier=tier, now=now or (lambda: 0))
        unit = self.geometry.hash_block_size
        made = [
            group_class(spec, caching, unit)(
                index, spec, pool, hash_block_size=unit, max_in_flight=in_flight, max_model_len=max_model_len
            )
            for index, spec in enumerate(groups)
        ]
        margin = max(0, num_prefill_lookahead - 1)
        super().__init__(
            coordinator(made, self.geometry, use_eagle=use_eagle, retention=retention_interval, margin=margin),
            caching=caching,
            max_model_len=max_model_len,
            watermark_blocks=int(watermark * num_blocks),
            has_clock=now is not None,
        )
        self.begin_step()

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1; cached blocks without a reference are not."""
        return self.pool.usage

    def begin_step(self) -> None:
        """A scheduler step begins: states registered in the previous one may be read now.

        With state groups this must be called once per step; others don't need it.
        """
        for group in self.groups:
            group.begin_step()

    def lookup(self, request: Request) -> Hit:
        """The longest cached prefix of ``request`` that all groups can use. Changes nothing but one hint on the request
        (``shared_prefix_boundary``), which tells a later registration what is worth keeping. Raises ``RequestError`` for
        a chain of another block size.
        """
        if not self.caching or not request.reads_cache:
            return Hit(request, 0, self._no_hits, 0, self.pool.version)
        if request.chain.block_size != self._chain_size:
            self._refuse_chain(request)
        hit = self.coordinator.lookup(request)
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        return hit

    def cache(self, request: Request, num_tokens: int) -> None:
        """Register the blocks of the first ``num_tokens`` tokens, once an asynchronous load has filled them."""
        self._holding(request)
        slots = min(
            # A cross group's slots are for the encoder's tokens, and never cached.
            table.length * group.block_size if group.spec.attention.cacheable else request.num_tokens
            for group, table in zip(self.groups, request.tables)
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
        """Work out how far a running request can go before anything is to be done for it (see ``blocks.step``)."""
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
        """Give all blocks back and forget the request. What was registered stays findable until it is evicted.

        Raises ``RequestError`` if the request holds nothing here.
        """
        self._holding(request)
        del self.requests[request.id]
        for group, table in zip(self.groups, request.tables):
            group.release(request, table)
        request.tables = []
        request.running = False
        request.forget_limits()

    def preempt(self, request: Request) -> None:
        """Give all blocks back and have the request start over; its next allocation may adopt hits again."""
        self.free(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    def evict(self, block_ids: Iterable[int]) -> None:
        """Forget what these physical blocks cache; who holds them keeps them.

        Raises ``ValueError``, changing nothing, for an id outside the pool. Takes time by ids times cached blocks.
        """
        self.pool.evict(block_ids)

    def reset(self) -> bool:
        """Forget everything cached, if no request holds a block; returns whether it did."""
        return self.pool.reset()

    def block_ids(self, request: Request) -> list[list[int]]:
        """The request's block tables, one list of physical ids per group, 0 for null."""
        return [table.ids() for table in request.tables] or [[] for _ in self.groups]

    def take_copies(self) -> list[tuple[int, int]]:
        """Drain the block copies that the engine must run before its next step, as (source, destination).

        Both ends were held for it until now: a hit that ends inside a block is continued on a private copy.
        """
        pairs: list[tuple[Extent, Extent]] = []
        for group in self.groups:
            pairs += group.copies
            group.copies = []
        ends = [extent for pair in pairs for extent in pair]
        self.pool.pinned.subtract(ends)
        self.pool.pinned = +self.pool.pinned
        ends.reverse()
        self.pool.release(ends)
        return [(source.ids[0], target.ids[0]) for source, target in pairs]

    def reference_counts(self) -> dict[int, int]:
        """How often each held block is held. Takes time by the number of held blocks."""
        counts: dict[int, int] = {}
        for request in self.requests.values():
            for table in request.tables:
                for extent in table:
                    counts.update(dict.fromkeys(extent.ids, extent.refs))
        for extent in (*self.pool.pinned, *(extent for held in self.pool.holds for extent in held)):
            counts.update(dict.fromkeys(extent.ids, extent.refs))
        return counts

    def _holding(self, request: Request) -> None:
        if self.requests.get(request.id) is not request:
            raise RequestError(f"request {request.id!r} holds no blocks here")

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless invariants I1 to I3 hold."""
        check_manager(self.pool, self.requests.values())
