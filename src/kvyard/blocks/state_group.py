"""State (Mamba) groups: what differs when a block holds a running state instead of tokens.

A state registered in a step can't be read in that same step: it is written when the step ends. In *align* mode the table is
sparse, since a step writes the state it ends with and nothing in between.
"""

from __future__ import annotations

from math import inf

from kvyard.blocks.group import Demand, Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.table import Table
from kvyard.hashing import Key


class StateGroup(Group):
    """Modes *none* (one state per request, no caching) and *all* (a state per block)."""

    _this_step: set[Key]

    def begin_step(self) -> None:
        self._this_step = set()

    def required(self, demand: Demand) -> int:
        return super().required(demand) + self.spec.spec_blocks

    def need(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        if self._written_this_step(request, hit):
            # More than there can ever be: the request has to wait a step.
            return self.pool.num_blocks + 1
        return super().need(request, table, hit, demand)

    def _written_this_step(self, request: Request, hit: GroupHit) -> bool:
        return bool(hit.count) and request.view(self.block_size).keys[hit.count - 1] in self._this_step

    def register(self, request: Request, table: Table, tokens: int, alignment: int, retention: int | None) -> None:
        first = table.registered or 0
        super().register(request, table, tokens, alignment, retention)
        last = table.registered or 0
        if first >= last:
            return
        keys = request.view(self.block_size).keys
        for extent in table:
            if extent.node is not None:
                low, high = max(extent.start, first), min(extent.stop, last)
                self._this_step.update(keys[position] for position in range(low, high))

    def limits(self, table: Table) -> tuple[float, float]:
        fits, fresh = super().limits(table)
        return fits - self.spec.spec_blocks * self.block_size, fresh


class _Progress:
    """What an aligned state group remembers of a request between steps."""

    __slots__ = ("last_state", "started")

    def __init__(self) -> None:
        self.started = False
        """Whether a step has been allocated: speculative blocks come with the first."""
        self.last_state: int | None = None
        """The position of the state that the previous step wrote."""


class AlignedStateGroup(StateGroup):
    """Mode *align*: each step keeps one running state at its end, plus speculative ones behind it."""

    def _progress(self, table: Table) -> _Progress:
        if table.state is None:
            table.state = _Progress()
        assert isinstance(table.state, _Progress)
        return table.state

    def required(self, demand: Demand) -> int:
        # Look-ahead tokens need no state: draft heads have no state layers.
        return -(-demand.main // self.block_size) + self.spec.spec_blocks

    def need(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        if self._written_this_step(request, hit):
            return self.pool.num_blocks + 1
        fresh = self.required(demand) - hit.count - table.length
        if fresh > 0:
            fresh = min(fresh, 1 if self._progress(table).started else 1 + self.spec.spec_blocks)
        return fresh + (hit.free_blocks(0) if hit.count else 0)

    def take_new(self, table: Table, demand: Demand) -> list[int]:
        progress = self._progress(table)
        spec = self.spec.spec_blocks
        required = self.required(demand)
        before = table.length
        if required <= before:
            progress.started = True
            return []
        if progress.started:
            progress.last_state = before - 1 - spec
        elif before:
            progress.last_state = before - 1
        running = required - spec - 1
        if before < running:
            table.length = running
        moved: list[int] = []
        if progress.started:
            for position in range(before - spec, min(before, running)):
                moved += self._move_to_end(table, position)
        progress.started = True
        # Positions between the steps are null and reported as such.
        passed = [0] * (table.length - len(moved) - before)
        return passed + moved + self._take(table, max(required - table.length, 0))

    def _move_to_end(self, table: Table, position: int) -> list[int]:
        """Move the (private, unnamed) block at ``position`` behind the last one and leave a null there."""
        extent = next(e for e in table if e.start <= position < e.stop)
        block = self.pool.isolate(extent, position - extent.start)
        index = table.settle().index(block)
        table.replace(index, [])
        block.forget_neighbours()
        block.start = table.length
        table.append(block)
        return block.ids

    def drop_stale(self, table: Table, processed: int) -> None:
        super().drop_stale(table, processed)
        last = self._progress(table).last_state
        if last is not None and last < -(-processed // self.block_size) - 1:
            for index, extent in enumerate(table):
                if extent.start <= last < extent.stop:
                    block = self.pool.isolate(extent, last - extent.start)
                    index = table.settle().index(block)
                    table.replace(index, [])
                    self.pool.release([block])
                    break

    def limits(self, table: Table) -> tuple[float, float]:
        # Every step moves the running state: there is no quiet stretch.
        return -inf, -inf
