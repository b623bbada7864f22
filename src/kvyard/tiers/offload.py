"""The offload engine of one worker: a scheduler calls it to have blocks copied out and back in.

A synchronous state machine on the times it receives. It knows requests only as the block manager does, and no scheduling:
requests wait in the scheduler's queues; this only forecasts how long.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from kvyard.blocks import BlockManager, Hit, Request
from kvyard.blocks.eviction import eviction_with_hints
from kvyard.blocks.ownership import end_session
from kvyard.blocks.pool import RadixTree
from kvyard.blocks.spec import ConfigError
from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.events.types import Event, EventBatch, Sink, Stored
from kvyard.hashing import Run
from kvyard.tiers.cleaner import Cleaner
from kvyard.tiers.config import OffloadConfig
from kvyard.tiers.copies import Copy, LinkMaker, WorkerLink, make_tier, next_landing
from kvyard.tiers.layout import PageLayout
from kvyard.tiers.links import make_link
from kvyard.tiers.load_policy import LOADS, PrefillTime
from kvyard.tiers.loader import Loader
from kvyard.tiers.policy import POLICIES, WriteThrough
from kvyard.tiers.pulls import Pulls
from kvyard.tiers.state import LoadAnswer, LoadStep, OffloadState
from kvyard.tiers.store import blocks_of
from kvyard.tiers.storer import Storer
from kvyard.tiers.timeline import Timeline


class Offload:
    """The tiers below one worker's device."""

    def __init__(
        self,
        manager: BlockManager,
        config: OffloadConfig,
        *,
        block_bytes: int,
        name: str = "",
        sink: Sink | None = None,
        timeline: Timeline | None = None,
        prefill_ns: PrefillTime | None = None,
        host_link: LinkMaker = make_link,
        radix: RadixTree | None = None,
    ) -> None:
        """``block_bytes`` is the size of a device block, all layers together. ``sink`` receives changes of private tiers;
        shared ones are the ``timeline``'s, which announces them itself. ``prefill_ns`` is for load policies that weigh
        loading against computing. ``host_link`` makes the link to the first tier, if that is private. ``radix``: see
        ``Pool``.

        Raises ``ConfigError`` for tiers that the manager can't have, or that don't fit the time line's.
        """
        config = _as_device(config, manager)
        self.name = name
        self.config = config
        self.manager = manager
        layout = self.layout = PageLayout(manager, config.blocks_per_chunk, block_bytes)
        pages = layout.pages(config.tiers[0].capacity(block_bytes))
        _check(config, pages, timeline)
        self.timeline = timeline
        # The private ones first: a worker that can't have those must not join the time line.
        by_tier = {
            tier: make_tier(
                wanted, tier, layout, sink, config.events, host_link if tier is LOWER_TIERS[0] else make_link, radix
            )
            for tier, wanted in config.levels
            if wanted.scope == "private"
        }
        self._private = list(by_tier.values())
        if timeline is not None:
            by_tier |= timeline.join(name, layout, config, self._private)
        self.tiers = [by_tier[tier] for tier, _ in config.levels]
        """Below the device, closest first."""
        self._timed = any(tier.store.pool.order.reads_priorities for tier in self.tiers)
        """True if a tier's evictions may depend on the time."""
        if self._timed:
            manager.keeps_by_priority = True
        self.state = OffloadState(name, config, layout, self.tiers)
        self.counters = self.state.counters
        """Counters so far. Live: read, don't keep."""
        policy = POLICIES[config.policy](config.min_uses or 2, self.state.first.num_pages, layout.num_groups)
        _check_evictions(config, manager, policy)
        self._storer = Storer(self.state, policy)
        members = timeline.members if timeline is not None and self.tiers[0].shared else [name]
        self._cleaner = Cleaner(self.state, self._storer, members, policy) if policy.ahead else None
        loads = LOADS.get(config.load_policy)
        if loads.needs_times and prefill_ns is None:
            raise ConfigError(
                f"load_policy {config.load_policy} weighs loading against computing: pass prefill_ns, or choose another"
            )
        self._loader = Loader(self.state, self._cleaner, loads(config.load_options, prefill_ns), policy.moves)
        self._ready: list[Request] = []
        self._worker_links: list[WorkerLink] = []
        self._shared = [tier for tier in self.tiers if tier.shared]
        self._landings_seen = {tier: tier.landings for tier in self._shared}

    def join(self, pulls: Pulls, worker: int) -> None:
        """Pull from other workers from now on, and let them pull from here. ``worker`` is its number in their network.

        Raises ``ConfigError`` for tiers of which others have a part.
        """
        if self._shared:
            raise ConfigError("workers with shared tiers have what others store there: leave pulls out")
        self.state.peers = pulls.join(self.name, worker, self.state.first, self.layout.pool)

    def connect(self, link: WorkerLink) -> None:
        """Account for a link to another worker that ends at this device.

        Raises ``ConfigError`` for a link that doesn't end here.
        """
        if self.layout.pool not in link.pools:
            raise ConfigError(
                f"the link between {link.ends[0]} and {link.ends[1]} doesn't end at the device of {self.name}"
            )
        self._worker_links.append(link)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> list[Request]:
        """Land everything due at or before ``now``, each at its own instant, and return the requests whose load ended.

        They are cached, have ``num_computed_tokens`` set and hold their blocks; in order of completion, to be put at the
        front of the queue so that what was just loaded isn't evicted.
        """
        self._land_due(now)
        self._storer.retry(now)
        if self._cleaner is not None:
            self._cleaner.work(now)
        ready, self._ready = self._ready, []
        return ready

    def _land_due(self, now: int) -> None:
        """Land everything due at or before ``now``. Requests whose load ended are returned by the next ``tick``."""
        self._set_time(now)
        if self.timeline is not None:
            self.timeline.advance(now)
        if self.state.inbox:
            self._deliver()
        while (landing := next_landing(self.tiers)) is not None and landing <= now:
            for tier in self.tiers:
                tier.advance(landing)
            self._deliver()
        for tier in self._shared:
            self._landings_seen[tier] = tier.landings

    @property
    def saving(self) -> bool:
        """Return true if a store of this worker is in flight from the device."""
        return any([not copy.inward for copy in self.state.in_flight(0)])

    def save_deadline(self, now: int) -> int | None:
        """Return when to ask again whether stores have left the device; ``None`` if they have. Lands everything due by ``now``
        while one hasn't.
        """
        if self.saving:
            self._land_due(now)
        return self.earliest_deadline() if self.saving else None

    def _set_time(self, now: int) -> None:
        """Set the time of all tiers: private ones get it from their worker alone, shared ones also from others."""
        for tier in self.tiers:
            tier.store.set_time(now)

    def earliest_deadline(self) -> int | None:
        """Return the next landing that concerns this worker; ``None`` if no copy is in flight.

        Another worker's submission on a shared link may move it, in both directions.
        """
        if self.state.inbox:
            return self.state.inbox[0].ended
        for tier in self._shared:
            if tier.landings != self._landings_seen[tier]:
                return tier.last_landing  # another worker let time pass, and a request here may wait for what landed
        landing, peers = next_landing(self.tiers), self.state.peers
        if peers is not None and peers.incoming:
            pulled = peers.earliest()
            if pulled is not None and (landing is None or pulled < landing):
                return pulled
        return landing

    @property
    def line(self) -> tuple[int, ...]:
        """Changes with what is clean at the head of the device's free line, under ``on_eviction``: blocks were sent to be
        copied, or taken, or the first tier made room for something.
        """
        if self._cleaner is None:
            return ()
        pool = self.layout.pool
        return self._cleaner.cohorts, self.state.first.reservations, pool.evicted, pool.unnamed, pool.free

    @property
    def disturbances(self) -> int:
        """Changes when a shared tier has made room for something, for this worker or another: what it has to offer may be
        less from that instant on, though nothing has landed.
        """
        return sum(tier.store.reservations for tier in self._shared)

    def _deliver(self) -> None:
        state = self.state
        inbox = state.inbox
        while inbox:
            copy = inbox.popleft()
            if copy.level == len(self.tiers):
                self._loader.pulled(copy)
                continue
            state.count(copy)
            tier = self.tiers[copy.level]
            if not tier.shared:
                tier.settle(copy)
            if not copy.inward:
                self._storer.landed(copy)
            elif copy.level:
                if not self.tiers[copy.level - 1].shared:
                    self._loader.fetched(copy)
            else:
                request = self._loader.loaded(copy)
                if request is not None:
                    self._ready.append(request)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def onboard(
        self,
        request: Request,
        hit: Hit,
        now: int,
        *,
        must_fit: bool = False,
        has_running: bool = True,
        backlog: int = 0,
    ) -> LoadAnswer:
        """Look up the prefix of ``request`` in lower tiers beyond ``hit``, just looked up, and begin to load it, unless the
        load policy leaves it there. ``backlog``: prompt tokens that running requests have still to compute, for policies
        that care.

        Where a load begins the hit is adopted and blocks are reserved for the rest, as ``BlockManager.allocate`` does on
        these terms; the request must then be left alone until ``tick`` returns it, or be forgotten. In all other cases it
        holds nothing on the device.
        """
        self._set_time(now)
        outcome = self._loader.onboard(request, hit, now, must_fit, has_running, backlog)
        if outcome.step is LoadStep.STARTED or outcome.step is LoadStep.WAITING:
            return outcome._replace(deadline=self.earliest_deadline())
        return outcome

    def offload(self, request: Request, now: int) -> None:
        """Store what the policy wants of ``request``, which computed tokens in the pass that ended at ``now``."""
        if self._timed:
            for tier in self._private:
                tier.store.set_time(now)  # passes of a plan have no tick of their own
        self._set_time(now)
        self._storer.offer(request, now)

    def admitted(self, request: Request) -> int:
        """Count what the load policy has left in lower tiers of ``request``, which begins to run. Returns those tokens."""
        offered = self.state.requests.get(request)
        if offered is None or not offered.left:
            return 0
        left, offered.left = offered.left, 0
        self.counters.left_requests += 1
        self.counters.left_tokens[offered.why] = self.counters.left_tokens.get(offered.why, 0) + left
        return left

    def quiet_until(self, request: Request) -> int:
        """``offload`` does nothing while fewer tokens than this are computed; infinite if it never will."""
        return self._storer.quiet_until(request)

    def make_clean(self, needed: int, now: int, hit: Hit | None = None) -> int | None:
        """``needed`` blocks are about to be taken, besides those of ``hit``, which will be adopted. ``None``: go ahead; a
        time: wait for it, since what stands at the head of the line is still being copied. Only the policy
        ``on_eviction`` ever asks to wait.
        """
        if self._cleaner is None:
            return None
        return self._cleaner.make_clean(needed, now, self.earliest_deadline, hit)

    def forget(self, request: Request, now: int) -> None:
        """Forget ``request``, which finished, was cancelled or is preempted: call this *before* its blocks are freed.

        A load in flight still lands, and its blocks come back then; submitted stores still land.
        """
        offered = self.state.requests.pop(request, None)
        if self.state.peers is not None:
            self.state.peers.forget(request)
        if offered is not None:
            self._loader.forget(request, offered)
            self._storer.forget(request)
            if request in self._ready:
                self._ready.remove(request)

    def claim(self, request: Request, now: int) -> None:
        """``request`` has ended at ``now``, and still holds its blocks: note in every tier whose its pages are, and what its
        hints say of them, where the manager heeds hints.
        """
        session = request.hints.session or request.id
        for tier in self.tiers:
            tier.store.set_time(now)  # what is kept for a time is kept from now on
            for group, size in enumerate(self.layout.page_tokens):
                keys = self.layout.chain(request, group).keys
                tier.store.claim(
                    group, keys, min(request.num_computed_tokens // size, len(keys)), session, request.hints
                )

    def end_session(self, session: str) -> int:
        """End ``session``: pages that it alone has used are the first to be evicted. Returns how many, in all tiers."""
        return sum(end_session(tier.store.pool.order, session) for tier in self.tiers) if self.manager.hints else 0

    def close(self, now: int) -> None:
        """Release all that a failed worker keeps in shared tiers for requests, and submit nothing more.

        Copies in flight still land. Not to be ticked again.
        """
        for request in list(self.state.requests):
            self.forget(request, now)
        self._storer.close()

    # -- reporting ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[tuple[int, Tier, list[Run]]]:
        """Yield the contents of private tiers, as ``Pool.snapshot`` does for the device: for a ``Batcher`` over both."""
        for tier in self._private:
            for group, name, runs in tier.store.pool.snapshot():
                if self.layout.chunk > 1 and self.config.events == "self-describing":
                    runs = [blocks_of(run, self.layout.block_sizes[group]) for run in runs]
                yield group, name, runs

    def rooms(self) -> list[tuple[object, int]]:
        """Return the stores of all tiers with the pages that each has room for."""
        return [(tier.store, tier.store.num_pages) for tier in self.tiers]

    def finish_batch(self, batch: EventBatch) -> EventBatch:
        """Return ``batch`` in the configured form of events; the same object if there is nothing to change."""
        return _legacy(batch) if self.config.events == "legacy" else batch

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless I1, I2 and I6 hold in every tier, and every hold has a reason."""
        self.manager.check_integrity()
        for tier in self._private:
            tier.check_integrity()
        near: Counter[object] = Counter()
        for copy in self._copies():
            if copy.level:
                continue
            if not copy.inward or copy.request is None:
                near.update(copy.near)
            else:
                assert self.manager.requests.get(copy.request.id) is copy.request, f"I6: {copy.request} has no blocks"
        for link in self._worker_links:
            near.update(link.held(self.layout.pool))
        peers = self.state.peers
        if peers is not None:
            near.update(peers.held(self.layout.pool))
        assert near.keys() == self.layout.pool.holds.tables, (
            "I6: a hold on the device without a copy, or a copy without a hold"
        )
        kept = [pair for request in self.state.requests.values() for pair in request.keep]
        for store, held in kept:
            assert held in store.pool.holds.tables, "what is kept for a request is not held"
        if self.timeline is None:
            known = {held for copy in self._copies() for held in copy.far + copy.near}
            known |= {held for _, held in kept}
            known |= {held for copy in self.state.inbox if copy.level == len(self.tiers) for held in copy.near}
            if peers is not None:
                known.update(peers.held(self.state.first.pool))
            for tier in self.tiers:
                assert tier.store.pool.holds.tables <= known, f"{tier.store.tier.name} holds something without a reason"

    def _copies(self) -> Iterator[Copy]:
        """Yield everything of this worker that has not been delivered."""
        for level in range(len(self.tiers)):
            for copy in self.state.in_flight(level):
                yield copy
                yield from copy.rest


def _as_device(config: OffloadConfig, manager: BlockManager) -> OffloadConfig:
    """Return ``config`` with the device's hints and quotas."""
    tiers = config.tiers
    if manager.hints:
        tiers = tuple([msgspec.structs.replace(tier, eviction=eviction_with_hints(tier.eviction)) for tier in tiers])
    if manager.quotas is not None:
        tiers = tuple([msgspec.structs.replace(tier, quotas=manager.quotas) for tier in tiers])
    return msgspec.structs.replace(config, tiers=tiers)


def _check(config: OffloadConfig, pages: int, timeline: Timeline | None) -> None:
    """Raise ``ConfigError`` unless a first tier of ``pages`` pages and a ``timeline`` are what ``config`` needs."""
    if config.offload_ahead is not None and config.offload_ahead > pages:
        raise ConfigError(
            f"offload_ahead {config.offload_ahead} asks for more clean blocks than the host holds, {pages}: "
            "lower it or leave it out"
        )
    if config.shared and timeline is None:
        raise ConfigError("shared tiers need a Timeline: make one for the fleet and pass it to every worker")
    if not config.shared and timeline is not None:
        raise ConfigError("a Timeline is for shared tiers, and none of these is: set scope, or leave it out")


def _check_evictions(config: OffloadConfig, manager: BlockManager, policy: WriteThrough) -> None:
    """Raise ``ConfigError`` unless the device's evictions are such as ``policy`` and spills can do with."""
    learner = manager.pool.learner
    if policy.ahead and (manager.quotas is not None or (learner is not None and not learner.foreseeable)):
        raise ConfigError(
            f"{config.policy} copies what the device evicts next, which its eviction policy can't tell beforehand: "
            "choose another order or another policy"
        )
    if config.spill != "on_landing" and manager.quotas is not None:
        raise ConfigError(f"spill {config.spill} is not modelled with cache quotas: leave one of the two out")


def _legacy(batch: EventBatch) -> EventBatch:
    """Return ``batch`` with the lower tiers' Stored as older connectors send them: one event per hash, and nothing but the
    hash.

    The device's own events and all removals stay as they are.
    """
    events: list[Event] = []
    for event in batch.events:
        if isinstance(event, Stored) and event.tier > Tier.G1:
            events += [
                Stored(hashes=[key], parent=None, tokens=None, block_size=0, group=event.group, tier=event.tier)
                for key in event.hashes
            ]
        else:
            events.append(event)
    return msgspec.structs.replace(batch, events=events)
