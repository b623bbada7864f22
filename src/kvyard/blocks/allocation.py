"""Allocation: who may have how many blocks, and when.

An allocation is predicted in full before anything is touched, so a refused one leaves no trace except the out-of-window blocks
it released on the way. What becomes of blocks later, from caching to release, is the manager's other half.

Token layout of an allocation, left to right::

    | computed before | local hit | external (to be loaded) | new | look-ahead |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kvyard.blocks.coordinator import Coordinator, Hit
from kvyard.blocks.demand import NO_HIT, Demand, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.step import Stepper
from kvyard.blocks.table import Table
from kvyard.errors import KvyardError


class RequestError(KvyardError, ValueError):
    """A call that makes no sense for this request; nothing was changed."""


class Allocator:
    """Gives slots to requests: the half of ``BlockManager`` that decides."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        caching: bool,
        max_model_len: int,
        watermark_blocks: int,
        has_clock: bool,
    ) -> None:
        self.coordinator = coordinator
        self.groups = coordinator.groups
        self.pool = coordinator.groups[0].pool
        self.caching = caching
        self.max_model_len = max_model_len
        self.watermark_blocks = watermark_blocks
        self.requests: dict[str, Request] = {}
        """Requests that hold blocks, or did when a call last failed, by id."""
        self._stepper = Stepper(coordinator, caching, max_model_len)
        self._step = self._stepper.step
        self._plain = self._stepper.plain
        self._bounded = coordinator.estimates or any(group.cap is not None for group in self.groups)
        self._chain_size = coordinator.geometry.hash_block_size
        self.keeps_by_priority = self.pool.order.reads_priorities
        """Whether the eviction order of any tier makes something of a request's ``retention``; lower tiers set it too."""
        self._has_clock = has_clock
        self._nothing: tuple[Sequence[int], ...] = tuple(() for _ in self.groups)
        self._no_hits = [NO_HIT] * len(self.groups)

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
        nothing is registered until ``cache`` says that a load is done.

        Returns the new block ids per group (adopted ones not included), or ``None`` if they can't be had; then nothing has
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
                    return self._step(request, computed, computed + num_new_tokens, slots)
                return self._provide(request, self._no_hits, computed, 0, num_new_tokens, lookahead)
        return self._admit(
            request, num_new_tokens, hit, external, lookahead, encoder, delay_caching, must_fit, reserved, has_running
        )

    def _admit(
        self,
        request: Request,
        new: int,
        hit: Hit | None,
        external: int,
        lookahead: int,
        encoder: int,
        delay_caching: bool,
        must_fit: bool,
        reserved: int,
        has_running: bool,
    ) -> tuple[Sequence[int], ...] | None:
        """The careful way: check the call, and the whole sequence if it must fit, then provide."""
        hits = self._check(request, new, hit, external, lookahead, encoder, reserved)
        local = request.num_computed_tokens + (hit.tokens if hit is not None else 0)
        # What is left to others: reserved blocks, and the watermark unless no other request runs.
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
            # Where no group has a cap, what fits as a whole fits in part.
            fits = not (self._bounded or reserved) and total + new + lookahead <= whole
        taken = self._provide(
            request, hits, local, external, new, lookahead, encoder, delay_caching, spare + reserved, fits
        )
        if request.id not in self.requests:
            request.tables = []
        return taken

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
        """Release what is stale, see whether the rest can be had while ``spare`` blocks stay free, and take it.

        ``fits`` says that it is known to be had.
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
        if tokens > request.registered_until and self.caching and not delay_caching:
            self.coordinator.register(request, tokens)
        if request.running:
            self._stepper.note_limits(request)
        return taken

    def _check(
        self, request: Request, new: int, hit: Hit | None, external: int, lookahead: int, encoder: int, reserved: int
    ) -> Sequence[GroupHit]:
        """Refuse calls that make no sense; make tables for a request that has none. Returns the hits to adopt."""
        if new < 0 or external < 0 or lookahead < 0 or encoder < 0 or reserved < 0:
            raise RequestError(f"request {request.id}: token and block counts must not be negative")
        if self.requests.get(request.id, request) is not request:
            raise RequestError(f"request id {request.id!r} is in use by another request")
        if request.tables and request.id not in self.requests:
            raise RequestError(f"request {request.id} holds blocks of another manager")
        if self.caching and request.chain.block_size != self._chain_size:
            self._refuse_chain(request)
        if request.retention:
            self._check_wishes(request)
        if not new and not external and not (hit is not None and hit.tokens):
            raise RequestError(f"request {request.id}: nothing to allocate (no new, external or hit tokens)")
        hits: Sequence[GroupHit] = self._no_hits
        if hit is not None and (hit.tokens or not hit.empty):
            if hit.request is not request:
                raise RequestError(f"request {request.id}: the hit belongs to request {hit.request.id}")
            if hit.version != self.pool.version:
                raise RequestError(f"request {request.id}: the hit is out of date, look it up again")
            if request.num_computed_tokens or self.coordinator.has_adopted(request):
                raise RequestError(f"request {request.id} runs already and can't adopt hits again before a preemption")
            hits = hit.groups
        if not request.tables:
            request.tables = [Table() for _ in self.groups]
        return hits

    def _check_wishes(self, request: Request) -> None:
        if not self.keeps_by_priority:
            raise RequestError(f'request {request.id} wishes for retention: that needs eviction="priority"')
        if any(wish.duration is not None for wish in request.retention) and not self._has_clock:
            raise RequestError(f"request {request.id} wishes for a duration: that needs a clock (now=)")

    def _refuse_chain(self, request: Request) -> NoReturn:
        raise RequestError(
            f"request {request.id}: its chain has blocks of {request.chain.block_size} tokens, "
            f"here they have {self._chain_size}"
        )
