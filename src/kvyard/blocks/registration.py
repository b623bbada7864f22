"""Registration: a request's full blocks enter the map of cached copies under their hashes, so that later requests can hit them.

Mostly this extends the extent that the request registered last. The other cases are tables with gaps, blocks that aren't worth
keeping, and retention priorities.
"""

from kvyard.blocks.cache_map import CacheMap
from kvyard.blocks.extent import Extent
from kvyard.blocks.request import Request
from kvyard.blocks.table import BlockTable
from kvyard.hashing import Chain
from kvyard.integers import ceil_div


def register_tail(
    cache_map: CacheMap, chain: Chain, request: Request, table: BlockTable, first: int, last: int
) -> bool:
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
    if before is not None and before.start + len(before.ids) != first:
        before = None
    if request.retention and not _keep_as_wished(request, chain.block_size, tail, before, first, last):
        return False
    whole = count == len(tail.ids)
    if before is not None and cache_map.extend(before, tail.ids[:count], chain):
        if whole:
            extents.pop()
            table.starts.pop()
        else:
            tail.ids = tail.ids[count:]
            tail.start += count
            table.starts[-1] = tail.start
        return True
    parts = cache_map.enter(chain, tail if whole else tail.split_front(count), before)
    if not whole:
        tail.forget_neighbours()
        parts.append(tail)
    if len(parts) > 1:
        table.replace(len(extents) - 1, parts)
    return True


def _keep_as_wished(
    request: Request, block_size: int, tail: Extent, before: Extent | None, first: int, last: int
) -> bool:
    """Give ``tail`` its wished priority, if that is one and the same from ``first`` to ``last`` and for ``before``."""
    if _wish_bounds(request, block_size, first, last):
        return False
    wished = request.priority_at(first * block_size)
    if before is not None and (before.priority, before.expires) != wished:
        return False
    tail.priority, tail.expires = wished
    return True


def register_kept(
    cache_map: CacheMap, chain: Chain, request: Request, table: BlockTable, kept: list[tuple[int, int]]
) -> None:
    """Register the unnamed blocks inside the (sorted, disjoint) intervals ``kept``, wherever they are in the table."""
    if not kept:
        return
    extents = table.settle()
    index = len(extents)
    while index and extents[index - 1].stop > kept[0][0]:
        index -= 1
    done = extents[:index]
    before = next((extent for extent in reversed(done) if extent.node is not None), None)
    next_kept = 0
    for extent in extents[index:]:
        while next_kept < len(kept) and kept[next_kept][1] <= extent.start:
            next_kept += 1
        if extent.node is None and next_kept < len(kept) and kept[next_kept][0] < extent.stop:
            # Whole now, so what ended inside it no longer needs a name of its own.
            cache_map.unmark(extent)
            done += _enter_kept(cache_map, chain, request, extent, kept, next_kept, before)
        else:
            done.append(extent)
        if done[-1].node is not None:
            before = done[-1]
    table.extents = done
    table.starts = [extent.start for extent in done]


def _enter_kept(
    cache_map: CacheMap,
    chain: Chain,
    request: Request,
    extent: Extent,
    kept: list[tuple[int, int]],
    index: int,
    before: Extent | None,
) -> list[Extent]:
    """Register the blocks of ``extent`` that lie in ``kept[at:]``; returns its parts in order."""
    parts: list[Extent] = []
    end = extent.stop
    while extent.start < end:
        while index < len(kept) and kept[index][1] <= extent.start:
            index += 1
        inside = index < len(kept) and kept[index][0] <= extent.start
        stop = end if index == len(kept) else min(end, kept[index][1] if inside else kept[index][0])
        stop = min([stop, *_wish_bounds(request, chain.block_size, extent.start, stop)])
        part = extent if stop == end else extent.split_front(stop - extent.start)
        if inside:
            if request.retention:
                part.priority, part.expires = request.priority_at(part.start * chain.block_size)
            parts += cache_map.enter(chain, part, before)
            before = parts[-1]
        else:
            parts.append(part)
        if part is extent:
            break
    return parts


def _wish_bounds(request: Request, block_size: int, first: int, last: int) -> list[int]:
    """Return positions strictly between ``first`` and ``last`` where the wished priority may change."""
    bounds: list[int] = []
    for wish in request.retention:
        for token in (wish.start, wish.stop):
            bound = ceil_div(token, block_size) if token is not None else last
            if first < bound < last:
                bounds.append(bound)
    return bounds


def resume_points(request: Request, draft_unit: int) -> list[int]:
    """Return token positions where a later request with this prompt can resume, worth keeping under sparse retention.

    ``draft_unit`` is the scheduler's block size if there is a draft head, else 0: then the block after the boundary is
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
