"""Steps of a running request, with a fast path for those that change nothing.

A decode step mostly fits into the blocks the request has, frees nothing and completes no block. Limits, noted on the
request, bound how long that lasts, and turn each of these steps into one comparison (with ``quiet_until``, in
``BlockManager.allocate``). When a limit is passed, only its own work is done, and the limit is set again:

- ``fits_until``: tokens that have a slot;
- ``settled_until``: computed tokens up to which no block goes stale;
- ``registered_until``: tokens up to which no block is completed that can be registered.

This knows nothing of hits, loads or admission: a running request has none.
"""

from collections.abc import Sequence

from kvyard.blocks.coordinator import Coordinator
from kvyard.blocks.group import Group
from kvyard.blocks.request import Request
from kvyard.blocks.rule import ENDLESS
from kvyard.blocks.table import BlockTable
from kvyard.integers import ceil_div


class Stepper:
    """Steps over the groups of one manager, and the limits of its requests."""

    def __init__(self, coordinator: Coordinator, caching: bool, max_model_len: int) -> None:
        self.groups = coordinator.groups
        self.coordinator = coordinator
        self.pool = coordinator.groups[0].pool
        self.caching = caching and not any(group.inserts for group in coordinator.groups)
        self.max_model_len = max_model_len
        self.plain = all(type(group) is Group or group.inserts for group in self.groups)
        """True if ``step`` suffices: all groups are ordinary attention."""
        self._acts_every_step = any(group.acts_every_step for group in self.groups)
        self._forgetful = [(group.index, group) for group in self.groups if group.forgets]
        self._sizes = [group.block_size for group in self.groups]
        self._units = [(group.block_size, group.register_unit) for group in self.groups]
        self._nothing: tuple[Sequence[int], ...] = tuple(() for _ in self.groups)

    def step(self, request: Request, computed: int, reached: int, slots: int) -> tuple[Sequence[int], ...] | None:
        """Bring a running request from ``computed`` to ``reached`` tokens, with ``slots`` in all.

        Returns the new block ids per group, or ``None`` if they can't be had.
        """
        tables = request.tables
        processed = computed - request.num_in_flight_tokens
        if processed > request.settled_until:
            for index, group in self._forgetful:
                group.drop_stale(request, tables[index], processed if processed > 0 else 0)
            request.settled_until = self._settled_until(tables)
        taken = self._nothing
        if slots > request.fits_until:
            counts = [ceil_div(slots, size) - table.length for size, table in zip(self._sizes, tables)]
            need = sum(counts) if min(counts) >= 0 else sum([count for count in counts if count > 0])
            if need > self.pool.free:
                return None
            taken = self._take(tables, counts, need)
            request.fits_until = self._fits_until(tables)
        if reached > request.registered_until:
            if self.caching:
                tokens = request.chain.num_tokens
                self.coordinator.register(request, reached if reached < tokens else tokens)
            request.registered_until = self._registered_until(tables)
        _note_quiet(request)
        return taken

    def _take(self, tables: list[BlockTable], counts: list[int], need: int) -> tuple[Sequence[int], ...]:
        """Take all blocks at once: which group gets which is the same as one group after the other."""
        ids = self.pool.take(need, tables[0].account)
        taken: list[Sequence[int]] = []
        start = 0
        for table, count in zip(tables, counts):
            if count > 0:
                to = start + count
                table.add_blocks(ids[start:to])
                taken.append(ids[start:to])
                start = to
            else:
                taken.append([])
        return tuple(taken)

    def note_limits(self, request: Request) -> None:
        """Write onto ``request`` up to where its tokens fit, nothing goes stale, and nothing is to be registered."""
        if self._acts_every_step:
            request.forget_limits()
            return
        tables = request.tables
        request.fits_until = self._fits_until(tables)
        request.settled_until = self._settled_until(tables)
        request.registered_until = self._registered_until(tables)
        _note_quiet(request)

    def _fits_until(self, tables: list[BlockTable]) -> int:
        fits = self.max_model_len
        for group, table in zip(self.groups, tables):
            room = table.length * group.block_size - group.spare
            if room < fits:
                fits = room
        return fits

    def _settled_until(self, tables: list[BlockTable]) -> int:
        settled = ENDLESS
        for index, group in self._forgetful:
            table = tables[index]
            fresh = group.rule.fresh_until(table.starts[0] if table.starts else table.length)
            if fresh < settled:
                settled = fresh
        return settled

    def _registered_until(self, tables: list[BlockTable]) -> int:
        if not self.caching:
            return ENDLESS
        registered = ENDLESS
        for (size, unit), table in zip(self._units, tables):
            known = ceil_div(((table.registered or 0) + 1) * size, unit) * unit - 1 if unit else -1
            if known < registered:
                registered = known
        return registered


def _note_quiet(request: Request) -> None:
    """Note the number of tokens, slots for drafts included, up to which none of the three limits is
    reached (``quiet_until``).
    """
    # A step that reaches n tokens begins with fewer computed.
    quiet = request.settled_until + 1
    if request.fits_until < quiet:
        quiet = request.fits_until
    if request.registered_until < quiet:
        quiet = request.registered_until
    request.quiet_until = quiet
