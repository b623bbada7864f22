"""The head of a queue that was refused: what has to change before it is worth asking for its blocks again."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.engine.job import Job
from kvyard.engine.passes import Chunk
from kvyard.hashing import Key


class BlockedHead:
    """Remembers the job that was refused last, from one pass to the next.

    For one group of full attention without lower tiers: free blocks must become more, or a job must have computed the block
    after its hit.
    """

    __slots__ = ("_block", "_free", "_job", "_key", "_number", "_refused_in")

    def __init__(self) -> None:
        self._job: Job | None = None
        self._free = 0
        self._block = 0
        self._key: Key | None = None
        self._number = 0
        self._refused_in = 0
        """The number of the last pass in which it was refused."""

    def begin_pass(self) -> None:
        """The next pass is being formed."""
        self._number += 1

    def remember(self, job: Job, hit: int, free: int) -> None:
        """``job`` found ``hit`` tokens cached, and not enough among ``free`` blocks."""
        keys = job.chain.keys
        self._job = job
        self._free = free
        self._block = hit // job.chain.block_size
        self._key = keys[self._block] if self._block < len(keys) else None
        self._refused_in = self._number

    def still(self, job: Job, free: int, chunks: Sequence[Chunk]) -> bool:
        """Whether ``job`` would be refused again. It must have been in the pass before this one; since then only what
        decoding jobs needed and ``chunks`` took blocks.
        """
        if job is not self._job or self._number != self._refused_in + 1 or free > self._free:
            return False
        for chunk in chunks:
            keys = chunk[0].chain.keys
            if self._block < len(keys) and keys[self._block] == self._key:
                return False
        self._refused_in = self._number
        return True
