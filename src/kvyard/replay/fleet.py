"""The fleet: workers, a router in front of them, and all that moves requests through them in virtual time.

Here the parts are put together. The ``Agenda`` knows what happens next, and the ``Loop`` has it carried out. Routers know the
fleet only through events and their own bookkeeping.
"""

from collections.abc import Callable, Iterable
from itertools import chain

from msgspec.structs import replace

from kvyard.engine.build import make_core
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.timing.registry import TimingConfig
from kvyard.errors import KvyardError
from kvyard.events.tier import Tier
from kvyard.index import Holder
from kvyard.index.digests import DigestIndex
from kvyard.index.runs import RunFeed, RunIndexer
from kvyard.replay.agenda import Agenda
from kvyard.replay.arrivals import Arrivals, TraceArrivals
from kvyard.replay.config import NetworkConfig, ReplayConfig, WorkerConfig
from kvyard.replay.facts import TraceFacts
from kvyard.replay.flow import FleetFlow
from kvyard.replay.gaps import Gaps
from kvyard.replay.garbage import rarely_collected
from kvyard.replay.handovers import Handovers
from kvyard.replay.index_sync import IndexSync
from kvyard.replay.intake import Intake
from kvyard.replay.jobs import JobMaker
from kvyard.replay.listeners import RankWatcher, RequestListener
from kvyard.replay.loop import Loop
from kvyard.replay.passes import Passes
from kvyard.replay.placement import WholePlacement
from kvyard.replay.process_arrivals import ProcessArrivals
from kvyard.replay.pulls import FleetPulls
from kvyard.replay.record import Record
from kvyard.replay.recorder import Recorder
from kvyard.replay.records import Records
from kvyard.replay.rendering import Rendering
from kvyard.replay.scaling.autoscaler import Autoscaler
from kvyard.replay.seen import Seen
from kvyard.replay.shared import SharedTiers
from kvyard.replay.split_placement import SplitPlacement, SplitRules
from kvyard.replay.traces import TraceRequest
from kvyard.replay.warm_up import NO_WARM_UP, WarmUp
from kvyard.replay.window import CounterMarks
from kvyard.replay.worker import SampleSeries, Worker
from kvyard.replay.worker_lifecycle import WorkerLifecycle
from kvyard.replay.worker_pool import WorkerPool
from kvyard.router import Router, RouterConfig
from kvyard.router.flow import FlowQueue
from kvyard.router.pace import Pace, engine_pace
from kvyard.router.policies import make_policy
from kvyard.tiers.bus import BusLink
from kvyard.tiers.copies import LinkMaker
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.links import make_link
from kvyard.tiers.network import Network


