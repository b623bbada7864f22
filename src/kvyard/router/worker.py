"""A worker as the router sees it: its identity, its pace, and its requests in flight."""

from typing import Final

from kvyard.engine.role import Role
from kvyard.index import Holder
from kvyard.router.pace import Pace

NOBODY: Final = Holder("", -1)
"""The name of a free slot, which no worker can have."""


class WorkerLoad:
    """One worker. The figures are the router's own books, from routing to finish; no engine is asked."""

    __slots__ = (
        "block_size",
        "blocks",
        "computing_since",
        "name",
        "pace",
        "past_ms",
        "prefill_tokens",
        "queued",
        "requests",
        "role",
        "slot",
    )

    def __init__(self, slot: int, name: Holder, role: Role, pace: Pace, block_size: int) -> None:
        self.slot = slot
        """The worker's number in this router; a later worker may get the number of one that left."""
        self.name = name
        """The worker and its rank, as the index names them."""
        self.role = role
        """Part of a request that it computes: ``both``, ``prefill`` or ``decode``."""
        self.pace = pace
        """Speed of the worker."""
        self.block_size = block_size
        """Tokens per block, the same for all workers of a router."""
        self.requests = 0
        """In flight."""
        self.queued = 0
        """Requests in flight whose prompts aren't computed yet."""
        self.prefill_tokens = 0
        """Tokens of those prompts, less what the worker was credited with as cached."""
        self.blocks = 0
        """Held by requests in flight; a block that several of them share counts once."""
        self.past_ms = 0.0
        """Milliseconds that attention to cached tokens adds to their prefill, for policies that read paces."""
        self.computing_since = 0
        """Start of the prefill in progress, in nanoseconds; meaningless without ``prefill_tokens``."""
