"""The pool: a fixed set of physical blocks, taken, held and released, whole extents at a time.

Free blocks are one list, the next to be handed out first: blocks that cache nothing at the front, newest first, then cached
extents in eviction order. Blocks are vLLM's in identity, order and count; only the work is done per extent. Block 0 is the
null block, a placeholder in tables, and never handed out. The pool does not know requests or attention.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvyard.blocks.cache_map import CacheMap
from kvyard.blocks.eviction import EvictionOrder, make_order
from kvyard.blocks.eviction.learning import LearningOrder
from kvyard.blocks.eviction.lru import LruOrder
from kvyard.blocks.eviction.quota import QuotaOrder
from kvyard.blocks.eviction.radix import RadixOrder
from kvyard.blocks.extent import Extent
from kvyard.blocks.holds import Holds
from kvyard.blocks.ledger import NOBODY, Ledger
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.spec import ConfigError
from kvyard.blocks.state_slots import StateSlots
from kvyard.blocks.tree_eviction import TreeEviction
from kvyard.blocks.window_pages import WindowPages
from kvyard.events.types import Sink, Tier
from kvyard.hashing import Key, Run

_NUMBERS: Final[list[int]] = []
"""Block ids as objects that all pools share: otherwise each of a thousand workers would have thousands of its own."""


class RadixTree(NamedTuple):
    """A radix tree that blocks are cached in, as SGLang's (``kvyard.blocks.radix``)."""

    eviction: str
    """Its eviction policy, in place of the pool's."""
    windows: WindowPages | None = None
    """Pages of sliding-window layers beside it: every block that is taken takes one of them."""
    states: StateSlots | None = None
    """Slots for states of recurrent layers beside it."""


