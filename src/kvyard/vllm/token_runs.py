"""A request's text as runs of made-up token ids: equal texts get equal ids, and the ids reveal nothing of it.

Equal prefixes up to and with a full block have the same block number; the ids of its tokens start at that number times the
block size. So two requests have equal ids exactly as far as their full blocks are equal, which is all that a cache can see.
"""

from collections.abc import Sequence

from kvyard.hashing import wire_hash
from kvyard.integers import ceil_div
from kvyard.server.gateway.recording.prefix_ids import PrefixIds


class TokenRuns:
    """The ids of one sequence."""

    def __init__(self, ids: PrefixIds, size: int, hashes: Sequence[bytes], num_tokens: int) -> None:
        """``hashes`` are those of its full blocks of ``size`` tokens; the remaining tokens get ids of their own."""
        self._ids = ids
        self._size = size
        full = min(len(hashes), num_tokens // size)
        names = ids.of([wire_hash(key) for key in hashes[:full]])
        names.extend(ids.fresh(ceil_div(num_tokens, size) - full))
        self._names = names

    def cut(self, start: int, stop: int, more: int = 0) -> list[list[int]]:
        """Return tokens ``start`` to ``stop`` as runs ``[first id, count]``, followed by ``more`` new ids."""
        size = self._size
        parts: list[list[int]] = []
        token = start
        while token < stop:
            block = token // size
            count = min((block + 1) * size, stop) - token
            first = self._names[block] * size + token % size
            if parts and parts[-1][0] + parts[-1][1] == first:
                parts[-1][1] += count
            else:
                parts.append([first, count])
            token += count
        if more:
            parts.append([self._ids.fresh(ceil_div(more, size))[0] * size, more])
        return parts
