"""The outbox: changes on their way to the server, in order, packed as the server's script takes them.

It is bounded by what the mirror holds: while the server is away nothing waits here at all, because afterwards everything is
announced anew.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Deed: TypeAlias = tuple[str, bytes, bytes, bytes]
"""Whose it is, what to do (as the script names it), with which place or stream, and keys or text."""

CALL_KEYS = 1024
"""Keys per script call: some milliseconds, in which the server serves nobody else."""
CALL_DEEDS = 256
CALLS = 8
"""Script calls per round trip."""


class Outbox:
    """A queue of deeds."""

    def __init__(self) -> None:
        self.keys = 0
        """How many keys wait; a deed without keys counts as one."""
        self._deeds: deque[Deed] = deque()

    def __len__(self) -> int:
        return len(self._deeds)

    def put(self, owner: str, deed: bytes, name: bytes, text: bytes = b"") -> None:
        """Add a deed."""
        self._deeds.append((owner, deed, name, text))
        self.keys += _weight(text)

    def put_keys(self, owner: str, deed: bytes, name: bytes, keys: Sequence[int]) -> None:
        """Add a deed with keys, each of them once."""
        text = pack(keys)
        for low in range(0, len(text), CALL_KEYS * 8):
            self.put(owner, deed, name, text[low : low + CALL_KEYS * 8])

    def take(self) -> list[tuple[str, list[bytes]]]:
        """The next round trip's calls: (owner, arguments). They are gone from here."""
        calls: list[tuple[str, list[bytes]]] = []
        room = deeds = 0
        while self._deeds:
            owner, deed, name, text = self._deeds[0]
            if not calls or calls[-1][0] != owner or room < _weight(text) or deeds >= CALL_DEEDS:
                if len(calls) == CALLS:
                    break
                calls.append((owner, []))
                room, deeds = CALL_KEYS, 0
            self._deeds.popleft()
            self.keys -= _weight(text)
            room -= _weight(text)
            deeds += 1
            calls[-1][1].extend((deed, name, text))
        return calls

    def waits_for(self, owner: str) -> bool:
        """Whether anything of ``owner`` hasn't been sent."""
        return any(deed[0] == owner for deed in self._deeds)

    def drop(self, owner: str) -> None:
        """Forget what waits for ``owner``."""
        self._replace(deed for deed in self._deeds if deed[0] != owner)

    def clear(self) -> None:
        """Forget all."""
        self._replace(())

    def _replace(self, deeds: Iterable[Deed]) -> None:
        self._deeds = deque(deeds)
        self.keys = sum(_weight(text) for *_, text in self._deeds)


def pack(keys: Sequence[int]) -> bytes:
    """Keys as the server has them: eight bytes each, the same on every machine. Raises ``OverflowError`` for what is no key."""
    packed = array("Q", keys)
    if BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack(text: bytes) -> int:
    """One key."""
    return int.from_bytes(text, "little")


def _weight(text: bytes) -> int:
    return len(text) // 8 or 1


BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"
