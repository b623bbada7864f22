"""The offload engine of one worker: what a scheduler calls to have blocks copied out and back in.

A synchronous state machine on the times it is told. It knows requests only as the block manager does, and no scheduling: what
waits, waits in the scheduler's queues; here it is only said for how long, as things stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kvyard.blocks import BlockManager, Hit, Request
from kvyard.blocks.spec import ConfigError
from kvyard.events.types import EventBatch, Sink, Tier
from kvyard.hashing import Run
from kvyard.tiers.ahead import Cleaner
from kvyard.tiers.announce import blocks_of_all, legacy
from kvyard.tiers.config import OffloadConfig
from kvyard.tiers.counters import OffloadCounters
from kvyard.tiers.depot import Copy, Depot, Kind, make_depot
from kvyard.tiers.inward import Inward
from kvyard.tiers.layout import Layout
from kvyard.tiers.outcome import Outcome, Step
from kvyard.tiers.outward import Outward
from kvyard.tiers.policy import POLICIES
from kvyard.tiers.site import Site
from kvyard.tiers.store import TierStore
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
    ) -> None:
        """``block_bytes`` is the size of a device block, all layers together. ``sink`` is told what private tiers hold;
        shared ones are the ``timeline``'s, which announces them itself.

        Raises ``ConfigError`` for tiers that the manager can't have, or that don't fit the time line's.
        """
        self.name = name
        self.config = config
        self.manager = manager
        layout = self.layout = Layout(manager, config.blocks_per_chunk, block_bytes)
        pages = layout.pages(config.host.capacity(block_bytes))
        if config.offload_ahead is not None and config.offload_ahead > pages:
            raise ConfigError(
                f"offload_ahead {config.offload_ahead} asks for more clean blocks than the host holds, {pages}: "
                "lower it or leave it out"
            )
        if config.shared and timeline is None:
            raise ConfigError("shared tiers need a Timeline: make one for the fleet and pass it to every worker")
        if not config.shared and timeline is not None:
            raise ConfigError("a Timeline is for shared tiers, and none of these is: set scope, or leave it out")
        self.timeline = timeline
        wanted = {Tier.G2: config.host, Tier.G3: config.storage}
        # The private ones first: whoever can't have those joins nobody.
        depots = {
            tier: make_depot(it, tier, layout, sink, config.events)
            for tier, it in wanted.items()
            if it is not None and it.scope == "private"
        }
        self._private = list(depots.values())
        if timeline is not None:
            depots |= timeline.join(name, layout, config, self._private)
        host, storage = depots[Tier.G2], depots.get(Tier.G3)
        self._depots = [host] if storage is None else [host, storage]
        if any(depot.store.pool.order.reads_priorities for depot in self._depots):
            manager.keeps_by_priority = True
        self.site = Site(name, config, layout, host, storage)
        policy = POLICIES[config.policy](config, host.store.num_pages, layout.num_groups)
        self._out = Outward(self.site, policy)
        self._in = Inward(self.site)
        self._cleaner: Cleaner | None = None
        if policy.ahead:
            self._cleaner = self._in.cleaner = Cleaner(self.site, self._out, self._sharers)
        self._ready: list[Request] = []
        self._shared = [depot for depot in self._depots if depot.shared]
        self._heard = {depot: depot.landings for depot in self._shared}

    def _sharers(self) -> int:
        """How many workers the host is for."""
        return len(self.timeline.members) if self.timeline is not None and self.site.host.shared else 1

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> list[Request]:
        """Land everything due at or before ``now``, each at its own instant, and return the requests whose load ended.

        They are cached, have ``num_computed_tokens`` set and hold their blocks; in order of completion, to be put at the
        front of the queue so that nobody evicts what was just loaded.
        """
        for depot in self._private:
            depot.store.clock.sleep_until(now)
        if self.timeline is not None:
            self.timeline.advance(now)
            self._deliver()
        while (at := self._next_landing()) is not None and at <= now:
            for depot in self._depots:
                depot.advance(at)
            self._deliver()
        for depot in self._shared:
            self._heard[depot] = depot.landings
        self._out.retry(now)
        if self._cleaner is not None:
            self._cleaner.work(now)
        ready, self._ready = self._ready, []
        return ready

    def earliest_deadline(self) -> int | None:
        """When the next copy lands that this worker may want to know of; ``None`` if none is under way.

        Another worker's submission on a shared link may move it, in both directions.
        """
        if self.site.inbox:
            return self.site.inbox[0].ended
        for depot in self._shared:
            if depot.landings != self._heard[depot]:
                return depot.last_landing  # another worker let it pass, and it may be what somebody here waits for
        return self._next_landing()

    def _next_landing(self) -> int | None:
        earliest = None
        for depot in self._depots:
            if depot.under_way:
                at = depot.link.earliest()
                if at is not None and (earliest is None or at < earliest):
                    earliest = at
        return earliest

    @property
    def depots(self) -> Sequence[Depot]:
        """The tiers with their links, the host's first."""
        return self._depots

    @property
    def line(self) -> tuple[int, ...]:
        """Changes with what is clean at the head of the device's free line, under ``on_eviction``: blocks were sent to be
        copied, or taken, or the host made room for something.
        """
        if self._cleaner is None:
            return ()
        pool = self.layout.pool
        return self._cleaner.cohorts, self.host.reservations, pool.evicted, pool.unnamed, pool.free

    @property
    def disturbances(self) -> int:
        """Changes when a shared tier has made room for something, for whomever: what it has to offer may be another from that
        instant on, though nothing has landed.
        """
        return sum(depot.store.reservations for depot in self._shared)

    @property
    def landings(self) -> int:
        """How many copies have landed so far in any tier this worker uses, whoever asked for them."""
        return sum(depot.landings for depot in self._depots)

    def _deliver(self) -> None:
        site = self.site
        inbox = site.inbox
        while inbox:
            copy = inbox.popleft()
            site.count(copy)
            depot = site.depot_of(copy.kind)
            if not depot.shared:
                depot.settle(copy)
            if copy.kind is Kind.LOAD:
                request = self._in.loaded(copy)
                if request is not None:
                    self._ready.append(request)
            elif copy.kind is Kind.FETCH:
                if not site.host.shared:
                    self._in.fetched(copy)
            else:
                self._out.landed(copy)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def onboard(
        self,
        request: Request,
        hit: Hit,
        now: int,
        *,
        must_fit: bool = False,
        reserved: int = 0,
        has_running: bool = True,
    ) -> Outcome:
        """See what lower tiers have of ``request`` beyond ``hit``, just looked up, and begin to load it.

        Where a load begins the hit is adopted and blocks are reserved for the rest, as ``BlockManager.allocate`` does on
        these terms; the request must then be left alone until ``tick`` returns it, or be forgotten. In all other cases it
        holds nothing on the device.
        """
        outcome = self._in.onboard(request, hit, now, must_fit, reserved, has_running)
        if outcome.step is Step.STARTED or outcome.step is Step.WAITING:
            return msgspec.structs.replace(outcome, deadline=self.earliest_deadline())
        return outcome

    def offload(self, request: Request, now: int) -> None:
        """A pass ended in which ``request`` computed tokens: store what the policy wants of it."""
        self._out.offer(request, now)

    def quiet_until(self, request: Request) -> int:
        """``offload`` does nothing while fewer tokens than this are computed; infinite if it never will."""
        return self._out.quiet_until(request)

    def make_clean(self, needed: int, now: int, hit: Hit | None = None) -> int | None:
        """``needed`` blocks are about to be taken, besides those of ``hit``, which will be adopted. ``None``: go ahead; a
        time: wait for it, since what stands at the head of the line is still being copied. Only the policy
        ``on_eviction`` ever asks to wait.
        """
        if self._cleaner is None:
            return None
        return self._cleaner.make_clean(needed, now, self.earliest_deadline, hit)

    def needed(self, request: Request, tokens: int, hit: Hit | None = None) -> int:
        """How many blocks ``request`` takes for ``tokens`` more tokens after ``hit``: what to ask ``make_clean`` for."""
        return self.layout.demand(request, hit, tokens)

    def forget(self, request: Request, now: int) -> None:
        """``request`` finished, was cancelled or is preempted: call this *before* its blocks are freed.

        A load under way still lands, for nobody, and its blocks come back then; submitted stores still land.
        """
        track = self.site.tracks.pop(request, None)
        if track is not None:
            self._in.forget(request, track)
            self._out.forget(request)
            if request in self._ready:
                self._ready.remove(request)

    def close(self, now: int) -> None:
        """The worker has failed: let go of all that it keeps in shared tiers for requests, and submit nothing more.

        What is under way can't be called back: it lands, for nobody. Not to be ticked again.
        """
        for request in list(self.site.tracks):
            self.forget(request, now)
        self._out.close()

    # -- reporting ----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> OffloadCounters:
        """What happened so far. Live: read, don't keep."""
        return self.site.counters

    @property
    def host(self) -> TierStore:
        """The G2 store."""
        return self.site.host.store

    @property
    def storage(self) -> TierStore | None:
        """The G3 store, if there is one."""
        return self.site.storage.store if self.site.storage is not None else None

    def snapshot(self) -> Iterator[tuple[int, Tier, list[Run]]]:
        """What private tiers hold, as ``Pool.snapshot`` says it of the device: for a ``Batcher`` over both."""
        for depot in self._private:
            runs = depot.store.snapshot()
            chunks = self.layout.chunk > 1 and self.config.events == "self-describing"
            yield from blocks_of_all(runs, self.layout.block_sizes) if chunks else runs

    def finish_batch(self, batch: EventBatch) -> EventBatch:
        """``batch`` in the configured form of events; the same object where there is nothing to change."""
        return legacy(batch) if self.config.events == "legacy" else batch

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless I1, I2 and I6 hold in every tier, and every hold has a reason."""
        self.manager.check_integrity()
        for depot in self._private:
            depot.check_integrity()
        near: Counter[object] = Counter()
        for copy in self._copies():
            if copy.kind is Kind.STORE or (copy.kind is Kind.LOAD and copy.request is None):
                near.update(copy.near)
            if copy.kind is Kind.LOAD and copy.request is not None:
                assert self.manager.requests.get(copy.request.id) is copy.request, f"I6: {copy.request} has no blocks"
        assert near.keys() == self.layout.pool.holds, (
            "I6: a hold on the device without a copy, or a copy without a hold"
        )
        for track in self.site.tracks.values():
            for held in track.keep:
                assert held in self.host.pool.holds, "what is kept for a request is not held"
        if self.timeline is None:
            known = {held for copy in self._copies() for held in copy.far + copy.near}
            known |= {held for track in self.site.tracks.values() for held in track.keep}
            for store in (self.host, self.storage):
                assert store is None or store.pool.holds <= known, f"{store.tier.name} holds something for nobody"

    def _copies(self) -> Iterator[Copy]:
        """Everything of this worker that has not been delivered."""
        for depot in self._depots:
            yield from (copy for copy in depot.under_way.values() if copy.inbox is self.site.inbox)
            for copy in depot.under_way.values():
                if copy.inbox is self.site.inbox:
                    yield from copy.rest
        yield from self.site.inbox
        for copy in self.site.inbox:
            yield from copy.rest