class Pool:
    """``num_blocks`` physical blocks, one of them the null block, shared by ``num_groups`` groups."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        eviction: str = "lru",
        eviction_options: Mapping[str, float] | None = None,
        sink: Sink | None = None,
        tier: Tier = Tier.G1,
        now: Callable[[], int] = lambda: 0,
        radix: RadixTree | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """``radix``: cached blocks are a radix tree. ``quotas``: shares of tenants. Raises ``ConfigError`` for a pool without
        blocks, an unknown eviction policy, an option it doesn't have, or quotas with a radix tree.
        """
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least the null block, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.sink = sink
        self.tier = tier
        self.tree = TreeEviction(self, RadixOrder(radix.eviction)) if radix is not None else None
        """Eviction of leaves, if cached blocks are a radix tree."""
        self._radix = self.tree.order if self.tree is not None else None
        self.windows = radix.windows if radix is not None else None
        self.states = radix.states if radix is not None else None
        self._now = now
        self.ledger: Ledger | None = None
        """Blocks by account, once it is opened (``open_ledger``)."""
        self.quota: QuotaOrder | None = None
        """The eviction order again, if it has quotas."""
        if quotas is not None:
            if radix is not None:
                raise ConfigError(
                    "cache quotas are not modelled in a radix tree: leave them out, or choose backend vllm"
                )
            self.ledger = Ledger(now)
            self.quota = QuotaOrder(quotas, self.ledger, num_blocks - 1, eviction, now, eviction_options)
        self.order: EvictionOrder = self._radix or self.quota or make_order(eviction, now, eviction_options)
        self.learner = self.order if isinstance(self.order, LearningOrder) else None
        """The eviction policy again, if it learns from uses."""
        self._lru = self.order if isinstance(self.order, LruOrder) else None
        """The eviction order again, if it is LRU: compiled code then calls it directly."""
        self.maps = [CacheMap(group, self.order, sink, tier) for group in range(num_groups)]
        self.free = num_blocks - 1
        """Number of blocks that can be taken: unnamed ones and cached ones without a reference."""
        self.pinned: Counter[Extent] = Counter()
        """References of pending copies."""
        self.holds = Holds(self)
        self.evicted = 0
        """Cached blocks evicted so far."""
        # Free blocks that cache nothing and were used before, the next to be handed out last. After them come the blocks from
        # ``_fresh`` on, which were never used: they need no list, so an idle worker takes no memory for its blocks.
        self._loose: list[int] = []
        self._fresh = 1
        if self.learner is not None:
            self.learner.attach(num_blocks - 1, self.split)

    @property
    def version(self) -> int:
        """Changes whenever a cached block is moved or evicted: earlier lookups may be invalid."""
        maps = self.maps
        return maps[0].version if len(maps) == 1 else sum([cache_map.version for cache_map in maps])

    @property
    def usage(self) -> float:
        """Share of blocks that are held, 0 to 1."""
        usable = self.num_blocks - 1
        return 1.0 - self.free / usable if usable else 0.0

    @property
    def radix(self) -> TreeEviction:
        """Return the eviction of leaves of its radix tree, which it must have."""
        assert self.tree is not None
        return self.tree

    def open_ledger(self) -> Ledger:
        """Return the pool's ledger, opened now if it wasn't: blocks in use before that are charged to nobody."""
        ledger = self.ledger
        if ledger is None:
            ledger = self.ledger = Ledger(self._now, self.num_blocks - 1 - self.unnamed)
        return ledger

    def take(self, count: int, account: int = NOBODY) -> list[int]:
        """Hand out ``count`` blocks, evicting what they cached, and charge them to ``account``. Raises ``ValueError``,
        changing nothing, if too few are free.
        """
        if not 0 <= count <= self.free:
            raise ValueError(f"cannot take {count} blocks: {self.free} are free")
        if self.ledger is not None:
            self.ledger.charge(account, count)
            if self.quota is not None:
                self._keep_limits(account)
        self.free -= count
        if self.windows is not None:
            self.windows.free -= count
        loose = self._loose
        cut = len(loose) - count
        if cut >= 0:
            taken = loose[: cut - 1 : -1] if cut else loose[::-1]
            del loose[cut:]
            return taken
        loose.reverse()
        taken, self._loose = loose, []
        fresh = self._fresh
        upto = fresh - cut
        if upto > self.num_blocks:
            upto = self.num_blocks
        if upto > fresh:
            numbers = _NUMBERS
            if len(numbers) < upto:
                numbers += range(len(numbers), upto)
            taken += numbers[fresh:upto]
            self._fresh = upto
        left = count - len(taken)
        if left:
            if self.tree is not None:
                self.tree.make_room(left)
                loose = self._loose
                cut = len(loose) - left
                taken += loose[: cut - 1 : -1] if cut else loose[::-1]
                del loose[cut:]
                return taken
            self.evicted += left
            self._evict(left, taken, account)
        return taken

    def _keep_limits(self, account: int) -> None:
        """Evict cached blocks above their limits of ``account`` and of accounts that released blocks lately."""
        quota = self.quota
        assert quota is not None
        quota.due.add(account)
        for number in sorted(quota.due):
            excess = quota.excess(number)
            if excess:
                freed: list[int] = []
                self.evicted += excess
                self._evict(excess, freed, number, number)
                freed.reverse()
                self._loose += freed
        quota.due.clear()

    def discard(self, extent: Extent) -> None:
        """Unregister a cached extent that has one reference, and free its blocks."""
        assert extent.refs == 1, f"{extent} is discarded"
        extent.refs = 0
        extent.history = None
        self.unname(extent)
        extent.forget_neighbours()
        self.free += len(extent.ids)
        self.vacate(extent)

    def vacate(self, extent: Extent) -> None:
        """Count an unregistered extent as evicted: its blocks, which are free, cache nothing from now on."""
        ids = extent.ids
        self.evicted += len(ids)
        if self.ledger is not None:
            self.ledger.charge(extent.account, -len(ids))
        self._loose += ids
        extent.ids = []

    def _evict(self, wanted: int, taken: list[int], account: int, only: int | None = None) -> None:
        """Evict ``wanted`` blocks for ``account``; of the account ``only``, if that is given."""
        lru, learner, quota, ledger = self._lru, self.learner, self.quota, self.ledger
        while wanted:
            count = wanted
            if lru is not None:
                extent = lru.head()
            elif quota is None:
                extent = self.order.head()
            elif only is not None:
                extent = quota.first(only)
            else:
                extent = quota.victim(account)
                count = min(wanted, quota.run(extent.account, account))
            ids = extent.ids
            node = extent.node
            size = len(ids)
            if learner is not None:
                if size > count:
                    self.split(extent, size - count)  # the evicted part becomes an extent of its own
                    ids = extent.ids
                    size = count
                learner.evicted(extent)
            elif size > count:
                keep = size - count
                if node is None or self.maps[node.group].truncate(extent, count):
                    taken += ids[: keep - 1 : -1]
                    del ids[keep:]
                    if ledger is not None:
                        ledger.evicted(extent.account, count, account)
                    if quota is not None:
                        quota.shrunk(extent.account, count)
                    wanted -= count
                    continue
                # Others share the node: make the evicted part an extent of its own.
                self.maps[node.group].split(node, node.start + keep)
                ids = extent.ids
                size = count
            self._dequeue(extent)
            self.unname(extent)
            if extent.left is not None or extent.right is not None:
                extent.forget_neighbours()
            taken += ids[::-1]
            extent.ids = []
            if ledger is not None:
                ledger.evicted(extent.account, size, account)
            wanted -= size

    def _dequeue(self, extent: Extent) -> None:
        """Remove a free extent from the eviction order."""
        lru, radix = self._lru, self._radix
        if lru is not None:
            lru.remove(extent)
        elif radix is not None:
            radix.remove(extent)
        else:
            self.order.remove(extent)

    def _enqueue(self, extent: Extent) -> None:
        """Add a free extent at the end of the eviction order."""
        lru, radix = self._lru, self._radix
        if lru is not None:
            lru.push(extent)
        elif radix is not None:
            radix.push(extent)
        else:
            self.order.push(extent)

    def renew(self, extent: Extent) -> None:
        """Move a free extent that was used without being held to the end of the eviction order."""
        self._dequeue(extent)
        self._enqueue(extent)

    def pin(self, extent: Extent) -> None:
        """Hold a cached extent: one reference more, and no eviction while it lasts."""
        if not extent.refs:
            self._dequeue(extent)
            self.free -= len(extent.ids)
        extent.refs += 1

    def release(self, extents: Iterable[Extent]) -> None:
        """Drop one reference on each of ``extents``, given in the order of their positions.

        What has no reference left becomes free, last position first: unnamed blocks to the front of the line, cached
        extents to the back.
        """
        loose = self._loose
        later: list[Extent] = []
        for extent in extents:
            extent.refs -= 1
            if not extent.refs:
                self.free += len(extent.ids)
                if extent.node is not None or extent.marks is not None:
                    later.append(extent)
                else:
                    loose += extent.ids
                    extent.forget_neighbours()
                    if self.ledger is not None:
                        self.ledger.charge(extent.account, -len(extent.ids))
        for extent in reversed(later):
            self._enqueue(extent)

    def cut(self, extents: Iterable[Extent], low: int, high: int) -> list[Extent]:
        """Return the ``extents``, in order of position, that lie in ``low`` to ``high``, split at both ends."""
        inside: list[Extent] = []
        for extent in extents:
            start = extent.start
            stop = start + len(extent.ids)
            if start >= high:
                break
            if stop > low:
                if start < low:
                    self.split(extent, low - start)
                inside.append(self.split(extent, high - extent.start) if stop > high else extent)
        return inside

    @property
    def unnamed(self) -> int:
        """Return the number of free blocks that cache nothing."""
        return len(self._loose) + self.num_blocks - self._fresh

    def evict(self, block_ids: Iterable[int]) -> None:
        """Unregister these blocks. Their holders and their eviction order stay as they are.

        Raises ``ValueError``, changing nothing, for an id outside the pool. Takes time by the number of cached blocks.
        """
        wanted = list(dict.fromkeys(block_ids))
        for block_id in wanted:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"no block {block_id} in a pool of {self.num_blocks}")
        for block_id in wanted:
            extent = self._find(block_id)
            if extent is not None:
                self.unname(self.isolate(extent, extent.ids.index(block_id)))

    def isolate(self, extent: Extent, index: int) -> Extent:
        """Split ``extent`` so that its block at ``index`` stands alone, and return that block's extent."""
        if index + 1 < len(extent.ids):
            extent = self.split(extent, index + 1)
        if index:
            self.split(extent, index)
        return extent

    def split(self, extent: Extent, count: int) -> Extent:
        """Split off the first ``count`` blocks, copies of the same node with them; returns the earlier part."""
        if extent.node is not None:
            boundary = extent.start + count
            self.maps[extent.node.group].split(extent.node, boundary)
            assert extent.left is not None
            return extent.left
        front = extent.split_front(count)
        if not front.refs:
            self.order.insert_after(extent, front)
        return front

    def unname(self, extent: Extent) -> None:
        """Unregister ``extent``, so that no lookup finds it."""
        if extent.node is not None:
            self.maps[extent.node.group].leave(extent)
        if extent.marks is not None:
            self.maps[extent.marks.group].unmark(extent)

    def _find(self, block_id: int) -> Extent | None:
        named = (extent for cache_map in self.maps for extent in cache_map.extents())
        return next((extent for extent in named if block_id in extent.ids), None)

    def reset(self) -> bool:
        """Evict everything cached, if no block is held; returns true if it did. The free list keeps its order."""
        if self.free != self.num_blocks - 1:
            return False
        line = list(self.line())
        for extent in list(self.order):
            self.order.remove(extent)
        for cache_map in self.maps:
            cache_map.clear()
        if self.ledger is not None:
            self.ledger.clear()
        line.reverse()
        self._loose = line
        self._fresh = self.num_blocks
        if self.sink is not None:
            self.sink.cleared(self.tier)
        return True

    def line(self) -> Iterator[int]:
        """Yield the free blocks, the next to be handed out first."""
        yield from reversed(self._loose)
        yield from range(self._fresh, self.num_blocks)
        for extent in self.order:
            yield from reversed(extent.ids)

    def snapshot(self) -> Iterator[tuple[int, Tier, list[Run]]]:
        """Yield everything cached, per group, each run once: the state that a late listener to the events needs."""
        for cache_map in self.maps:
            runs = [Run(node.chain, node.start, node.stop) for node in cache_map.nodes()]
            for holders in cache_map.marks.values():
                marks = holders[0].marks
                assert marks is not None
                runs += [run for run in marks.runs if cache_map.marks[run[0]] is holders]
            yield cache_map.group, self.tier, runs

    def cached_blocks(self) -> Iterator[tuple[int, Key, int]]:
        """Yield every cached block as (group, hash, physical id). Takes time by the number of cached blocks."""
        for cache_map in self.maps:
            for node in cache_map.nodes():
                hashes = node.chain.hashes(node.start, node.stop)
                for extent in node.copies:
                    for key, block in zip(hashes, extent.ids, strict=True):
                        yield cache_map.group, key, block
            for key, holders in cache_map.marks.items():
                for extent in holders:
                    yield cache_map.group, key, extent.ids[0]
