"""Registration: giving a request's blocks a name once they are full, so that later requests can find them.

Mostly this lengthens the extent a request registered last. The rest is for tables with gaps, for blocks that are not worth
keeping, and for wishes to keep some longer than others.
"""

from __future__ import annotations

from itertools import pairwise

from kvyard.blocks.cache_map import CacheMap
from kvyard.blocks.extent import Extent
from kvyard.blocks.request import Request
from kvyard.blocks.table import Table
from kvyard.hashing import Chain


def register_tail(cache_map: CacheMap, chain: Chain, table: Table, first: int, last: int) -> bool:
    """Register blocks from the start of the table's unnamed tail, if that is where they are; returns whether it did.

    A request's own last extent is lengthened where possible, so that its chain stays in one piece as it grows.
    """
    extents = table.extents
    if not extents:
        return False
    tail = extents[-1]
    count = last - first
    if tail.start != first or tail.node is not None or tail.marks is not None or len(tail.ids) < count:
        return False
    if tail.refs != 1:
        return False  # a pending copy holds it too, so it must stay the extent it is
    before = extents[-2] if len(extents) > 1 else None
    whole = count == len(tail.ids)
    if before is not None and before.start + len(before.ids) == first:
        if cache_map.extend(before, tail.ids[:count], chain):
            if whole:
                extents.pop()
                table.starts.pop()
            else:
                tail.ids = tail.ids[count:]
                tail.start += count
                table.starts[-1] = tail.start
            return True
    else:
        before = None
    parts = cache_map.enter(chain, tail if whole else tail.split_front(count), before)
    if not whole:
        tail.forget_neighbours()
        parts.append(tail)
    table.replace(len(extents) - 1, parts)
    return True


def register_between(cache_map: CacheMap, chain: Chain, request: Request, table: Table, low: int, high: int) -> None:
    """Register the unnamed blocks at positions ``low`` to ``high``, wherever they are in the table."""
    extents = table.settle()
    index = len(extents)
    while index and extents[index - 1].stop > low:
        index -= 1
    while index < len(extents) and extents[index].start < high:
        extent = extents[index]
        parts = [extent]
        if extent.node is None:
            # Whole now, so what ended inside it no longer needs a name of its own.
            cache_map.unmark(extent)
            parts = _enter_between(cache_map, chain, request, extent, low, high)
            table.replace(index, parts)
        index += len(parts)


def _enter_between(
    cache_map: CacheMap, chain: Chain, request: Request, extent: Extent, low: int, high: int
) -> list[Extent]:
    """Register the blocks of ``extent`` that lie between ``low`` and ``high``; returns its parts in order."""
    cuts = _cuts(request, chain.block_size, extent, low, high)
    parts: list[Extent] = []
    for start, stop in pairwise(cuts):
        part = extent if stop == cuts[-1] else extent.split_front(stop - start)
        if start < low or stop > high:
            parts.append(part)
            continue
        if request.retention:
            part.priority, part.expires = request.priority_at(start * chain.block_size)
        parts += cache_map.enter(chain, part)
    return parts


def _cuts(request: Request, block_size: int, extent: Extent, low: int, high: int) -> list[int]:
    """Where ``extent`` must be split: at ``low`` and ``high``, and where the wished priority changes."""
    cuts = {extent.start, extent.stop, *(at for at in (low, high) if extent.start < at < extent.stop)}
    for wish in request.retention:
        for token in (wish.start, wish.stop):
            at = -(-token // block_size) if token is not None else extent.stop
            if extent.start < at < extent.stop:
                cuts.add(at)
    return sorted(cuts)


def resume_points(request: Request, draft_unit: int) -> list[int]:
    """Token positions where a later request with this prompt can resume, worth keeping under sparse retention.

    ``draft_unit`` is the scheduler's block size where there is a draft head, else 0: then the block after the boundary is
    computed again, for a resend and for a longer sibling.
    """
    prompt = request.num_prompt_tokens
    if draft_unit:
        ends = {(prompt - 1) // draft_unit, prompt // draft_unit}
        points = sorted({max(end - 1, 0) * draft_unit for end in ends})
    else:
        points = [prompt - 1]
    if request.shared_prefix_boundary:
        points.append(request.shared_prefix_boundary)
    return points
