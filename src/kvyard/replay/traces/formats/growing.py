"""Ids for traces that state lengths and what a prompt continues, but not what it contains.

A prompt keeps the front of the prompt before it and goes on with tokens of its own. Contexts are held as runs of ids, so a
session costs memory by its turns, however long its prompts are.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable

from kvyard.replay.traces.errors import BadRow

BLOCK_SIZE = 64
"""Tokens of an id, unless the reader was asked for another number."""
MOST_TOKENS = 10_000_000
"""Longest prompt that gets ids."""


def check_prompt(length: int) -> None:
    """Raises ``BadRow`` for a prompt that is too long to get ids."""
    if length > MOST_TOKENS:
        raise BadRow(f"a prompt of {length} tokens: prefixes are worked out for at most {MOST_TOKENS}")


class GrowingPrompts:
    """Prompts of sessions so far, and unused ids for the rest."""

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size or BLOCK_SIZE
        self._next = 0
        self._contexts: dict[Hashable, _Context] = {}

    def ids(self, session: Hashable, length: int, kept: int = 0, *, common: Hashable = None) -> array[int]:
        """Return the ids of a session's next prompt, of which the first ``kept`` tokens are those of the prompt before.

        A first prompt shares these tokens with those of all sessions that have the same ``common``. Only whole blocks are
        shared. A session of None has no further prompts. Raises ``BadRow`` for a prompt of more than ``MOST_TOKENS``.
        """
        check_prompt(length)
        size = self.block_size
        shared = min(max(0, kept), length) // size
        context = self._contexts.get(session)
        if context is None:
            context = self._begin(shared, common)
            if session is not None:
                self._contexts[session] = context
        context.cut(shared)
        self._extend(context, length // size)
        ids = context.ids()
        if length % size:
            ids.append(self._take(1))
        return ids

    def fork(self, session: Hashable, other: Hashable) -> None:
        """Let the next prompt of ``other`` go on from the latest one of ``session``, instead of its own."""
        context = self._contexts.get(session)
        self._contexts[other] = _Context() if context is None else context.copy()

    def end(self, session: Hashable) -> None:
        """Forget a session's prompts."""
        self._contexts.pop(session, None)

    def _begin(self, blocks: int, common: Hashable) -> _Context:
        if common is None:
            return _Context()
        shared = self._contexts.setdefault(("common", common), _Context())
        self._extend(shared, blocks)
        return shared.copy()

    def _extend(self, context: _Context, blocks: int) -> None:
        missing = blocks - context.blocks
        if missing > 0:
            context.add(self._take(missing), missing)

    def _take(self, count: int) -> int:
        self._next += count
        return self._next - count


class _Context:
    """The whole blocks of a prompt as runs: first id and count."""

    __slots__ = ("blocks", "runs")

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        self.blocks = 0

    def copy(self) -> _Context:
        other = _Context()
        other.runs, other.blocks = list(self.runs), self.blocks
        return other

    def add(self, first: int, count: int) -> None:
        self.blocks += count
        if self.runs and sum(self.runs[-1]) == first:
            before, length = self.runs.pop()
            first, count = before, length + count
        self.runs.append((first, count))

    def cut(self, blocks: int) -> None:
        """Keep the first ``blocks`` blocks, if there are more."""
        while self.blocks > blocks:
            first, count = self.runs.pop()
            self.blocks -= count
            if self.blocks < blocks:
                self.runs.append((first, blocks - self.blocks))
                self.blocks = blocks

    def ids(self) -> array[int]:
        ids = array("q")
        for first, count in self.runs:
            ids.extend(range(first, first + count))
        return ids
