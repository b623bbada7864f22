"""Eviction by quota: the tenant that uses the most relative to its share loses its least recently used blocks.

Each account has its own eviction order, the one that the pool has without quotas (``lru`` or ``priority``). The account that
loses a block is chosen block by block, in large pools for a thousandth of the pool at a time, so that tenants with equal
claims don't alternate by single blocks. ``run`` returns how many blocks in a row come from one account.
"""

from collections.abc import Callable, Iterator, Mapping

from kvyard.blocks.eviction import EvictionOrder, make_order
from kvyard.blocks.extent import Extent
from kvyard.blocks.ledger import Ledger
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.spec import ConfigError

GRAINS = 1000
"""Whose turn it is is decided anew for every such part of a pool; in smaller pools for every block."""


class QuotaOrder:
    """Lines of cached extents by account, and whose turn it is."""

    def __init__(
        self,
        quotas: Quotas,
        ledger: Ledger,
        capacity: int,
        name: str,
        now: Callable[[], int],
        options: Mapping[str, float] | None = None,
    ) -> None:
        """``name``: the eviction policy within a tenant. Raises ``ConfigError`` for one that can't be had here."""
        check_quota_order(name)
        self.quotas = quotas
        self.isolated = quotas.mode == "isolated"
        self._ledger = ledger
        self._capacity = capacity
        self._grain = max(1, capacity // GRAINS)
        """Blocks of one account that are evicted in a row at least, if it has as many."""
        self._make: Callable[[], EvictionOrder] = lambda: make_order(name, now, options)
        self.reads_priorities = self._make().reads_priorities
        self._lines: list[EvictionOrder] = []
        self._weights: list[int] = []
        self._limits: list[int | None] = []
        self.idle: list[int] = []
        """Cached blocks without a reference, by account."""
        self.due: set[int] = set()
        """Accounts that may be above their limits since a request gave blocks back."""

    def know(self, account: int) -> None:
        """Make the line of ``account``, and of those before it, where there is none."""
        while len(self._lines) <= account:
            tenant = self._ledger.names[len(self._lines)]
            self._lines.append(self._make())
            self._weights.append(self.quotas.weight(tenant))
            self._limits.append(self.quotas.limit(tenant, self._capacity))
            self.idle.append(0)

    def excess(self, account: int) -> int:
        """Return idle blocks of ``account`` that have to go for it to keep its limit."""
        self.know(account)
        limit = self._limits[account]
        if limit is None:
            return 0
        return max(0, min(self._ledger.used[account] - limit, self.idle[account]))

    def room(self, account: int, unnamed: int) -> int:
        """Return blocks that ``account`` may take in a pool that has ``unnamed`` empty ones and can refuse."""
        self.know(account)
        own = self.idle[account]
        room = unnamed + (own if self.isolated else sum(self.idle))
        limit = self._limits[account]
        if limit is not None:
            room = min(room, limit - self._ledger.used[account] + own)
        return max(0, room)

    def first(self, account: int) -> Extent:
        """Return the next victim among the extents of ``account``. Raises ``IndexError`` when there is none."""
        return self._lines[account].head()

    def shrunk(self, account: int, blocks: int) -> None:
        """Note that the last ``blocks`` of an extent in the order were evicted; the extent keeps its place."""
        self.idle[account] -= blocks

    def victim(self, taker: int) -> Extent:
        """Return the next victim where ``taker`` needs room. Raises ``IndexError`` when there is none."""
        if self.isolated and taker < len(self.idle) and self.idle[taker]:
            return self._lines[taker].head()
        return self.head()

    def head(self) -> Extent:
        account = self._leader(-1)
        if account < 0:
            raise IndexError("no extent is left to evict")
        return self._lines[account].head()

    def run(self, account: int, taker: int) -> int:
        """Return the blocks of ``account``, which is next, that are evicted before another account's."""
        if self.isolated and account == taker:
            return self.idle[account]
        other = self._leader(account)
        if other < 0:
            return self.idle[account]
        weight = self._weights[other]
        lead = self._ledger.used[account] * weight - self._ledger.used[other] * self._weights[account]
        blocks, rest = divmod(lead, weight)
        return max(self._grain, blocks if not rest and other < account else blocks + 1)

    def _leader(self, but: int) -> int:
        """Return the account with idle blocks that has the most for its weight, the first among equals; -1 if there is none."""
        best, best_used, best_weight = -1, 0, 1
        for account, idle in enumerate(self.idle):
            if idle and account != but:
                used, weight = self._ledger.used[account], self._weights[account]
                if best < 0 or used * best_weight > best_used * weight:
                    best, best_used, best_weight = account, used, weight
        return best

    # -- as EvictionOrder says ----------------------------------------------------------------------------------------

    def push(self, extent: Extent) -> None:
        account = extent.account
        self.know(account)
        self._lines[account].push(extent)
        self.idle[account] += len(extent.ids)
        limit = self._limits[account]
        if limit is not None and self._ledger.used[account] > limit:
            self.due.add(account)

    def push_front(self, extent: Extent) -> None:
        self.know(extent.account)
        self._lines[extent.account].push_front(extent)
        self.idle[extent.account] += len(extent.ids)

    def remove(self, extent: Extent) -> None:
        self._lines[extent.account].remove(extent)
        self.idle[extent.account] -= len(extent.ids)

    def insert_after(self, extent: Extent, front: Extent) -> None:
        self._lines[extent.account].insert_after(extent, front)

    def expire(self) -> None:
        for line in self._lines:
            line.expire()

    def __iter__(self) -> Iterator[Extent]:
        """Yield all candidates, account by account: who goes next depends on who takes."""
        for line in self._lines:
            yield from line


def check_quota_order(name: str) -> None:
    """Raise ``ConfigError`` for an eviction policy that can't be that of a tenant's own blocks."""
    if name not in ("lru", "priority"):
        raise ConfigError(f"cache quotas need eviction lru or priority, not {name}: leave one of the two out")
