"""Quotas: each tenant's share of a cache, and how shares are enforced."""

from typing import Literal

import msgspec

from kvyard.blocks.spec import ConfigError

QuotaMode = Literal["borrowed", "hard", "isolated"]
ALL_OTHERS = "*"
_UNIT = 1_000_000


class Quotas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of every pool of an engine, device and lower tiers alike. Raises ``ConfigError`` for shares that can't be.

    - ``borrowed``: room that nobody else uses may be used; who has the most for its share loses blocks first.
    - ``hard``: a tenant has at most its share. Beyond it, its own least recently used blocks are evicted though there be room.
    - ``isolated``: a hard share, and in lower tiers nobody evicts what is another's: what doesn't fit isn't stored. Like
      LMCache's ``IsolatedLRU``, without its batches.

    Memory of running requests counts, and is never refused: on the device, a tenant without cached blocks may take those of
    others for its running requests.
    """

    mode: QuotaMode = "borrowed"
    shares: dict[str, float] = msgspec.field(default_factory=dict)
    """By tenant; ``*`` for each that isn't named, else each of those has what the named ones leave."""

    def __post_init__(self) -> None:
        named = 0.0
        for name, share in self.shares.items():
            if not 0 < share <= 1:
                raise ConfigError(f"the share of tenant {name} is {share:g}: it must be above 0 and at most 1")
            if name != ALL_OTHERS:
                named += share
        if named > 1 + 1e-9:
            raise ConfigError(f"the shares of tenants add up to {named:g}: they must be at most 1 together")
        if named > 1 - 1e-9 and ALL_OTHERS not in self.shares:
            raise ConfigError(
                "the shares of tenants add up to 1 and leave nothing to others: say what those have, as *=0.05"
            )

    def share(self, tenant: str) -> float:
        """Return the share that ``tenant`` is entitled to."""
        share = self.shares.get(tenant)
        if share is None:
            share = self.shares.get(ALL_OTHERS)
        if share is None:
            share = 1.0 - sum(self.shares.values())
        return share

    def weight(self, tenant: str) -> int:
        """Return the share as a whole number, so that shares are compared without rounding."""
        return max(1, round(self.share(tenant) * _UNIT))

    def limit(self, tenant: str, capacity: int) -> int | None:
        """Return the blocks of ``capacity`` that ``tenant`` may have; ``None`` if it may borrow."""
        return None if self.mode == "borrowed" else int(self.share(tenant) * capacity)
