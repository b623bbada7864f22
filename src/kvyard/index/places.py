"""Places: holders of copies, by tier and attention group; each a small number, so that a row is one integer.

A *holder* is one rank of a worker, or a pool that several workers share. A *place* is a holder's (tier, group). Sets of
places are the bits of a Python integer: a row of the index is one of these sets, and so is everything the scorer asks of
it.
"""

from collections.abc import Iterable

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.types import Tier
from kvyard.index.bits import bits


class Holder(msgspec.Struct, frozen=True, order=True):
    """Holder of copies: a worker's data-parallel rank, or with ``shared`` a pool of that name."""

    name: str
    rank: int = 0
    shared: bool = False

    def __str__(self) -> str:
        return f"pool {self.name}" if self.shared else f"{self.name}@{self.rank}"


class Place(msgspec.Struct, frozen=True):
    """One holder's copies of one tier for one group; group ``None`` where the producer names none."""

    holder: Holder
    tier: Tier
    group: int | None = None

    def __str__(self) -> str:
        group = "" if self.group is None else f" group {self.group}"
        return f"{self.holder} {self.tier.name}{group}"


class Places:
    """Every place seen so far, numbered in order of appearance, and who shares which pool.

    A number is given to another place only once its holder was retired, so that workers may come and go for ever.
    ``version`` goes up when anything changes that an answer may depend on.
    """

    def __init__(self) -> None:
        self.all: list[Place] = []
        self.version = 0
        self.members: dict[str, frozenset[Holder]] = {}
        """Workers that share each pool."""
        self.of: dict[Holder, list[int]] = {}
        """The numbers of each holder's places."""
        self._numbers: dict[Place, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Place:
        return self.all[number]

    def number(self, place: Place) -> int:
        """Return the number of ``place``, a new one if it is new."""
        number = self._numbers.get(place)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.all[number] = place
            else:
                number = len(self.all)
                self.all.append(place)
            self._numbers[place] = number
            self.of.setdefault(place.holder, []).append(number)
            self.version += 1
        return number

    def retire(self, holder: Holder) -> None:
        """``holder`` is gone, and the caller has cleared its places: their numbers are free."""
        for number in self.of.pop(holder, ()):
            del self._numbers[self.all[number]]
            self._free.append(number)
        self.version += 1

    def known(self, place: Place) -> int | None:
        """Return the number of ``place`` if it has one."""
        return self._numbers.get(place)

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        """Credit the copies in ``pool`` to each of ``members`` from now on. Raises ``KvyardError`` for a pool in a pool."""
        new = frozenset(members)
        if any(member.shared for member in new):
            raise KvyardError(f"pool {pool!r} can't have a pool as a member: name the workers")
        self.members[pool] = new
        self.version += 1

    def pools(self, worker: Holder) -> list[Holder]:
        """Return the pools that ``worker`` is a member of."""
        if not self.members:
            return []
        return [Holder(name, 0, True) for name, members in sorted(self.members.items()) if worker in members]

    def names(self, mask: int) -> list[Place]:
        """Return the places whose bits are set in ``mask``."""
        return [self.all[bit] for bit in bits(mask)]
