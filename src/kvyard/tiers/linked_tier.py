"""A tier: a store and the link that leads to it from the next closer tier, with the copies under way between the two.

Private to a worker, or owned by a ``Timeline`` and lent to several. A shared store has a copy from the instant it lands, a
private one from when its worker next ticks.
"""

from __future__ import annotations

from kvyard.events.types import Sink, Tier
from kvyard.tiers.announce import ChunkSink
from kvyard.tiers.config import TierConfig
from kvyard.tiers.copies import Copy, CopyQueue
from kvyard.tiers.layout import PageLayout
from kvyard.tiers.links import Direction, Link, make_link
from kvyard.tiers.store import TierStore


class LinkedTier(CopyQueue):
    """``store`` behind ``link``."""

    def __init__(self, store: TierStore, link: Link, shared: bool = False) -> None:
        super().__init__((Tier(store.tier - 1).name, store.tier.name), link)
        self.store = store
        self.shared = shared
        """Whether several workers use it."""
        self.origins: dict[int, str] = {}
        """In a shared store: which worker stored each page."""

    def advance(self, now: int) -> bool:
        if now >= self._now:
            self.store.clock.sleep_until(now)
        return super().advance(now)

    def landed(self, copy: Copy) -> None:
        if self.shared:
            self.settle(copy)
        copy.inbox.append(copy)

    def settle(self, copy: Copy) -> None:
        """Do the store's side of a copy that has landed: what came in can be found, what was read may be evicted."""
        if copy.direction == Direction.IN:
            for held in copy.far:
                self.store.let_go(held)
            return
        for piece, held in zip(copy.pieces, copy.far):
            if self.shared:
                self.origins.update((page, copy.worker) for extent in held for page in extent.ids)
            self.store.land(piece, held)

    def foreign(self, copy: Copy) -> int:
        """How many of the pages that ``copy`` reads were stored by another worker."""
        if not self.shared:
            return 0
        return sum(self.origins.get(page) != copy.worker for held in copy.far for extent in held for page in extent.ids)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless everything under way holds what it reads or fills, and the store is sound."""
        for transfer, copy in self.under_way.items():
            for held in copy.far:
                assert held in self.store.pool.holds, (
                    f"I6: {transfer} has let go of its pages in {self.store.tier.name}"
                )
        self.store.check_integrity()
        self.link.check_integrity()


def make_tier(config: TierConfig, tier: Tier, layout: PageLayout, sink: Sink | None, events: str) -> LinkedTier:
    """An empty tier for blocks of ``layout``. Raises ``ConfigError``."""
    if sink is not None and layout.chunk > 1 and events == "self-describing":
        sink = ChunkSink(sink, layout.block_sizes)
    pages = layout.pages(config.capacity(layout.block_bytes))
    store = TierStore(tier, pages, layout.num_groups, eviction=config.eviction, sink=sink)
    return LinkedTier(store, make_link(config.link), config.scope == "shared")