class Fleet:
    """Runs a trace. Make one per run."""

    def __init__(self, config: ReplayConfig) -> None:
        """Raises ``KvyardError`` for a config that can't be honoured."""
        config.check()
        self.config = config
        self.records = Records(config.depth)
        self.gaps = Gaps()
        self.timeline = SampleSeries(config.samples)
        self.now = 0
        self.interrupted = False
        self._agenda = Agenda()
        self._seen = Seen()
        self._touched: set[int] = set()
        self._unplaced: list[Record] = []
        self._marks: CounterMarks | None = None
        self._facts = TraceFacts() if any(kind.engine.reads_facts for kind in config.workers) else None
        self._block_size = min(spec.block_size for spec in config.workers[0].engine.specs)
        policies = [make_policy(router) for router in config.routers]
        pulling = config.peer_pull is not None
        split = None
        if config.disaggregated:
            decoding = [kind.engine.timing for kind in config.workers if kind.engine.role != "prefill"]
            split = SplitRules(config, _front_end(decoding))
        self.indexer: RunIndexer | None = None
        if pulling or any(policy.needs_index for policy in policies):
            self.indexer = _make_indexer(config, self._block_size)
        self._shared = SharedTiers(config, self.indexer)
        self.fabric: Fabric | None = make_fabric(config.handover) if pulling or split is not None else None
        """The network between workers, if anything travels there."""
        self.pulls = self._make_pulls()
        handovers = self._make_handovers()

        self.listeners: list[RequestListener] = []
        """Receivers of reports about requests, in this order; see ``listeners``."""
        reads_pace = any(policy.needs_pace for policy in policies) or (split is not None and split.decider.looks)
        self.workers: list[Worker] = []
        with rarely_collected():
            for kind in config.workers:
                # One pace for all of a kind, since it remembers what it worked out.
                pace = engine_pace(kind.engine) if reads_pace or config.autoscale is not None else None
                for number in range(config.made_of(kind)):
                    worker = self._make_worker(kind, pace, split, handovers)
                    worker.alive = kind.start == 0 and number < kind.count
                    self.workers.append(worker)
        self._shared.credit([holder for worker in self.workers for holder in worker.holders])
        self.index_sync = self._make_index_sync(split)
        jobs = JobMaker(
            self._facts,
            names_sessions=any(kind.engine.heed_hints for kind in config.workers),
            reads_keys=pulling or any(policy.needs_keys for policy in policies),
        )
        self.placement = self._make_placement(jobs, split, handovers)
        self.listeners.append(self.placement)
        self.flow = self._make_flow()
        """The queue before the router, if workers may have a number of requests only."""
        self._lifecycle = self._make_lifecycle()
        self.autoscaler: Autoscaler | None = None
        if config.autoscale is not None:
            self.autoscaler = Autoscaler(config.autoscale, self.workers, config.workers, self._lifecycle)
            self.listeners.append(self.autoscaler)
        comes_and_goes = bool(self._lifecycle.planned) or config.autoscale is not None
        self._passes = Passes(
            self._agenda,
            self.workers,
            self._touched,
            self._shared,
            self.index_sync,
            pulling=pulling,
            steady=not (comes_and_goes or self._shared.active or pulling or split is not None),
        )

    @property
    def used(self) -> list[Worker]:
        """Workers that ever took requests."""
        return [worker for worker in self.workers if worker.began]

    def run(
        self,
        requests: Iterable[TraceRequest],
        progress: Callable[[int, int, int], None] | None = None,
        before: Iterable[TraceRequest] | None = None,
    ) -> None:
        """Run ``requests`` to the end. ``progress`` is called with (requests read, requests through, now) now and then.
        Requests ``before`` them are run first, to their end, and aren't counted, nor are those that the config's ``warm_up``
        leaves out.

        A KeyboardInterrupt ends the run if it is: records are whole up to there and ``interrupted`` is set.
        """
        warm_up = self.config.warmed_by
        if self._facts is not None and any(kind.engine.needs_future is not None for kind in self.config.workers):
            requests, before = list(requests), None if before is None else list(before)
            self._facts.foresee([*(before or ()), *requests], self._block_size)
        if before is not None:
            self.records.warming = True
            self._drive(before, progress)
            if not self.interrupted:
                self._begin_window(self.now)
        if not self.interrupted:
            self.records.warming = bool(warm_up.requests or warm_up.time)
            self._drive(requests, progress, warm_up if self.records.warming else None)
            if self.records.warming and not self.interrupted:
                raise KvyardError("warm_up leaves no request to report on: write less, or take a longer trace")
        if self._marks is not None:
            self._marks.subtract()

    def _drive(
        self,
        requests: Iterable[TraceRequest],
        progress: Callable[[int, int, int], None] | None,
        warm_up: WarmUp | None = None,
    ) -> None:
        """Run ``requests`` from now on."""
        config = self.config
        arrivals = self._make_arrivals(requests)
        intake = Intake(
            self._agenda,
            arrivals,
            self.records,
            self.placement,
            unplaced=self._unplaced,
            index_sync=self.index_sync,
            autoscaler=self.autoscaler,
            warm_up=warm_up or NO_WARM_UP,
            begin_window=None if warm_up is None else self._begin_window,
            front_end=_front_end(kind.engine.timing for kind in config.workers),
            flow=self.flow,
            rendering=Rendering(config.render_token_us * 1e3, config.renderers) if config.render_token_us else None,
        )
        self.listeners.append(intake)
        loop = Loop(
            self._agenda,
            intake,
            self.placement,
            self._passes,
            self._lifecycle,
            autoscaler=self.autoscaler,
            shared=self._shared,
            fabric=self.fabric,
            timeline=self.timeline,
            now=self.now,
        )
        with rarely_collected():
            try:
                loop.run(progress)
            except KeyboardInterrupt:
                self.interrupted = True
                self._passes.report()
            finally:
                self.now = loop.now
        self.listeners.remove(intake)

    def _make_arrivals(self, requests: Iterable[TraceRequest]) -> Arrivals:
        config, pacing = self.config, self.config.pacing
        if pacing.processes and config.concurrency is not None:
            rows = iter(requests)
            first = next(rows, None)
            requests = chain(() if first is None else (first,), rows)
            if first is not None and first.session is not None:
                return ProcessArrivals(requests, concurrency=config.concurrency, pacing=pacing, start=self.now)
        return TraceArrivals(
            requests,
            speedup=config.speedup,
            concurrency=config.concurrency,
            jitter=config.jitter,
            pacing=pacing,
            start=self.now,
        )

    def _begin_window(self, now: int) -> None:
        """End the warm-up: count from now on."""
        self.records.begin_window()
        self.gaps.clear()
        self.timeline.clear(now)
        if self.flow is not None:
            self.flow.clear()
        self._marks = CounterMarks(self)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_pulls(self) -> FleetPulls | None:
        config = self.config.peer_pull
        if config is None or self.fabric is None or self.indexer is None:
            return None
        return FleetPulls(config, self.fabric, self.indexer, self._block_bytes // self._block_size)

    def _make_handovers(self) -> Handovers | None:
        if self.fabric is None or not self.config.disaggregated:
            return None
        return Handovers(self.config.handover, self.fabric, self._block_bytes, self._block_size)

    @property
    def _block_bytes(self) -> int:
        return self.config.workers[0].engine.bytes_per_block or 0

    def _make_placement(
        self, jobs: JobMaker, split: SplitRules | None, handovers: Handovers | None
    ) -> WholePlacement | SplitPlacement:
        routers = self.config.routers
        if split is None or handovers is None:
            return WholePlacement(WorkerPool(self._make_router(routers[0], 0)), jobs, self._block_size, self.pulls)
        decode = routers[1]
        if not split.reads_decode_caches:
            decode = replace(decode, predicted_ttl_s=0)
        return SplitPlacement(
            split,
            WorkerPool(self._make_router(routers[0], 0), excluded="decode"),
            WorkerPool(self._make_router(decode, 1, split.reads_decode_caches), excluded="prefill"),
            handovers,
            jobs,
            self._agenda,
            block_size=self._block_size,
            index_sync=self.index_sync,
            pulls=self.pulls,
        )

    def _make_flow(self) -> FleetFlow | None:
        config = self.config
        if config.engine_requests is None or not isinstance(self.placement, WholePlacement):
            return None
        queue: FlowQueue[Record] = FlowQueue(config.flow, config.queue, config.seed)
        return FleetFlow(queue, self.placement, self.workers, config.engine_requests)

    def _make_lifecycle(self) -> WorkerLifecycle:
        config = self.config
        lifecycle = WorkerLifecycle(
            self._agenda,
            self.placement,
            self.records.open,
            self._unplaced,
            indexer=self.indexer,
            pulls=self.pulls,
            seen=self._seen,
            autoscale=config.autoscale,
        )
        kinds = [kind for kind in config.workers for _ in range(config.made_of(kind))]
        for worker, kind in zip(self.workers, kinds, strict=True):
            lifecycle.plan(worker, kind.start, kind.drain, kind.fail)
        return lifecycle

    def _make_router(self, config: RouterConfig, number: int, reads_index: bool = True) -> Router:
        routing = replace(config, block_size=config.block_size or self._block_size)
        index = self.indexer if reads_index or self.indexer is None else self.indexer.identity
        router = Router(routing, (), index, seed=self.config.seed + number)
        if self.pulls is not None:
            router.policy.pull_ms = self.pulls.pull_ms
        return router

    def _make_index_sync(self, split: SplitRules | None) -> IndexSync:
        if split is None:
            return IndexSync(self.indexer, self.workers, follows=not self._shared.active)
        # Hand-overs change the caches of two workers in between passes, too.
        read = [worker for worker in self.workers if split.reads_decode_caches or worker.role != "decode"]
        return IndexSync(self.indexer, read, follows=False)

    def _make_worker(
        self, kind: WorkerConfig, pace: Pace | None, split: SplitRules | None, handovers: Handovers | None
    ) -> Worker:
        config, number = self.config, len(self.workers)
        jobs: dict[str, Job] = {}
        cores: list[EngineCore] = []
        recorders: list[Recorder] = []
        before = self.workers[-1].recorders[-1].number + 1 if self.workers else 0
        block_size = min(spec.block_size for spec in kind.engine.specs)
        indexed = split is None or split.reads_decode_caches or kind.engine.role != "decode"
        for rank in range(kind.dp_size):
            holder = Holder(f"{kind.name}{number}", rank)
            # Ranks have caches of their own.
            recorder = Recorder(before + rank, self._seen, self.gaps, block_size)
            at_once = split is None or split.first_tokens_at_once
            core = make_core(
                kind.engine,
                name=str(holder),
                watcher=RankWatcher(number, jobs, recorder, self.listeners, at_once),
                batcher=self._feed(kind, holder) if indexed else None,
                plans=config.plans,
                bulk=config.event_lag == 0 and config.digest_every == 0,
                timeline=self._shared.timeline(kind.engine),
                ranks=kind.dp_size,
                foresight=True,
                peer=None if handovers is None else handovers.join(number),
                host_link=self._host_link(number, cores, rank),
            )
            cores.append(core)
            recorders.append(recorder)
        worker = Worker(number, kind, pace, cores, recorders, jobs, self._touched)
        if self.pulls is not None:
            self.pulls.join(worker)
        return worker

    def _feed(self, kind: WorkerConfig, holder: Holder) -> RunFeed | None:
        """Return the way of a rank's own caches into the index, if the router reads one. What is shared is the pool's."""
        if self.indexer is None:
            return None
        below = kind.engine.tiers
        tiers = [Tier.G1]
        if below is not None:
            tiers += [tier for tier, level in below.levels if level.scope == "private"]
        return self.indexer.attach(holder, kind.engine.specs, tiers)

    def _host_link(self, number: int, cores: list[EngineCore], rank: int) -> LinkMaker:
        """Return the maker of a rank's link to host memory: a link of its own, or one that shares the device's bus with other
        traffic. ``cores`` are those of its worker.
        """
        fabric, touched = self.fabric, self._touched
        if fabric is None or not fabric.has_bus:
            return make_link
        fabric.join(number)

        def landed(now: int) -> None:
            offload = cores[rank].offload
            assert offload is not None
            offload.tiers[0].advance(now)  # what follows from it on links begins now
            for core in cores:
                core.cut(now)
            touched.add(number)

        return lambda config: BusLink(config, fabric, number, rank, landed)


def _make_indexer(config: ReplayConfig, block_size: int) -> RunIndexer:
    """Return the router's view of caches: all of their contents, or digests."""
    digests: DigestIndex | None = None
    if config.digest_error:
        digests = DigestIndex(max(kind.engine.num_gpu_blocks for kind in config.workers), config.digest_error)
    return RunIndexer(block_size, lag=config.event_lag, every=config.digest_every, backend=digests)


def _front_end(timings: Iterable[TimingConfig]) -> Callable[[int], int] | None:
    """Return nanoseconds outside of engines by tokens of a prompt, the longest of ``timings``; ``None`` if none has any."""
    known = [timing for timing in timings if timing.front_end_ns(1 << 20)]
    return (lambda tokens: max(timing.front_end_ns(tokens) for timing in known)) if known else None


def make_fabric(config: NetworkConfig) -> Fabric:
    """Return a network that no worker has joined yet. Raises ``ConfigError`` for a latency that can't be."""
    network = Network(config.latency, shared=config.contention)
    return Fabric(network, config.bandwidth, config.node_bandwidth, config.workers_per_node, config.bus_bandwidth)
