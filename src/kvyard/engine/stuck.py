"""Why the head of a queue stays there: what has to change before it is worth asking for its blocks again."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.engine.batch import Chunk
from kvyard.engine.job import Job
from kvyard.hashing import Key


class Stuck:
    """A head of the queue that didn't fit: what has to change before it is worth asking again.

    For one group of full attention without lower tiers: free blocks must become more, or somebody must have computed the block
    after its hit.
    """

    __slots__ = ("block", "form", "free", "job", "key")

    def __init__(self, job: Job, hit: int, form: int, free: int) -> None:
        """``job`` found ``hit`` tokens cached and not enough among ``free`` blocks, when pass number ``form`` was formed."""
        keys = job.chain.keys
        block = hit // job.chain.block_size
        self.job = job
        self.form = form
        """The last pass at whose forming it was stuck."""
        self.free = free
        self.block = block
        self.key: Key | None = keys[block] if block < len(keys) else None

    def holds(self, job: Job, form: int, free: int, chunks: Sequence[Chunk]) -> bool:
        """Whether ``job`` is still stuck, one pass later: in between only ``chunks`` were computed."""
        if job is not self.job or form != self.form + 1 or free > self.free:
            return False
        for chunk in chunks:
            keys = chunk[0].chain.keys
            if self.block < len(keys) and keys[self.block] == self.key:
                return False
        return True
