"""Cached beginnings of prompts: the names of their blocks, so that neither tokens nor names are made again.

A prompt is cut into runs at places that depend on nothing behind them. A run is known by a digest of all that comes before
its end, so prompts that begin alike share runs, in a conversation's next turn as well as under a common system prompt. The
cache is bounded in bytes, and evicts the least recently used first, later runs before those that they follow.
"""

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import xxhash

RUN_BYTES = 2048
"""Least bytes or characters of a prompt in a run."""
OVERHEAD = 400
"""Bytes of a run beside its names and tokens."""


class KnownRun(msgspec.Struct, frozen=True, gc=False):
    """Run that was read before."""

    names: bytes
    """Names of the blocks that end in it, eight bytes each as this machine writes them."""
    tokens: int
    """Of the prompt up to its end."""
    rest: Sequence[int]
    """The tokens behind the last of those blocks."""

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.names) + 4 * len(self.rest)


class KnownPrefixes:
    """Runs by their digests."""

    def __init__(self, limit: int) -> None:
        """``limit`` is in bytes."""
        self.limit = limit
        self.held = 0
        """Bytes."""
        self.found = 0
        """Tokens that weren't made again, over all time."""
        self.read = 0
        """Tokens of all prompts, over all time."""
        self._runs: OrderedDict[bytes, KnownRun] = OrderedDict()
        # Nobody outside can make two prompts with one digest without knowing this.
        self._secret = os.urandom(32)

    def __len__(self) -> int:
        return len(self._runs)

    def digests(self, kind: bytes, pieces: Sequence[bytes | memoryview]) -> list[bytes]:
        """Return per piece of a prompt the digest of all up to its end. ``kind`` separates texts that tokenize differently."""
        hasher = xxhash.xxh3_128(self._secret + kind)
        digests: list[bytes] = []
        for piece in pieces:
            hasher.update(piece)
            digests.append(hasher.digest())
        return digests

    def path(self, digests: Sequence[bytes]) -> list[KnownRun]:
        """Return the known runs from the beginning on. They count as used."""
        runs = self._runs
        known: list[KnownRun] = []
        for digest in digests:
            run = runs.get(digest)
            if run is None:
                break
            known.append(run)
        for index in range(len(known) - 1, -1, -1):
            runs.move_to_end(digests[index])
        return known

    def add(self, digests: Sequence[bytes], fresh: Sequence[KnownRun]) -> None:
        """Add runs, in the order of the prompt."""
        runs = self._runs
        for digest, run in zip(reversed(digests), reversed(fresh), strict=True):
            old = runs.pop(digest, None)
            if old is not None:
                self.held -= old.size
            runs[digest] = run
            self.held += run.size
        while self.held > self.limit and self._runs:
            _, gone = self._runs.popitem(last=False)
            self.held -= gone.size

    def clear(self) -> None:
        """Remove everything."""
        self._runs.clear()
        self.held = 0


def names_of(path: Sequence[KnownRun], fresh: Sequence[bytes]) -> "array[int]":
    """Return the names of all blocks of a prompt, packed."""
    names = array("Q")
    names.frombytes(b"".join([*[run.names for run in path], *fresh]))
    return names
