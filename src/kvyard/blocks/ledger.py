"""The ledger of a pool: how many of its blocks each tenant has, and for how long it had them.

A block is charged to the tenant whose request allocated it, until it is evicted or freed without content, even if others use
it. So at any time the charges and the empty blocks add up to the pool, and block-seconds add up to the pool times its time.
"""

from collections.abc import Callable, Iterable
from typing import Final

NOBODY: Final = 0
"""The account of requests that name no tenant."""
MOST_ACCOUNTS: Final = 256
"""Accounts of a ledger; tenants that come later share the last one."""
OTHERS: Final = "(others)"


class Ledger:
    """Accounts of tenants, by number. Account 0 is nobody's."""

    def __init__(self, now: Callable[[], int], nobody: int = 0) -> None:
        """``nobody``: blocks in use already, whose tenants weren't noted."""
        self._now = now
        self._numbers: dict[str, int] = {"": NOBODY}
        self.names: list[str] = [""]
        self.used: list[int] = [nobody]
        """Blocks by account."""
        self.lost: list[int] = [0]
        """Blocks by account that were evicted to make room for another tenant."""
        self._area: list[int] = [0]
        """Block-nanoseconds by account up to ``_since``."""
        self._since: list[int] = [now()]
        self.opened = now()
        """Time at which it began to count."""

    def account(self, tenant: str) -> int:
        """Return the number of ``tenant``, given now if it has none."""
        number = self._numbers.get(tenant)
        if number is None:
            if len(self.names) >= MOST_ACCOUNTS:
                return MOST_ACCOUNTS - 1
            number = len(self.names)
            name = OTHERS if number == MOST_ACCOUNTS - 1 else tenant
            self._numbers[name] = number
            self.names.append(name)
            self.used.append(0)
            self.lost.append(0)
            self._area.append(0)
            self._since.append(self._now())
        return number

    def charge(self, account: int, blocks: int) -> None:
        """Charge ``account`` for ``blocks`` more blocks from now on; fewer if negative."""
        now = self._now()
        used = self.used[account]
        self._area[account] += used * (now - self._since[account])
        self._since[account] = now
        self.used[account] = used + blocks

    def evicted(self, account: int, blocks: int, taker: int) -> None:
        """Count ``blocks`` of ``account`` as evicted for ``taker``."""
        self.charge(account, -blocks)
        if account != taker:
            self.lost[account] += blocks

    def clear(self) -> None:
        """Clear all accounts."""
        for account, used in enumerate(self.used):
            self.charge(account, -used)

    def block_ns(self, account: int, now: int) -> int:
        """Return block-nanoseconds of ``account`` until ``now``, which isn't before the time of its latest change."""
        return self._area[account] + self.used[account] * (now - self._since[account])

    @property
    def latest(self) -> int:
        """Return the time of the latest change of an account."""
        return max(self._since)

    def check(self, held: Iterable[tuple[int, int]]) -> None:
        """Raise ``AssertionError`` unless ``held``, (account, blocks) of everything in use, adds up to what is charged."""
        counted = [0] * len(self.used)
        for account, blocks in held:
            counted[account] += blocks
        assert counted == self.used, f"accounts have {self.used} blocks, {counted} are in use"
