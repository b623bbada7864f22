"""Writes on their way to the server, in order, packed as the server's script takes them.

Bounded by what the mirror holds: while the server is away nothing waits here at all, because afterwards everything is
written again.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Write: TypeAlias = tuple[str, bytes, bytes, bytes]
"""The owner, the operation (as the script names it), the place or stream it is about, and keys or text."""

CALL_KEYS = 1024
"""Keys per script call: some milliseconds, in which the server serves no other client."""
CALL_WRITES = 256
CALLS = 8
"""Script calls per round trip."""


class PendingWrites:
    """A queue."""

    def __init__(self) -> None:
        self.keys = 0
        """How many keys wait; a write without keys counts as one."""
        self._writes: deque[Write] = deque()

    def __len__(self) -> int:
        return len(self._writes)

    def put(self, owner: str, operation: bytes, name: bytes, text: bytes = b"") -> None:
        self._writes.append((owner, operation, name, text))
        self.keys += _weight(text)

    def put_keys(self, owner: str, operation: bytes, name: bytes, keys: Sequence[int]) -> None:
        """Add a write of keys, each of which is listed once."""
        text = pack(keys)
        for low in range(0, len(text), CALL_KEYS * 8):
            self.put(owner, operation, name, text[low : low + CALL_KEYS * 8])

    def take(self) -> list[tuple[str, list[bytes]]]:
        """The next round trip's calls: (owner, arguments). They are gone from here."""
        calls: list[tuple[str, list[bytes]]] = []
        room = writes = 0
        while self._writes:
            owner, *arguments = self._writes[0]
            weight = _weight(arguments[-1])
            if not calls or calls[-1][0] != owner or room < weight or writes >= CALL_WRITES:
                if len(calls) == CALLS:
                    break
                calls.append((owner, []))
                room, writes = CALL_KEYS, 0
            self._writes.popleft()
            self.keys -= weight
            room -= weight
            writes += 1
            calls[-1][1].extend(arguments)
        return calls

    def owners(self) -> set[str]:
        """Whose writes wait."""
        return {write[0] for write in self._writes}

    def drop(self, owner: str | None) -> None:
        """Forget what waits for ``owner``, ``None`` for all."""
        self._writes = deque(write for write in self._writes if owner is not None and write[0] != owner)
        self.keys = sum(_weight(text) for *_, text in self._writes)


def pack(keys: Iterable[int]) -> bytes:
    """Keys as the server has them: eight bytes each, the same on every machine. Raises ``OverflowError`` for what is no key."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(text: bytes) -> int:
    """One key."""
    return int.from_bytes(text, "little")


def _weight(text: bytes) -> int:
    return len(text) // 8 or 1
