"""Shared prefixes of prompts, by runs: a look-up costs as many steps as there are runs, not blocks.

Ids are cumulative: prompts that share one share all before it, and an id alone determines its position. So runs are found
by their first ids, wherever they branch off. A run was last touched, as a whole, by one prompt; where a prompt touches only
the front of one, it is split, and neighbours that are touched together become one again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvyard.hashing.prefix_tree import common_length, parting


class PromptPrefixes:
    """All prompts so far. It holds each different id once, in plain arrays: a trace may have millions."""

    def __init__(self) -> None:
        self._ids = array("Q")
        """Ids of all runs, one after the other."""
        self._at: dict[int, int] = {}
        """Number of the run that an id begins."""
        self._begin = array("q")
        """By number of a run: position of its ids, their count, and the prompt that touched them last."""
        self._count = array("q")
        self._owner = array("q")

    def touch(self, ids: Sequence[int], owner: int, exactly: bool = False) -> tuple[list[tuple[int, int, int]], int]:
        """Have ``owner`` touch a prompt. Returns the latest owner of each part of it, front to back as owner, start and
        end, and the number of known ids. With ``exactly`` all ids are compared, not only the last of a run.
        """
        known, numbers, begin, counts, owners = self._ids, self._at, self._begin, self._count, self._owner
        parts: list[tuple[int, int, int]] = []
        start, stop, before, last = 0, len(ids), -1, -1
        while start < stop:
            here = numbers.get(ids[start])
            if here is None:
                break
            first, count = begin[here], counts[here]
            most = count if count < stop - start else stop - start
            if exactly:
                most = common_length(list(known[first : first + most]), list(ids[start : start + most]))
            elif known[first + most - 1] != ids[start + most - 1]:
                most = parting(known, ids, start, start + most - 1, start - first) - start
            if most < count:
                self._split(here, most)
            if owners[here] == last:
                parts[-1] = (last, parts[-1][1], start + most)
            else:
                last = owners[here]
                parts.append((last, start, start + most))
            owners[here] = owner
            if before >= 0 and begin[before] + counts[before] == first:
                counts[before] += most
                del numbers[ids[start]]  # its number isn't used again
            else:
                before = here
            start += most
        if start < stop:
            self._append(ids, start, owner, before)
        return parts, start

    def _split(self, number: int, count: int) -> None:
        """Leave ``count`` ids to a run, and make the others one of their own."""
        first = self._begin[number] + count
        self._at[self._ids[first]] = len(self._begin)
        self._begin.append(first)
        self._count.append(self._count[number] - count)
        self._owner.append(self._owner[number])
        self._count[number] = count

    def _append(self, ids: Sequence[int], start: int, owner: int, before: int) -> None:
        """Add the ids from ``start`` on, behind the run ``before`` if that is the last in memory."""
        first = len(self._ids)
        new = ids[start:] if start else ids
        if isinstance(new, array) and new.itemsize == self._ids.itemsize:
            self._ids.frombytes(new.tobytes())
        else:
            self._ids.extend(array("Q", new))
        if before >= 0 and self._begin[before] + self._count[before] == first:
            self._count[before] += len(ids) - start
            return
        self._at[ids[start]] = len(self._begin)
        self._begin.append(first)
        self._count.append(len(ids) - start)
        self._owner.append(owner)
