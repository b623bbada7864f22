"""Hits that end inside a block, where hashes are finer than blocks.

A prompt that ends inside a block can be resumed there: its last block is marked with the hash of the prompt's end, and
a request that hits it continues on a private copy, since the original belongs to others. Only worth it next to state groups,
whose blocks are large; full attention goes along.
"""

from collections.abc import Sequence

from kvyard.blocks.extent import Extent
from kvyard.blocks.group import Demand, Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.rule import NO_MATCH, RuleMatch
from kvyard.blocks.spans import Spans
from kvyard.blocks.table import BlockTable
from kvyard.hashing import Key, Keys, Run
from kvyard.integers import ceil_div


def match_prefix_inside(
    members: Sequence[Group], keys: Keys, unit: int, spans: Spans, limit: int, drop: bool
) -> RuleMatch:
    """Return the longest prefix of full attention, continued into the first block that isn't whole.

    ``keys`` are the fine hashes, ``unit`` tokens each. With ``drop`` one unit is given up.
    """
    size = members[0].block_size
    whole = min(spans[0][1], limit // size) if spans and not spans[0][0] else 0
    tokens = whole * size
    first = tokens // unit
    tails: list[Extent] | None = None
    for index in range(min(first + size // unit - 1, limit // unit, len(keys)) - 1, first - 1, -1):
        tails = _marked(members, keys[index])
        if tails is not None:
            tokens = (index + 1) * unit
            break
    if drop and tokens:
        tokens -= unit
    return RuleMatch(tokens, 0, tails if tokens > whole * size else None)


def match_state_inside(
    members: Sequence[Group], keys: Keys, unit: int, alignment: int, spans: Spans, limit: int
) -> RuleMatch:
    """Return the last state at a boundary of ``alignment`` tokens, at a block's end or inside it.

    ``keys`` are the fine hashes, ``unit`` tokens each. A state at a block's end may be known by a mark too, where it was
    written inside a chunk (``GroupSpec.checkpoint_unit``).
    """
    size = members[0].block_size
    present = {position for low, high in spans for position in range(low, high)}
    for tokens in range(min(limit, len(keys) * unit) // alignment * alignment, 0, -alignment):
        block = ceil_div(tokens, size) - 1
        if tokens % size == 0 and block in present:
            return RuleMatch(tokens, block)
        tails = _marked(members, keys[tokens // unit - 1])
        if tails is not None:
            return RuleMatch(tokens, block, tails)
    return NO_MATCH


def _marked(members: Sequence[Group], key: Key) -> list[Extent] | None:
    """Return the first block that each member finds by ``key``; ``None`` unless all do."""
    marks = [group.map.marks.get(key) for group in members]
    return [holders[0] for holders in marks if holders] if all(marks) else None


def mark_of(request: Request, tokens: int, unit: int) -> Run:
    """Return the hash unit that ends at ``tokens``, as a run that keeps nothing else of the request."""
    index = tokens // unit - 1
    return Run(request.chain.cut(index, index + 1), index, index + 1)


class FineGroup(Group):
    """Full attention with blocks larger than the hash unit: marks where prompts end, copies what is hit inside."""

    registers_always = True

    def need(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        need = super().need(request, table, hit, demand)
        return need + (1 if hit.blocks and demand.local % self.block_size else 0)

    def adopt(self, table: BlockTable, hit: GroupHit, local: int, external: int) -> None:
        table.state = adopt_inside(self, table, hit, local, external)

    def take_new(self, table: BlockTable, demand: Demand) -> list[int]:
        copied: list[int] = []
        if isinstance(table.state, Extent):
            source = table.state
            copied = continue_on_copy(self, table, source, source.start, self.pool.take(1, table.account))
            table.state = None
        return copied + super().take_new(table, demand)

    def register(self, request: Request, table: BlockTable, tokens: int) -> None:
        super().register(request, table, tokens)
        # A resend computes at least its last token again; with a draft head the drop sees to that.
        unit = self.hash_block_size
        boundary = (request.num_prompt_tokens - (not self.eagle)) // unit * unit
        if not 0 < boundary <= tokens or boundary % self.block_size == 0 or boundary >= table.length * self.block_size:
            return
        block = self._block_at(table, boundary // self.block_size)
        if block is not None:
            self.map.mark(block, mark_of(request, boundary, unit))


def adopt_inside(group: Group, table: BlockTable, hit: GroupHit, local: int, external: int) -> Extent | None:
    """Adopt a hit that may end inside its last block, and return that block, an extent of its own, if it does.

    It counts as not registered. A state that lies before what will be loaded is of no use and not adopted.
    """
    ends_inside = hit.blocks > 0 and local % group.block_size > 0
    if hit.tail is None and not ends_inside:
        Group.adopt(group, table, hit, local, external)
        return None
    if group.rule.stale(local + external) // group.block_size >= hit.blocks:
        Group.adopt(group, table, hit, local, external)
        return None
    tail, last = hit.tail, hit.blocks - 1
    whole = hit if tail is None else GroupHit(last, hit.low, hit.nodes)
    Group.adopt(group, table, whole, local, external)
    if tail is None:
        tail = group._block_at(table, last)
    else:
        group.pool.pin(tail)
        if place_mark(tail, last):
            table.append(tail)
        else:
            table.length = hit.blocks  # the copy it continues on takes the place
    table.registered = last if ends_inside else hit.blocks
    return tail if ends_inside else None


def place_mark(block: Extent, position: int) -> bool:
    """Give a marked block that is about to be adopted its position in the table; returns false if another request holds it at
    another position, as the one does that wrote it inside a chunk.
    """
    if block.start != position:
        if block.refs > 1:
            return False
        block.forget_neighbours()
        block.start = position
    return True


def continue_on_copy(group: Group, table: BlockTable, source: Extent, position: int, fresh: list[int]) -> list[int]:
    """Put a private block at ``position``, in the place of ``source``, which is shared, and ask for a copy of its content.

    Both are held until the copy has run; returns the new block's id.
    """
    copy = Extent(fresh, position, refs=2)
    copy.account = table.account
    extents = table.settle()
    if source in extents:
        table.replace(extents.index(source), [copy])
    else:
        table.extents.append(copy)
        table.starts.append(position)
    group.copies.append((source, copy))
    group.pool.pinned.update((source, copy))
    return list(fresh)
