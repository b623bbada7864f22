"""States (Mamba, linear attention): a block holds a running state instead of tokens.

A state registered in a step can't be read in that same step: it is written when the step ends. In *align* mode the table is
sparse, since a step writes the state it ends with, and in between at most the one at the point where a resend of the prompt
could continue (a *checkpoint*, where the backend has them).
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from kvyard.blocks.extent import Extent
from kvyard.blocks.fine import adopt_inside, continue_on_copy, mark_of
from kvyard.blocks.group import Demand, Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.rule import NO_MATCH, Rule, RuleMatch
from kvyard.blocks.spans import Spans, clip
from kvyard.blocks.spec import Attention, ConfigError, GroupSpec
from kvyard.blocks.table import BlockTable
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

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> RuleMatch:
        # No drop: draft heads have no state layers.
        size = self.block_size
        blocks = limit // size
        period = max(1, alignment // size)
        for low, high in reversed(spans):
            end = min(high, blocks)
            end -= end % period
            if end > low:
                return RuleMatch(end * size, end - 1)
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

    def need(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        if self._must_wait(request, hit):
            # More than there can ever be: the request has to wait a step.
            return self.pool.num_blocks + 1
        return super().need(request, table, hit, demand)

    def _must_wait(self, request: Request, hit: GroupHit) -> bool:
        """Return true if the hit's state is written in this very step."""
        if hit.tail is not None and hit.tail.node is None:
            assert hit.tail.marks is not None
            return hit.tail.marks.runs[0][0] in self._this_step
        return bool(hit.blocks) and self.chain_of(request).keys[hit.blocks - 1] in self._this_step

    def register(self, request: Request, table: BlockTable, tokens: int) -> None:
        first = table.registered or 0
        super().register(request, table, tokens)
        self._note_written(request, table, first, table.registered or 0)

    def _note_written(self, request: Request, table: BlockTable, first: int, last: int) -> None:
        """Note that this step writes the states registered at positions ``first`` to ``last``."""
        if first >= last:
            return
        keys = self.chain_of(request).keys
        for extent in table:
            if extent.node is not None:
                low, high = max(extent.start, first), min(extent.stop, last)
                self._this_step.update(keys[position] for position in range(low, high))


class KeptState(NamedTuple):
    """A registered state, for connectors that store it elsewhere."""

    request_id: str
    block_id: int
    tokens: int
    """Tokens that it is the state after."""


class _Progress:
    """State of an aligned state group for a request between steps."""

    __slots__ = ("checkpoint", "inside", "inside_at", "own_end", "started")

    def __init__(self) -> None:
        self.started = False
        """True once a step has been allocated: speculative blocks come with the first."""
        self.inside: Extent | None = None
        """The state that a prompt ends with inside a block: others may hit it, so it is not to be written again."""
        self.inside_at = 0
        """Its position."""
        self.own_end: KeptState | None = None
        """That state, if the request itself computed it and hasn't written on; noted for connectors."""
        self.checkpoint: tuple[int, int] | None = None
        """Tokens after which this step writes a state besides its last one, and the position of the block for it."""


