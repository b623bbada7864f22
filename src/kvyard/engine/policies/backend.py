"""A backend: one engine's way to schedule, put together from parts, and which settings it can honour."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvyard.blocks.pool import RadixTree
from kvyard.blocks.state_slots import StateSlots, StateTracking
from kvyard.blocks.window_pages import WindowPages
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.queue import Queue
from kvyard.tiers.prefetches import PrefetchRules

Config = TypeVar("Config")
"""``EngineConfig``, which names a backend and so knows of this."""


class TreeSettings(NamedTuple):
    """The radix tree that blocks are cached in."""

    eviction: str
    """Its eviction policy."""
    pages: int
    """Pages of full attention."""
    window: int | None = None
    """Tokens before the current one that sliding-window layers read, if the model has any."""
    window_pages: int = 0
    """Pages that they have."""
    states: int | None = None
    """Slots for states of recurrent layers, if the model has any."""
    tracking: StateTracking | None = None
    """Positions of states inside requests, if they are kept."""
    host_pages: int = 0
    """Pages of full attention that host memory has, if there is any."""
    window_host_pages: int = 0
    """Pages of sliding-window layers that it has."""
    prefetch: PrefetchRules | None = None
    """Prefetches from storage behind the host, if there is any."""

    def empty(self, page_size: int) -> RadixTree:
        """Return the tree of a device that has computed nothing."""
        windows = None if self.window is None else WindowPages(self.window_pages, self.window, page_size)
        states = None if self.states is None else StateSlots(self.states, self.tracking)
        return RadixTree(self.eviction, windows, states)


class DraftSlots(NamedTuple):
    """Slots that a request has for draft tokens."""

    width: int
    """Tokens that it verifies in a pass: its last one and drafts."""
    reserve: int
    """Slots beyond its computed tokens."""


class SchedulerBackend(NamedTuple, Generic[Config]):
    """Implementation of ``EngineConfig.backend``."""

    block_size: int
    """Tokens per block by default."""
    check: Callable[[Config], None]
    """Raises ``ConfigError`` for settings that it can't honour."""
    queue: Callable[[Config], Queue]
    """Makes the queue of waiting jobs."""
    policy: Callable[[Lifecycle, Config], PassMaker]
    """Makes passes of an engine's jobs."""
    spare_blocks: int | None = None
    """If a request may grow no larger than the pool: blocks to subtract from it, for rounding."""
    tree: Callable[[Config], TreeSettings | None] | None = None
    """The radix tree that blocks are cached in, if that is the backend's way."""
    reserved_drafts: Callable[[Config], DraftSlots | None] | None = None
    """Slots for draft tokens, if they are reserved ahead."""
