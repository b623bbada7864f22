"""SGLang's HiCache: host memory whose contents are part of the device's radix tree (``kvyard.blocks.host_pages``).

Copies to the host are gathered and submitted together when a pass is formed; what a batch loads is submitted with it. Each
direction carries one copy after the other, as a CUDA stream does. No request waits in a queue for a load: the pass that needs
it doesn't end before it has come. With write-back the scheduler waits for the copy of everything that it evicts.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from kvyard.blocks import BlockManager, Hit, Request
from kvyard.blocks.extent import Node
from kvyard.blocks.host_pages import HostPages, PageCopy
from kvyard.blocks.integrity import check_pool
from kvyard.blocks.node_parts import part_of
from kvyard.blocks.pool import RadixTree
from kvyard.blocks.spec import ConfigError
from kvyard.events.types import Sink, Tier
from kvyard.hashing import Run
from kvyard.tiers.config import OffloadConfig
from kvyard.tiers.copies import Copy
from kvyard.tiers.links import Direction, Link, LinkConfig
from kvyard.tiers.links.fifo import FifoLink, FifoTransfer
from kvyard.tiers.offload import Offload
from kvyard.tiers.page_files import PageFiles
from kvyard.tiers.prefetches import Prefetches, PrefetchRules
from kvyard.tiers.pulls import Pulls

THRESHOLDS = {"write_through": 1, "after_hits": 2, "on_eviction": None}
"""Inserts after which a node is copied, by offload policy: SGLang's ``write_through``, ``write_through_selective`` and
``write_back``, which copies what the device evicts.
"""
LEAST_LOADED = 10
"""Tokens below which a prefix on the host is computed instead: SGLang's ``load_back_threshold``."""