class AlignedStateGroup(StateGroup):
    """Mode *align*: each step keeps one running state at its end, plus speculative ones behind it."""

    acts_every_step = True
    registers_always = True
    estimates = True

    _kept_states: list[KeptState] | None = None

    def report_kept_states(self) -> None:
        """List the states registered from now on, until ``take_kept_states`` drains them. Required in every step then."""
        self._kept_states = []

    def take_kept_states(self) -> list[KeptState]:
        """Drain the states registered since the last call."""
        kept, self._kept_states = self._kept_states or [], []
        return kept

    def take_own_end(self, table: BlockTable) -> KeptState | None:
        """Return the state inside a block that the request's prompt ended with, once, unless the request has written on."""
        progress = self._progress(table)
        kept, progress.own_end = progress.own_end, None
        return kept

    def let_chain_go(self, request: Request, table: BlockTable) -> list[Extent]:
        if self._kept_states:
            # Another request may get the blocks before a connector reads them.
            self._kept_states = [kept for kept in self._kept_states if kept.request_id != request.id]
        return super().let_chain_go(request, table)

    def _progress(self, table: BlockTable) -> _Progress:
        if table.state is None:
            table.state = _Progress()
        assert isinstance(table.state, _Progress)
        return table.state

    def required(self, demand: Demand) -> int:
        # Look-ahead tokens need no state: draft heads have no state layers.
        return ceil_div(demand.main, self.block_size) + self.spec.spec_blocks

    def need(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        """As vLLM predicts it: below nothing where drafts that were taken back left more than enough, and without the
        block of a state to be loaded. Notes the step's checkpoint, unless a whole sequence is asked for.
        """
        if self._must_wait(request, hit):
            return self.pool.num_blocks + 1
        if demand.local % self.block_size == 0 and _held_elsewhere(hit):
            return self.pool.num_blocks + 1
        inside = self._ends_inside(table, hit, demand)
        checkpoint = self._checkpoint(request, table, demand)
        if not demand.whole:
            self._progress(table).checkpoint = checkpoint
        fresh = self.required(demand) - hit.blocks - table.length
        if inside:
            fresh = max(fresh, 0) + 1
        most = self._most(table) + inside + (checkpoint is not None)
        return min(fresh, most) + (hit.free_blocks(0) if hit.blocks else 0)

    def _checkpoint(self, request: Request, table: BlockTable, demand: Demand) -> tuple[int, int] | None:
        """Return the state that a step to ``demand.main`` tokens can write inside: after how many tokens, and at which
        position.

        ``None`` where the backend has none, or can't write it at that point of this step.
        """
        unit, size = self.spec.checkpoint_unit, self.block_size
        start, end = demand.total, demand.main
        if unit is None or (self.retention == 0 and end < max(request.num_prompt_tokens, request.num_tokens - 1)):
            return None
        tokens = self._resumed_at(end, self.alignment)
        position = ceil_div(end, size) - 2
        if (
            position <= (start - 1) // size
            or start % self.hash_block_size
            or not start + self.hash_block_size <= tokens < end
            or (tokens - start) % unit
        ):
            return None
        spare = table.length - self.spec.spec_blocks if self._progress(table).started else table.length
        if position < spare and any(extent.start <= position < extent.stop for extent in table):
            return None
        return tokens, position

    def _resumed_at(self, tokens: int, unit: int) -> int:
        """Return the last boundary of ``unit`` tokens at which a resend of ``tokens`` could continue."""
        if self.use_eagle:
            return max(tokens // unit * unit - unit, 0)
        return (tokens - 1) // unit * unit

    def uses(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        length = table.length + hit.blocks
        loaded = skipped = 0
        if demand.total > demand.local:
            # A state that is loaded has a block of its own besides the running one.
            skipped = self.rule.stale(demand.total) // self.block_size
            loaded = max(0, ceil_div(demand.total, self.block_size) - max(length, skipped))
            length = max(length, skipped) + loaded
        most = self._most(table) + (self._progress(table).checkpoint is not None)
        fresh = min(max(self.required(demand) - length, 0), most)
        if not hit.blocks > skipped:
            return loaded + fresh + (self._progress(table).inside is not None)
        return loaded + fresh + self._ends_inside(table, hit, demand) + hit.free_blocks(skipped)

    def _most(self, table: BlockTable) -> int:
        """Return the most blocks that a step takes: one to write its state to, and speculative ones if it is the first."""
        return 1 if self._progress(table).started else 1 + self.spec.spec_blocks

    def _ends_inside(self, table: BlockTable, hit: GroupHit, demand: Demand) -> bool:
        """Return true if the step begins inside a block that others may hit, so that one more is needed for a copy."""
        return self._progress(table).inside is not None or bool(hit.blocks and demand.local % self.block_size)

    def take_new(self, table: BlockTable, demand: Demand) -> list[int]:
        progress = self._progress(table)
        spec = self.spec.spec_blocks
        required = self.required(demand)
        before = table.length
        inside = progress.inside
        checkpoint = progress.checkpoint is not None
        if required <= before and inside is None and not checkpoint:
            progress.started = True
            return []
        # The state that the step ends with is at `running`, a checkpoint right before it.
        running = required - spec - 1
        if before < running - checkpoint:
            table.length = running - checkpoint
        moved: list[int] = []
        if progress.started:
            for position in range(before - spec, min(before, running - checkpoint)):
                moved += self._move_to_end(table, position)
        # Positions between the steps are null and reported as such.
        new = [0] * (table.length - len(moved) - before) + moved
        ids = self.pool.take(max(required - table.length, 0) + (inside is not None), table.account)
        if inside is not None:
            progress.inside = None
            if progress.started:
                self._preserve(inside, ids[:1], table.account)
                if progress.own_end is not None and self._kept_states is not None:
                    self._kept_states.append(progress.own_end._replace(block_id=ids[0]))
                progress.own_end = None
            else:
                new = continue_on_copy(self, table, inside, progress.inside_at, ids[:1]) + new
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

    def adopt(self, table: BlockTable, hit: GroupHit, local: int, external: int) -> None:
        progress = self._progress(table)
        progress.inside, progress.inside_at = adopt_inside(self, table, hit, local, external), hit.blocks - 1

    def register(self, request: Request, table: BlockTable, tokens: int) -> None:
        first = table.registered or 0
        Group.register(self, request, table, tokens)
        last = table.registered or 0
        if self._progress(table).checkpoint is not None:
            self._register_checkpoint(request, table)
        else:
            self._register_end(request, table, tokens)
        self._note_written(request, table, first, last)

    def _note_written(self, request: Request, table: BlockTable, first: int, last: int) -> None:
        super()._note_written(request, table, first, last)
        if self._kept_states is None:
            return
        for extent in table:
            for position in range(max(extent.start, first), min(extent.stop, last)):
                if extent.node is not None:
                    tokens = (position + 1) * self.block_size
                elif extent.marks is not None:
                    tokens = extent.marks.runs[0].stop * self.hash_block_size
                else:
                    break
                self._kept_states.append(KeptState(request.id, extent.ids[position - extent.start], tokens))

    def _register_checkpoint(self, request: Request, table: BlockTable) -> None:
        """Name the block of this step's checkpoint after it, if later requests may continue there."""
        progress, size = self._progress(table), self.block_size
        assert progress.checkpoint is not None
        tokens, position = progress.checkpoint
        block = self._block_at(table, position)
        if block is None:
            return
        kept = tokens in (self._resumed_at(request.num_prompt_tokens, self.alignment), request.shared_prefix_boundary)
        if not kept and tokens % size == 0:
            end = tokens // size
            worth = self.rule.worth(end - 1, end, self.alignment, self.eagle, self.retention, ())
            kept = worth is None or bool(worth)
        if kept and block.node is not None and tokens == (position + 1) * size:
            return
        if self.watch is not None:
            self.watch(request, self, ceil_div(tokens, size) - 1, ceil_div(tokens, size) - 1)
        self.pool.unname(block)
        if kept:
            run = mark_of(request, tokens, self.hash_block_size)
            self.map.mark(block, run)
            self._this_step.add(run[0])

    def _register_end(self, request: Request, table: BlockTable, tokens: int) -> None:
        """Name the state that this step ends with, where a resend of the prompt or a sibling could continue there."""
        unit = self.hash_block_size
        junction = request.shared_prefix_boundary if self.marks_junctions else 0
        position = ceil_div(tokens, self.block_size) - 1
        if tokens <= 0 or tokens % unit or position >= table.length:
            return
        if tokens != self._resumed_at(request.num_prompt_tokens, unit) and not (
            tokens == junction and request.num_computed_tokens < tokens <= request.num_prompt_tokens
        ):
            return
        block = self._block_at(table, position)
        if block is None:
            return
        run = mark_of(request, tokens, unit)
        self._this_step.add(run[0])
        if tokens % self.block_size:
            self.map.mark(block, run)
            progress = self._progress(table)
            progress.inside, progress.inside_at = block, position
            progress.own_end = KeptState(request.id, block.ids[0], tokens)
            table.registered = position
        elif block.node is None:
            if self.watch is not None:
                self.watch(request, self, position, position)
            self.map.enter(self.chain_of(request), block)

    def _move_to_end(self, table: BlockTable, position: int) -> list[int]:
        """Move the (private, unnamed) block at ``position`` behind the last one and leave a null there."""
        block = self._block_at(table, position)
        assert block is not None
        table.replace(table.extents.index(block), [])
        block.forget_neighbours()
        block.start = table.length
        table.append(block)
        return block.ids


def _held_elsewhere(hit: GroupHit) -> bool:
    """Return true if another request holds the hit's last block, known by a mark, at another position of its table."""
    return hit.tail is not None and hit.tail.refs > 0 and hit.tail.start != hit.blocks - 1


def _check(spec: GroupSpec, where: str) -> None:
    if spec.mode not in STATE_MODES:
        raise ConfigError(f"{where}: unknown state mode {spec.mode!r}: {suggest(spec.mode, STATE_MODES)}")
    if spec.spec_blocks < 0:
        raise ConfigError(f"{where}: spec_blocks must not be negative, got {spec.spec_blocks}")
    if spec.checkpoint_unit is not None and (spec.checkpoint_unit < 1 or spec.mode != "align"):
        raise ConfigError(f"{where}: checkpoint_unit must be at least 1, and is for mode align alone")


MAMBA = Attention(
    wire="mamba",
    is_state=True,
    fields=("mode", "spec_blocks", "checkpoint_unit"),
    rule=lambda spec: StateRule(spec.block_size),
    check=_check,
    group_class=lambda spec, caching, hash_block_size: AlignedStateGroup if spec.mode == "align" else StateGroup,
)
