"""Shared parts of the tests of the block manager: short ways to make and run requests, a snapshot of everything, and a
coordinator that is wrong on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvyard.blocks import BlockManager, GroupSpec, Request
from kvyard.blocks.coordinator import Coordinator
from kvyard.blocks.extent import Extent
from kvyard.blocks.group import Group, GroupHit
from kvyard.blocks.integrity import reference_counts
from kvyard.blocks.table import BlockTable
from kvyard.hashing import TokenChain, algorithm

XXH3 = algorithm("xxh3", "tests")

FULL = GroupSpec(block_size=4)
WINDOW = GroupSpec(kind="sliding_window", window=1000, block_size=4)
"""A window so wide that nothing leaves it: what differs from ``FULL`` is only the rule that decides."""


def make(manager: BlockManager, name: str, tokens: Iterable[int], **options: Any) -> Request:
    """A request with this prompt, hashed as ``manager`` needs it."""
    return Request(name, TokenChain(list(tokens), manager.geometry.hash_block_size, XXH3), **options)


def run(manager: BlockManager, request: Request, new: int | None = None, *, external: int = 0, **options: Any) -> bool:
    """A step: look ``request`` up if it starts, allocate ``new`` tokens (all that are left), count them as computed."""
    manager.begin_step()
    hit = None if request.running else manager.lookup(request)
    found = hit.tokens if hit is not None else 0
    if new is None:
        new = request.num_tokens - request.num_computed_tokens - found - external
    if manager.allocate(request, new, hit, external=external, **options) is None:
        return False
    request.num_computed_tokens += found + external + new
    request.running = True
    return True


def cache(manager: BlockManager, name: str, tokens: Iterable[int], **options: Any) -> list[list[int]]:
    """Run a request of these tokens and free it; what is left is what it registered. Returns its tables."""
    request = make(manager, name, tokens, **options)
    assert run(manager, request)
    tables = manager.block_ids(request)
    manager.free(request)
    return tables


def snapshot(manager: BlockManager, *requests: Request) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    pool = manager.pool
    return {
        "free": pool.free,
        "version": pool.version,
        "line": list(pool.line()),
        # Stable: copies of one hash keep their order, which decides what a lookup returns.
        "cached": sorted(pool.cached_blocks(), key=lambda copy: copy[:2]),
        "references": reference_counts(manager.pool, manager.requests.values()),
        "holders": sorted(manager.requests),
        "requests": [
            (
                request.id,
                manager.block_ids(request),
                [table.registered for table in request.tables] or [None] * len(manager.groups),
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_tokens,
                request.running,
            )
            for request in requests
        ],
    }


class Interleaved(Coordinator):
    """Coordinator of vLLM before #44409: a group adopts its hits and takes blocks before the next group has pinned its own.

    Hits are adopted as they are in vLLM, by physical id: a block that was handed out in between is adopted all the same.
    """

    def adopt(self, request: Request, hits: Sequence[GroupHit], local: int, external: int) -> None:
        if self.has_adopted(request):
            return
        found = [hit.ids() for hit in hits]
        for group, table, hit, ids in zip(self.groups, request.tables, hits, found, strict=True):
            self._adopt_by_id(group, table, hit, ids, local + external)
            if external > 0:
                group.take_external(table, local + external, external)

    def _adopt_by_id(self, group: Group, table: BlockTable, hit: GroupHit, ids: list[int], total: int) -> None:
        low = max(hit.low, group.rule.stale(total) // group.block_size)
        at = low
        for node in hit.nodes:
            if not node.copies or node.stop <= low or node.start >= hit.blocks:
                continue
            if node.start < low:
                group.map.split(node, low)
            part = group.map.split(node, hit.blocks) if node.stop > hit.blocks else node
            self._steal(table, ids, at, part.start)
            group.pool.pin(part.copies[0])
            table.append(part.copies[0])
            at = part.stop
        self._steal(table, ids, at, hit.blocks)
        table.length = table.registered = max(low, hit.blocks)

    @staticmethod
    def _steal(table: BlockTable, ids: list[int], start: int, stop: int) -> None:
        """Adopt blocks that have a new owner by now."""
        if start < stop:
            table.append(Extent(ids[start:stop], start))


def spans_of(present: set[int]) -> list[tuple[int, int]]:
    """A set of positions as intervals."""
    found: list[tuple[int, int]] = []
    for at in sorted(present):
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return found
