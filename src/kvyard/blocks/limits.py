"""Limits: how far a running request can go before any group has something to do.

A decode step mostly fits into the blocks it has, frees nothing and completes no block. Working out once how long that lasts
turns each such step into three comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvyard.blocks.group import Group
from kvyard.blocks.request import Request


def note_limits(request: Request, groups: Sequence[Group], caching: bool, max_model_len: int) -> None:
    """Write onto ``request`` up to where its tokens fit, nothing goes stale, and nothing is to be registered."""
    fits: float = max_model_len
    settled: float = inf
    registered: float = inf
    for group, table in zip(groups, request.tables):
        if group.restless:
            request.forget_limits()
            return
        size = group.block_size
        room = table.length * size - group.spare
        if room < fits:
            fits = room
        if group.rule.forgets:
            fresh = group.rule.fresh_until(table.starts[0] if table.starts else table.length)
            if fresh < settled:
                settled = fresh
        if caching:
            unit = group.register_unit
            known = -(-((table.registered or 0) + 1) * size // unit) * unit - 1 if unit else -1
            if known < registered:
                registered = known
    request.fits_until, request.settled_until, request.registered_until = fits, settled, registered
