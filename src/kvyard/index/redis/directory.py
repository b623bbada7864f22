"""The directory: the mapping from slots on the server to places in this process, and the writers' states.

On the server a place is a *slot*, a small number given out per epoch. Here it is a number of ``Places``. Both are given to
others once they are free, so a translation holds for one version of the directory and one of the places, and no longer.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from kvyard.clock import MS
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.events.types import Tier
from kvyard.index.bits import bits, mask_of
from kvyard.index.places import Holder, Place, Places

SOLO = "index"
"""The only owner where places are bare numbers."""
_MEMO = 1 << 16


class Owner(msgspec.Struct):
    """A worker or pool as the server knows it: who writes for it, until when, and what the writer says of its streams."""

    token: bytes = b""
    replica: str = ""
    until: int = 0
    """End of the lease, unless it is renewed; 0 if there is none."""
    says: dict[bytes, bytes] = msgspec.field(default_factory=dict)

    def alive(self, now: int) -> bool:
        """Return true if a writer holds the lease on its rows."""
        return now < self.until


class Directory:
    """The server's slots, owners and version, as of the last look."""

    def __init__(self, places: Places | None) -> None:
        """Without ``places`` a place is known by its bare number, and there is one owner."""
        self.version = b"?"
        self.owners: dict[str, Owner] = {}
        self.places: dict[Place, str] = {}
        """Every place that has a slot, and its owner. Empty where places are bare numbers."""
        self.looks = 0
        """Goes up when anything changes that an answer may depend on."""
        self._places = places
        self.slots: dict[int, tuple[str, bytes]] = {}
        """The owner and name of every slot that is given out."""
        self._numbers: dict[int, int] = {}
        self._of_version = (b"", -1)
        self._memo: dict[bytes, int] = {}
        self._state: object = None
        """State that ``looks`` depends on."""

    def name(self, place: int) -> tuple[str, bytes]:
        """Return the owner of a place here, and its name there."""
        if self._places is None:
            return SOLO, b"%d" % place
        named = self._places[place]
        return owner_of(named.holder), encode(named)

    def forget(self) -> None:
        """Forget everything: the server is away, or another one by now."""
        self.version = b"?"
        self.owners.clear()
        self.places.clear()
        self.slots.clear()
        self._memo.clear()
        self._state = None
        self.looks += 1

    def take(self, reply: list[Any], asked: int) -> None:
        """Read the server's answer to a question that was asked at ``asked``."""
        version, slots, owners = reply
        self.owners = {}
        for name, token, replica, left, says in owners:
            until = asked + left * MS if left > 0 else 0
            parts = dict(zip(says[::2], says[1::2], strict=True))
            self.owners[name.decode()] = Owner(token, replica.decode(errors="replace"), until, parts)
        state = (version, {name: (owner.token, owner.until > 0) for name, owner in self.owners.items()})
        if state != self._state:
            self._state = state
            self.looks += 1
        if version != self.version:
            self.version = version
            self.slots = {int(slot): _split(text) for slot, text in zip(slots[::2], slots[1::2], strict=True)}
            if self._places is not None:
                named = {slot: decode(name) for slot, (_, name) in self.slots.items()}
                # What can't be read belongs to no place.
                self.slots = {slot: known for slot, known in self.slots.items() if named[slot] is not None}
                self.places = {place: self.slots[slot][0] for slot, place in named.items() if place is not None}
            self._of_version = (b"", -1)

    def next_end(self) -> int:
        """Return the end of the first lease; 0 if there is none."""
        return min((owner.until for owner in self.owners.values() if owner.until), default=0)

    def translator(self, without: Collection[str] = ()) -> Callable[[bytes], int]:
        """Return a function from a row there to a row here. What the owners in ``without`` have is left out."""
        places = self._places
        version = (self.version, -1 if places is None else places.version)
        if version != self._of_version:
            self._of_version = version
            self._numbers = {}
            self._memo.clear()
            for slot, (_, name) in self.slots.items():
                place = decode(name) if places is not None else None
                # Only places that have a number already: who asks has views that know no others.
                number = int(name) if places is None else places.known(place) if place is not None else None
                if number is not None:
                    self._numbers[slot] = number
        numbers, memo = self._numbers, self._memo
        if without:
            numbers = {slot: number for slot, number in numbers.items() if self.slots[slot][0] not in without}
            memo = {}

        def translate(row: bytes) -> int:
            mask = memo.get(row)
            if mask is None:
                slots = [len(row) * 8 - 1 - bit for bit in bits(int.from_bytes(row, "big"))]
                mask = mask_of(numbers[slot] for slot in slots if slot in numbers)
                if len(memo) > _MEMO:
                    memo.clear()
                memo[row] = mask
            return mask

        return translate


def owner_of(holder: Holder) -> str:
    """Return the owner whose lease covers ``holder``. All ranks of a worker have one owner: one stream may report several
    of them."""
    return f"pool {holder.name}" if holder.shared else f"worker {holder.name}"


def encode(place: Place) -> bytes:
    """Return a place's name on the server."""
    holder = place.holder
    return msgspec.json.encode([holder.name, holder.rank, holder.shared, place.tier, place.group])


def decode(name: bytes) -> Place | None:
    """Return the place of that name, or ``None`` if it is no place's."""
    try:
        holder, rank, shared, tier, group = msgspec.json.decode(name, type=tuple[str, int, bool, Tier, int | None])
    except DECODE_ERRORS:
        return None
    return Place(Holder(holder, rank, shared), tier, group)


def _split(text: bytes) -> tuple[str, bytes]:
    length, _, rest = text.partition(b":")
    return rest[: int(length)].decode(), rest[int(length) :]
