"""States (Mamba, linear attention): a block holds a running state instead of tokens.

A state registered in a step can't be read in that same step: it is written when the step ends. In *align* mode the table is
sparse, since a step writes the state it ends with and nothing in between.
"""

from collections.abc import Sequence
from typing import ClassVar

from kvyard.blocks.extent import Extent
from kvyard.blocks.fine import adopt_inside, continue_on_copy, mark_of
from kvyard.blocks.group import Demand, Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.rule import NO_MATCH, Match, Rule
from kvyard.blocks.spans import Spans, clip
from kvyard.blocks.spec import Attention, ConfigError, GroupSpec
from kvyard.blocks.table import Table
from kvyard.errors import suggest
from kvyard.hashing import Key
from kvyard.integers import ceil_div

STATE_MODES = ("none", "all", "align")


class StateRule(Rule):
    """State (Mamba) groups: one state at the boundary is all a hit needs, and all earlier ones are stale."""

    forgets: ClassVar[bool] = True

    def stale(self, computed: int) -> int:
        return max(0, computed - 1)

    def fresh_until(self, position: int) -> int:
        return (position + 1) * self.block_size

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> Match:
        # No drop: draft heads have no state layers.
        size = self.block_size
        blocks = limit // size
        period = max(1, alignment // size)
        for low, high in reversed(spans):
            end = min(high, blocks)
            end -= end % period
            if end > low:
                return Match(end * size, end - 1)
        return NO_MATCH

    def keeps_all(self, alignment: int, eagle: bool, retention: int | None) -> bool:
        return retention is None or 0 < retention < 2 * self.block_size

    def worth(
        self, first: int, last: int, alignment: int, eagle: bool, retention: int | None, boundaries: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        if self.keeps_all(alignment, eagle, retention):
            return None
        size = self.block_size
        kept: list[tuple[int, int]] = []
        if retention:
            period = retention // size
            kept += [(end - 1, end) for end in range((first // period + 1) * period, last + 1, period)]
        for boundary in boundaries:
            end = boundary // alignment * alignment // size
            kept.append((end - 1, end))
        return clip(kept, first, last)


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
        if hit.tail is not None and hit.tail.node is None:
            assert hit.tail.marks is not None
            return hit.tail.marks.runs[0][0] in self._this_step
        return bool(hit.blocks) and self.chain_of(request).keys[hit.blocks - 1] in self._this_step

    def register(self, request: Request, table: Table, tokens: int) -> None:
        first = table.registered or 0
        super().register(request, table, tokens)
        last = table.registered or 0
        if first >= last:
            return
        keys = self.chain_of(request).keys
        for extent in table:
            if extent.node is not None:
                low, high = max(extent.start, first), min(extent.stop, last)
                self._this_step.update(keys[position] for position in range(low, high))


class _Progress:
    """State of an aligned state group for a request between steps."""

    __slots__ = ("inside", "started")

    def __init__(self) -> None:
        self.started = False
        """True once a step has been allocated: speculative blocks come with the first."""
        self.inside: Extent | None = None
        """The state that a prompt ends with inside a block: others may hit it, so it is not to be written again."""


class AlignedStateGroup(StateGroup):
    """Mode *align*: each step keeps one running state at its end, plus speculative ones behind it."""

    acts_every_step = True
    registers_always = True
    estimates = True

    def _progress(self, table: Table) -> _Progress:
        if table.state is None:
            table.state = _Progress()
        assert isinstance(table.state, _Progress)
        return table.state

    def required(self, demand: Demand) -> int:
        # Look-ahead tokens need no state: draft heads have no state layers.
        return ceil_div(demand.main, self.block_size) + self.spec.spec_blocks

    def need(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        """As vLLM predicts it: below nothing where drafts that were taken back left more than enough, and without the
        block of a state to be loaded.
        """
        if self._written_this_step(request, hit):
            return self.pool.num_blocks + 1
        inside = self._ends_inside(table, hit, demand)
        fresh = self.required(demand) - hit.blocks - table.length
        if inside:
            fresh = max(fresh, 0) + 1
        return min(fresh, self._most(table) + inside) + (hit.free_blocks(0) if hit.blocks else 0)

    def uses(self, request: Request, table: Table, hit: GroupHit, demand: Demand) -> int:
        length = table.length + hit.blocks
        loaded = skipped = 0
        if demand.total > demand.local:
            # A state that is loaded has a block of its own besides the running one.
            skipped = self.rule.stale(demand.total) // self.block_size
            loaded = max(0, ceil_div(demand.total, self.block_size) - max(length, skipped))
            length = max(length, skipped) + loaded
        fresh = min(max(self.required(demand) - length, 0), self._most(table))
        if not hit.blocks > skipped:
            return loaded + fresh + (self._progress(table).inside is not None)
        return loaded + fresh + self._ends_inside(table, hit, demand) + hit.free_blocks(skipped)

    def _most(self, table: Table) -> int:
        """The most blocks that a step takes: one to write its state to, and speculative ones if it is the first."""
        return 1 if self._progress(table).started else 1 + self.spec.spec_blocks

    def _ends_inside(self, table: Table, hit: GroupHit, demand: Demand) -> bool:
        """Return true if the step begins inside a block that others may hit, so that one more is needed for a copy."""
        return self._progress(table).inside is not None or bool(hit.blocks and demand.local % self.block_size)

    def take_new(self, table: Table, demand: Demand) -> list[int]:
        progress = self._progress(table)
        spec = self.spec.spec_blocks
        required = self.required(demand)
        before = table.length
        inside = progress.inside
        if required <= before and inside is None:
            progress.started = True
            return []
        running = required - spec - 1
        if before < running:
            table.length = running
        moved: list[int] = []
        if progress.started:
            for position in range(before - spec, min(before, running)):
                moved += self._move_to_end(table, position)
        # Positions between the steps are null and reported as such.
        new = [0] * (table.length - len(moved) - before) + moved
        ids = self.pool.take(max(required - table.length, 0) + (inside is not None), table.account)
        if inside is not None:
            progress.inside = None
            if progress.started:
                self._preserve(inside, ids[:1], table.account)
            else:
                new = continue_on_copy(self, table, inside, ids[:1]) + new
            ids = ids[1:]
        progress.started = True
        if ids:
            table.add_blocks(ids.copy())
        return new + ids

    def _preserve(self, source: Extent, fresh: list[int], account: int) -> None:
        """Keep the state in ``source`` findable in a copy: its request is about to write on, in the same block."""
        copy = Extent(fresh, source.start)
        copy.account = account
        self.map.move_marks(source, copy)
        source.refs += 1
        self.copies.append((source, copy))
        self.pool.pinned.update((source, copy))
        if copy.marks is not None:
            self._this_step.add(copy.marks.runs[0][0])

    def adopt(self, table: Table, hit: GroupHit, local: int, external: int) -> None:
        self._progress(table).inside = adopt_inside(self, table, hit, local, external)

    def register(self, request: Request, table: Table, tokens: int) -> None:
        super().register(request, table, tokens)
        unit = self.hash_block_size
        boundary = (request.num_prompt_tokens - (not self.use_eagle)) // unit * unit - (unit if self.use_eagle else 0)
        position = ceil_div(tokens, self.block_size) - 1
        if tokens <= 0 or tokens != boundary or position >= table.length:
            return
        block = self._block_at(table, position)
        if block is None:
            return
        run = mark_of(request, tokens, unit)
        self._this_step.add(run[0])
        if tokens % self.block_size:
            self.map.mark(block, run)
            self._progress(table).inside = block
            table.registered = position
        elif block.node is None:
            if self.watch is not None:
                self.watch(request, self, position, position)
            self.map.enter(self.chain_of(request), block)

    def _move_to_end(self, table: Table, position: int) -> list[int]:
        """Move the (private, unnamed) block at ``position`` behind the last one and leave a null there."""
        block = self._block_at(table, position)
        assert block is not None
        table.replace(table.extents.index(block), [])
        block.forget_neighbours()
        block.start = table.length
        table.append(block)
        return block.ids


def _check(spec: GroupSpec, where: str) -> None:
    if spec.mode not in STATE_MODES:
        raise ConfigError(f"{where}: unknown state mode {spec.mode!r}: {suggest(spec.mode, STATE_MODES)}")
    if spec.spec_blocks < 0:
        raise ConfigError(f"{where}: spec_blocks must not be negative, got {spec.spec_blocks}")


MAMBA = Attention(
    wire="mamba",
    is_state=True,
    fields=("mode", "spec_blocks"),
    rule=lambda spec: StateRule(spec.block_size),
    check=_check,
    group_class=lambda spec, caching, hash_block_size: AlignedStateGroup if spec.mode == "align" else StateGroup,
)