class RemovalsOnly:
    """Passes on what leaves the host. What enters is announced when its copy has landed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        """Ignore copies on the device: nothing has arrived yet."""

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        self._sink.left(run, group, tier, last, reason)

    def cleared(self, tier: Tier | None = None) -> None:
        self._sink.cleared(tier)


class HiCache(Offload):
    """Host memory below one worker's device, as SGLang uses it."""

    def __init__(
        self,
        manager: BlockManager,
        config: OffloadConfig,
        *,
        block_bytes: int,
        eviction: str,
        pages: int,
        window_pages: int = 0,
        prefetch: PrefetchRules | None = None,
        name: str = "",
        sink: Sink | None = None,
    ) -> None:
        """``eviction``: SGLang's ``radix_eviction_policy``. ``pages`` and ``window_pages``: pages of full attention and of
        sliding windows that the host has. ``prefetch``: rules for prefetches, with a second tier. Raises ``ConfigError`` for
        tiers that HiCache can't have.
        """
        check(config)
        storage = config.tiers[1] if len(config.tiers) > 1 else None
        config = msgspec.structs.replace(
            config, tiers=(msgspec.structs.replace(config.tiers[0], num_blocks=pages, bytes=None),)
        )
        super().__init__(
            manager,
            config,
            block_bytes=block_bytes,
            name=name,
            sink=RemovalsOnly(sink) if sink is not None else None,
            host_link=_stream,
            radix=RadixTree(eviction),
        )
        self._sink = sink
        assert manager.tree is not None
        tree = self._tree = manager.tree
        [self._tier] = self.tiers
        store, threshold = self._tier.store, THRESHOLDS[config.policy]
        self.pages = HostPages(manager.pool, store.pool, threshold, self._announce, self._write_now)
        tree.host = self.pages
        if manager.pool.windows is not None:
            self.pages.open_windows(manager.pool.windows, window_pages)
        tree.order.counts_hits = threshold is not None
        self.clock = 0
        """Time at which the copies that the scheduler waits for are done."""
        self.latest_load: tuple[int, ...] = ()
        """Tokens of the latest load by the tier that had them, closest to the device first."""
        self._in_flight: dict[Copy, list[PageCopy]] = {}
        self.prefetches: Prefetches | None = None
        """Prefetches from storage behind the host, if there is any."""
        if storage is not None:
            assert prefetch is not None
            self.prefetches = Prefetches(tree, self.pages, PageFiles(storage, block_bytes), prefetch)
            self.counters.tiers.append(self.prefetches.counters)

    def _announce(self, node: Node) -> None:
        if self._sink is not None:
            self._sink.entered(Run(node.chain, node.start, node.stop), 0, self._tier.store.tier, True)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> list[Request]:
        """Submit what is to be written, and let copies that have landed by ``now`` take effect: writes first."""
        self.clock = max(self.clock, now)
        prefetches = self.prefetches
        if prefetches is not None:
            prefetches.receive(self.clock)
        self._submit(now, Direction.OUT)
        self._tier.advance(now)
        self._land(inward=False)
        self._land(inward=True)
        if prefetches is not None:
            prefetches.drain()
        return []

    def earliest_deadline(self) -> int | None:
        landing = super().earliest_deadline()
        end = self.prefetches.next_end() if self.prefetches is not None else None
        return end if landing is None or (end is not None and end < landing) else landing

    def _land(self, *, inward: bool) -> None:
        """Let copies of one direction take effect that have landed."""
        inbox = self.state.inbox
        landed = [copy for copy in inbox if copy.inward is inward]
        for copy in landed:
            inbox.remove(copy)
            self.state.count(copy)
            for pages in self._in_flight.pop(copy):
                if inward:
                    self.pages.loaded(pages)
                else:
                    self.pages.written(pages)

    def _write_now(self) -> None:
        """Submit what is to be written, and wait for it."""
        self.clock = self._submit(self.clock, Direction.OUT)
        if self.prefetches is not None:
            self.prefetches.now = self.clock
        self._tier.advance(self.clock)
        self._land(inward=False)

    def bring(self, hit: Hit) -> Hit | None:
        """Load what the host has after ``hit``, the latest match, with the next batch. Returns the longer hit; ``None`` if the
        host has too little to be worth a copy, or the device has no room.
        """
        tree, counters = self._tree, self.counters
        beyond = tree.beyond
        tokens = sum([node.stop - node.start for node in beyond.nodes]) * tree.block_size
        counters.lookups += 1
        if tokens < LEAST_LOADED and not beyond.windows:
            return None
        nodes = tree.load(hit)
        if nodes is None:
            counters.no_device_room += 1
            return None
        counters.hits += 1
        counters.hit_tokens += tokens
        stored = self.prefetches.take_tokens(hit.request, beyond.nodes) if self.prefetches is not None else 0
        self.latest_load = (tokens - stored, stored) if self.prefetches is not None else (tokens,)
        for level, brought in enumerate(self.latest_load):
            counters.tiers[level].tokens += brought
        return nodes

    def load(self, now: int) -> int:
        """Submit what the batch that starts ``now`` loads. Returns when it has come."""
        return self._submit(max(now, self.clock), Direction.IN)

    def _submit(self, now: int, direction: Direction) -> int:
        """Submit what is wanted of one direction at ``now``. Returns when it has come."""
        wanted = self.pages.writes if direction is Direction.OUT else self.pages.loads
        if not wanted:
            return now
        copies, wanted[:] = list(wanted), []
        near, far = [copy.device for copy in copies], [copy.host for copy in copies]
        sent = Copy(0, direction, self.name, self.state.inbox, [], near, far)
        self._in_flight[sent] = copies
        self.state.send(now, sent, sum([copy.pages for copy in copies]))
        transfer = next(reversed(self._tier.in_flight))
        assert isinstance(transfer, FifoTransfer)
        if direction is Direction.OUT:
            self._tier.store.evicted = self._tier.store.pool.evicted
        return transfer.due

    def join(self, pulls: Pulls, worker: int) -> None:
        """Raise ``ConfigError``: HiCache knows its own device only."""
        raise ConfigError("with backend sglang, workers don't pull from each other: leave pulls out")

    # -- reporting ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[tuple[int, Tier, list[Run]]]:
        """Yield the contents of the host."""
        written = [copy for sent, copies in self._in_flight.items() if not sent.inward for copy in copies]
        pending = {extent for copy in (*self.pages.writes, *written) for extent in copy.host.settle()}
        nodes = [node for node in self.pages.map.nodes() if node.copies[0] not in pending]
        yield 0, self._tier.store.tier, [Run(node.chain, node.start, node.stop) for node in nodes]

    def rooms(self) -> list[tuple[object, int]]:
        files = self.prefetches.files if self.prefetches is not None else None
        return super().rooms() + ([(files, files.limit)] if files is not None else [])

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every page of the host is in one place, and held if the device has it too."""
        self.manager.check_integrity()
        host = self.pages.pool
        references = Counter(extent for held in host.holds.tables for extent in held)
        device = self.manager.pool.maps[0].starts
        for node in self.pages.map.nodes():
            on_device = device.get(node.key)
            if on_device is not None:
                assert on_device.stop == node.stop, f"{node} is cut elsewhere on the device"
                assert on_device.copies[0].history is node.copies[0].history, f"{node} has other uses on the device"
                references[node.copies[0]] += 1
        if self.prefetches is not None:
            references.update(self.prefetches.held())
        check_pool(host, references)
        copies = [*self.pages.writes, *self.pages.loads, *(copy for sent in self._in_flight.values() for copy in sent)]
        assert {copy.device for copy in copies} == self.manager.pool.holds.tables, (
            "I6: a hold on the device without a copy"
        )
        on_host = {table for copy in copies for table in (copy.host, copy.again) if table is not None}
        assert on_host | self.pages.locks == host.holds.tables, "I6: a hold on the host without a copy"
        windows = self.manager.pool.windows
        if windows is not None and windows.host is not None:
            counted = windows.host.free
            for node in self.pages.map.nodes():
                part = part_of(node.copies[0])
                counted += node.stop - node.start if part.host is not None else 0
                assert part.host is None or part.host.extent is node.copies[0], (
                    f"{node} has its windows elsewhere on the host"
                )
            assert counted == windows.host.size, f"I2: {counted} window pages are on the host, of {windows.host.size}"
        self._tier.link.check_integrity()


def _stream(config: LinkConfig) -> Link:
    """Return the link of ``config`` with a queue for each direction."""
    lanes = [msgspec.structs.replace(lane, client_bandwidth=None) for lane in config.lanes]
    return FifoLink(LinkConfig(discipline="fifo", outward=lanes[0], inward=lanes[1]))


def check(config: OffloadConfig) -> None:
    """Raise ``ConfigError`` for tiers that HiCache can't have."""
    if config.policy not in THRESHOLDS:
        raise ConfigError(
            "with backend sglang, offload_policy is write_through, after_hits (write_through_selective) or on_eviction "
            f"(write_back), not {config.policy}"
        )
    if config.offload_ahead is not None or config.on_unclean is not None:
        raise ConfigError("SGLang copies what it evicts when it does: leave out offload_ahead and on_unclean")
    if config.min_uses not in (None, 2):
        raise ConfigError(f"SGLang copies to the host what is used twice: leave out min_uses {config.min_uses}")
    if len(config.tiers) > 2 or any(tier.scope != "private" for tier in config.tiers):
        raise ConfigError("with backend sglang lower tiers are the worker's own host memory and files behind it")
    if config.wait_for_save:
        raise ConfigError("SGLang's passes don't wait for what they write to the host: leave out wait_for_save")
    if config.blocks_per_chunk != 1 or config.offload_batch_size is not None:
        raise ConfigError("SGLang copies pages: leave out blocks_per_chunk and offload_batch_size")
    if (
        any(tier.eviction != "lru" for tier in config.tiers)
        or config.spill != "on_landing"
        or config.load_policy != "always"
    ):
        raise ConfigError(
            "with backend sglang the host evicts by sglang.radix_eviction_policy and every hit of 10 tokens or more is loaded: "
            "leave out eviction, spill and load_policy"
        )
