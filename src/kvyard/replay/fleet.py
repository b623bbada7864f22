"""The fleet: workers, a router in front of them, and the loop that moves them all through virtual time.

The ``Agenda`` says what happens next, here it is done. The router knows the fleet only through events and its own bookkeeping.

The loop visits a worker only when something happens to it. Before a decision that reads events, the others are brought up to
date as well, since their plans may have passes behind them that were not carried out yet.
"""

from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush

from msgspec.structs import replace

from kvyard.engine.build import make_core
from kvyard.engine.handovers import HandoverPeer
from kvyard.engine.job import Job
from kvyard.events.types import Tier
from kvyard.hashing import PLAIN, Namespace, TokenChain, TraceChain, algorithm
from kvyard.index import Holder
from kvyard.index.chains import WholeChain
from kvyard.index.digests import DigestIndex
from kvyard.index.runs import RunFeed, RunIndexer
from kvyard.replay.agenda import (
    ARRIVAL,
    HANDOVER,
    LANDING,
    NETWORK,
    PASS_END,
    PASS_START,
    REROUTING,
    SAMPLE,
    SCALING,
    WORKER_LIFE,
    Agenda,
)
from kvyard.replay.arrivals import TraceArrivals
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.facts import TraceFacts
from kvyard.replay.gaps import Gaps
from kvyard.replay.garbage import rarely_collected
from kvyard.replay.heeding import hints_of
from kvyard.replay.network import make_fabric
from kvyard.replay.pulls import FleetPulls
from kvyard.replay.record import Record
from kvyard.replay.recorder import Recorder
from kvyard.replay.records import Records
from kvyard.replay.scaling.autoscaler import Autoscaler, make_autoscaler
from kvyard.replay.seen import Seen
from kvyard.replay.shared import SharedTiers
from kvyard.replay.traces import TraceRequest
from kvyard.replay.worker import SampleSeries, Worker
from kvyard.router import Decision, Router, RouterConfig, RouteRequest
from kvyard.router.pace import Pace, engine_pace
from kvyard.router.policies import make_policy
from kvyard.tiers.bus import BusLink
from kvyard.tiers.copies import LinkMaker
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.links import make_link


class Fleet:
    """Runs a trace. Make one per run."""

    _asks_pace = False
    """Whether others than the router ask how fast workers are."""

    def __init__(self, config: ReplayConfig) -> None:
        """Raises ``KvyardError`` for a config that can't be honoured."""
        config.check()
        self.config = config
        self.records = Records(config.depth)
        self.gaps = Gaps()
        self.now = 0
        self.workers: list[Worker] = []
        self.interrupted = False
        self._block_size = min(spec.block_size for spec in config.workers[0].engine.specs)
        self._seen = Seen()
        self._agenda = Agenda()
        self._touched: set[int] = set()
        """Workers that something happened to at this instant."""
        self._rows: dict[str, TraceRequest] = {}
        self._arrivals: TraceArrivals | None = None
        self._through = 0
        self._own = 0
        self._homeless: list[TraceRequest] = []
        """Requests that came when no worker took any."""
        policies = [make_policy(router) for router in config.routers]
        pulling = config.peer_pull is not None
        self._reads_keys = pulling or any(policy.needs_keys for policy in policies)
        self._heeds = any(kind.engine.heed_hints for kind in config.workers)
        indexed = pulling or any(policy.needs_index for policy in policies)
        self.indexer = _make_indexer(config, self._block_size) if indexed else None
        self._by_holder: dict[Holder, tuple[Worker, int]] = {}
        self._paces: dict[Holder, Pace | None] = {}
        """How fast they are, where the router asks."""
        reads_pace = any(policy.needs_pace for policy in policies) or self._asks_pace
        self._life: list[tuple[Worker, str]] = []
        """What is planned for workers, as the agenda numbers it."""
        self._facts = TraceFacts() if any(kind.engine.reads_facts for kind in config.workers) else None
        self._shared = SharedTiers(config, self.indexer)
        self.fabric: Fabric | None = self._make_fabric()
        """What leads from worker to worker, if anything travels there."""
        self.pulls: FleetPulls | None = None
        if config.peer_pull is not None:
            assert self.fabric is not None and self.indexer is not None
            block_bytes = config.workers[0].engine.bytes_per_block or 0
            self.pulls = FleetPulls(
                config.peer_pull,
                self.fabric,
                self.indexer,
                self.workers,
                self._touch_worker,
                block_bytes // self._block_size,
            )
        scaled = config.autoscale
        with rarely_collected():
            for kind in config.workers:
                # One for all of a kind, since it remembers what it worked out.
                pace = engine_pace(kind.engine) if reads_pace or scaled is not None else None
                for number in range(config.made_of(kind)):
                    self._make(kind, pace)
                    self.workers[-1].alive &= number < kind.count
        self._follows = self.indexer is not None and self._can_follow()
        """Whether it is known when caches next change, so that a look needn't visit everyone."""
        self._changes: list[tuple[int, int]] = []
        """When that is, and of which worker, as a heap; what isn't in ``_next_change`` is void."""
        self._next_change = [-1] * len(self.workers)
        self._stirred: set[int] | None = set() if self._keeps_still() else None
        """Workers that may look different in the next sample, where that is known."""
        self._shared.credit(self._by_holder)
        self._open = 0
        """Ranks that take requests as they come."""
        self.router = self._make_router(config.routers[0], 0)
        for holder, (worker, _) in self._by_holder.items():
            if worker.alive:
                self._enlist(holder, worker)
        self.timeline = SampleSeries(config.samples)
        self.scaling: Autoscaler | None = None
        if scaled is not None:
            self.scaling = make_autoscaler(
                scaled,
                self.workers,
                self._by_holder,
                self._paces,
                config.workers,
                self._come,
                self._go,
                self._switch_off,
            )

    def _make_fabric(self) -> Fabric | None:
        return make_fabric(self.config.handover) if self.config.peer_pull is not None else None

    def _make_router(self, config: RouterConfig, number: int, reads: bool = True) -> Router:
        """Unless it ``reads`` the index, it is told of no overlap."""
        routing = replace(config, block_size=config.block_size or self._block_size)
        index = self.indexer if reads or self.indexer is None else self.indexer.identity
        made = Router(routing, (), index, seed=self.config.seed + number)
        if self.pulls is not None:
            made.policy.pull_ms = self.pulls.pull_ms
        return made

    def _can_follow(self) -> bool:
        """Whether what changes caches is known ahead: a worker's own passes, and what begins or ends one of them."""
        return not self._shared.active

    def _keeps_still(self) -> bool:
        """Whether a worker that starts no pass, and has none under way, stays as it is."""
        return not (self._life or self._shared.active or self.pulls is not None or self.config.autoscale is not None)

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[TraceRequest], progress: Callable[[int, int, int], None] | None = None) -> None:
        """Run ``requests`` to the end. ``progress`` is told (requests read, requests through, now) now and then.

        A KeyboardInterrupt ends the run where it is: records are whole up to there and ``interrupted`` is set.
        """
        config = self.config
        if self._facts is not None and any(kind.engine.needs_future is not None for kind in config.workers):
            requests = list(requests)
            self._facts.foresee(requests, self._block_size)
        self._arrivals = TraceArrivals(
            requests, speedup=config.speedup, concurrency=config.concurrency, jitter=config.jitter
        )
        with rarely_collected():
            try:
                self._loop(progress)
            except KeyboardInterrupt:
                self.interrupted = True
                for worker in self.workers:
                    for core in worker.cores:
                        core.tell()

    def _loop(self, progress: Callable[[int, int, int], None] | None) -> None:
        agenda, arrivals, workers, shared = self._agenda, self._arrivals, self.workers, self._shared
        assert arrivals is not None
        agenda.put(arrivals.peek(), ARRIVAL)
        rounds = 0
        while True:
            if self._touched and not agenda.has_before(self.now, PASS_START):
                # What the agenda would say next, without a way through its heap for each pass.
                self._start_passes(self.now)
                if progress is not None:
                    rounds += 1
                    if not rounds & 1023:
                        progress(len(self.records), self._through, self.now)
                continue
            entry = agenda.pop()
            if entry is None:
                break
            now, what, which = entry
            if what == SAMPLE:
                if self._is_over():
                    break
                if agenda.holds_beyond(SAMPLE):
                    self._sample(now)
                elif self._homeless:
                    self._turn_away()  # no worker will come for these, but others may have waited for them
                    agenda.put(now, SAMPLE)
                continue
            if what in (WORKER_LIFE, SCALING) and self._is_over():
                break
            self.now = now
            if shared.active:
                if what >= LANDING:
                    shared.land(now)  # each later step sees what has landed by now
                if what < PASS_START:
                    agenda.put(now, PASS_START)  # all workers plan by what is certain now
            if what == PASS_END:
                workers[which].engine.advance(now)
                self._touch(which, now)
            elif what == PASS_START:
                self._start_passes(now)
            elif what == ARRIVAL:
                self._arrive(now)
            elif what == HANDOVER:
                self._hand_over(now)
            elif what == SCALING and self.scaling is not None:
                agenda.put(self.scaling.tick(now), SCALING)
            elif what == WORKER_LIFE:
                self._live(self._life[which], now)
            elif what == REROUTING:
                self._reroute(now)
        if progress is not None:
            progress(len(self.records), self._through, self.now)
        arrivals.check_empty()
        left = self.records.open
        assert not left, f"{len(left)} requests never ended, {next(iter(left))} first (I9)"

    def _is_over(self) -> bool:
        """Whether nothing is left to do but to sample, and to start, drain and fail workers for nothing."""
        assert self._arrivals is not None
        return (
            not self._touched
            and not self._agenda.holds_beyond(SAMPLE, WORKER_LIFE, SCALING)
            and self._arrivals.exhausted
            and not self._homeless
        )

    def _touch_worker(self, worker: Worker, now: int) -> None:
        self._touch(worker.number, now)

    def _touch(self, number: int, now: int) -> None:
        """Something happened to a worker: it may start a pass at the end of this instant."""
        self._touched.add(number)

    def _start_passes(self, now: int) -> None:
        touched, self._touched = self._touched, set()
        if self._stirred is not None:
            self._stirred |= touched
        if self._shared.active:
            self._shared.begin(now, sorted(touched), self.workers)
            for worker in self.workers:
                if worker.alive:
                    self._agenda.put(worker.engine.next_decision(), PASS_END, worker.number)
            self._agenda.put(self._shared.due(), LANDING)
            return
        if self.pulls is not None:
            self._start_in_order(touched, now)
            return
        for number in sorted(touched) if len(touched) > 1 else touched:
            worker = self.workers[number]
            if worker.alive:
                worker.engine.begin(now)
                self._agenda.put(worker.engine.next_decision(), PASS_END, number)
                if self._follows:
                    self._follow(worker)

    def _start_in_order(self, touched: set[int], now: int) -> None:
        """The same, where one that begins may pull from another: if that has a pass to start too, it starts in its turn."""
        ready = sorted(touched)
        while ready:
            number = ready.pop(0)
            worker = self.workers[number]
            if worker.alive:
                worker.engine.begin(now)
                self._agenda.put(worker.engine.next_decision(), PASS_END, number)
                if self._follows:
                    self._follow(worker)
            later = [other for other in self._touched if other > number]
            if later:
                self._touched.difference_update(later)
                ready = sorted({*ready, *later})
        assert self.fabric is not None
        self._agenda.put(self.fabric.due(), HANDOVER, NETWORK)

    def _sample(self, now: int) -> None:
        stirred = self._stirred
        for worker in self.workers if stirred is None else [self.workers[number] for number in stirred]:
            if worker.alive:
                worker.engine.advance(now)
                for core in worker.cores:
                    core.occupy()
        if self._shared.active:
            self._shared.land(now)
        self._agenda.put(self.timeline.sample(now, self.workers, stirred), SAMPLE)
        if stirred is not None:
            self._stirred = {number for number in stirred if self.workers[number].engine.next_decision() is not None}

    # -- requests ---------------------------------------------------------------------------------------------------

    def _arrive(self, now: int) -> None:
        arrivals = self._arrivals
        assert arrivals is not None
        self._look(now)
        scaling = self.scaling
        if not self.records:
            self._agenda.put(now, SAMPLE)  # the first of all
            if scaling is not None:
                self._agenda.put(scaling.begin(now), SCALING)
        while batch := arrivals.take(now):
            for row in batch:
                self._rows[row.id] = row
                record = Record(
                    id=row.id, session=row.session, arrival=now, input=row.input_length, wanted=row.output_length
                )
                self.records.begin(record)
                if scaling is not None:
                    scaling.offered(row.input_length, row.output_length)
                self._dispatch(row, record, now)
        self._agenda.put(arrivals.peek(), ARRIVAL)

    def _look(self, now: int) -> None:
        """Let the router's index, if it has one, see everything that is visible by ``now``."""
        if self.indexer is None:
            return
        if self._follows:
            changes = self._changes
            while changes and changes[0][0] <= now:
                when, number = heappop(changes)
                worker = self.workers[number]
                if worker.alive and self._next_change[number] == when:
                    worker.engine.advance(now)
                    self._follow(worker)
        else:
            for worker in self.workers:
                if worker.alive:
                    worker.engine.advance(now)
        self.indexer.flush(now)

    def _follow(self, worker: Worker) -> None:
        """Note when the caches of ``worker`` next change, unless that is when its plan ends, which is on the agenda."""
        engine = worker.engine
        when = engine.next_change()
        if when is None or when == engine.next_decision():
            self._next_change[worker.number] = -1
        elif when != self._next_change[worker.number]:
            self._next_change[worker.number] = when
            heappush(self._changes, (when, worker.number))

    def _dispatch(self, row: TraceRequest, record: Record, now: int) -> None:
        if not self._open:
            self._homeless.append(row)
            return
        job = self._job(row, record, self._block_size)
        if self._facts is not None:
            job.facts = self._facts.of(row)
        decision = self.router.route(self._request(row, job), now)
        worker, rank = self._by_holder[decision.worker]
        self._note_route(record, decision, worker.name_of(rank))
        if self.pulls is not None:
            self.pulls.expect(job, decision, self.router.load)
        if worker.block_size != self._block_size:
            facts = job.facts
            job = self._job(row, record, worker.block_size)
            job.facts = facts
        self._submit(worker, rank, job, now)

    def _request(self, row: TraceRequest, job: Job) -> RouteRequest:
        return RouteRequest(
            id=row.id,
            keys=job.chain.keys if self._reads_keys else (),  # type: ignore[arg-type]  # trace keys are integers
            num_tokens=row.input_length,
            session=row.session,
            expected_output=row.output_length,
        )

    def _note_route(self, record: Record, decision: Decision, name: str) -> None:
        record.worker = name
        record.overlap = decision.overlap
        record.best_overlap = decision.best

    def _submit(self, worker: Worker, rank: int, job: Job, now: int) -> None:
        worker.engine.advance(now)
        worker.submit(job, now, rank)
        self._touch(worker.number, now)

    def _job(self, row: TraceRequest, record: Record, size: int, suffix: str = "") -> Job:
        self._own += 1
        chain: TraceChain | TokenChain
        sample = None
        space = PLAIN if row.lora is None and row.salt is None else Namespace(lora_name=row.lora, salt=row.salt)
        if row.ids is not None:
            chain = TraceChain(row.ids, row.id_block_size, row.input_length, size, self._own, space)
        elif row.tokens is not None:
            chain = WholeChain(list(row.tokens), size, algorithm("xxh3"), space)
            known = list(row.output_tokens or ())

            def sample(start: int, stop: int) -> list[int]:
                return [known[at] if at < len(known) else 0 for at in range(start, stop)]
        else:
            # Nothing is known of what it shares, so it shares nothing: all of its blocks have names of their own.
            chain = TraceChain((), 1, 0, size, self._own)
            chain.grow(row.input_length)
        return Job(
            row.id + suffix,
            chain,
            max(1, row.output_length),
            arrival=record.arrival,
            priority=row.priority,
            hints=hints_of(row) if self._heeds else row.hints,
            sample=sample,
        )

    def _done(self, worker: Worker, job: Job, now: int) -> None:
        worker.jobs.pop(job.id, None)
        if self.scaling is not None:
            self.scaling.ended(worker, now)
        self.router.finished(job.id, now)
        self._over(self._rows.pop(job.id), now)

    def _turn_away(self) -> None:
        """Fail the requests that wait for a worker: none is there, and none will come."""
        homeless, self._homeless = self._homeless, []
        for row in homeless:
            record = self.records.open[row.id]
            record.status, record.reason, record.ended = "failed", "no worker was left to take it", self.now
            self._over(self._rows.pop(row.id), self.now)

    def _over(self, row: TraceRequest, now: int) -> None:
        self._through += 1
        self.records.close(row.id)
        assert self._arrivals is not None
        self._arrivals.ended(row, now)
        self._agenda.put(self._arrivals.peek(), ARRIVAL)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _make(self, kind: WorkerConfig, pace: Pace | None) -> None:
        size = min(spec.block_size for spec in kind.engine.specs)
        worker = Worker(len(self.workers), f"{kind.name}{len(self.workers)}", size, kind.engine.role)
        for rank in range(kind.dp_size):
            holder = Holder(worker.name, rank)
            self._by_holder[holder] = (worker, rank)
            self._paces[holder] = pace
            recorder = self._recorder(worker, len(self._by_holder) - 1)  # ranks have caches of their own
            core = make_core(
                kind.engine,
                name=str(holder),
                watcher=recorder,
                batcher=self._feed(kind, holder),
                plans=self.config.plans,
                bulk=self.config.event_lag == 0 and self.config.digest_every == 0,
                timeline=self._shared.timeline(kind.engine),
                ranks=kind.dp_size,
                foresight=True,
                peer=self._peer(worker),
                host_link=self._host_link(worker, rank),
            )
            worker.add(core, recorder)
            if self.pulls is not None:
                self.pulls.join(worker, holder, core)
        self.workers.append(worker)
        worker.alive = kind.start == 0
        for when, what in ((kind.start, "start"), (kind.drain, "drain"), (kind.fail, "fail")):
            if when:
                self._agenda.put(when, WORKER_LIFE, len(self._life))
                self._life.append((worker, what))

    def _recorder(self, worker: Worker, number: int) -> Recorder:
        return Recorder(
            number,
            self.records.open,
            self._seen,
            self.gaps,
            worker.block_size,
            first_token=self._first_token,
            ended=partial(self._done, worker),
        )

    def _first_token(self, job: Job, now: int) -> None:
        self.router.prefill_done(job.id, now)
        if self.scaling is not None:
            self.scaling.first_token(self.records.open[job.id])

    def _host_link(self, worker: Worker, rank: int) -> LinkMaker:
        """What makes the link to a rank's host memory: its own, or one that shares the device's bus with other traffic."""
        fabric = self.fabric
        if fabric is None or not fabric.has_bus:
            return make_link
        fabric.join(worker.number)

        def landed(now: int) -> None:
            offload = worker.cores[rank].offload
            assert offload is not None
            offload.tiers[0].advance(now)  # what follows from it on links begins now
            worker.engine.cut(now)
            self._touch(worker.number, now)

        return lambda config: BusLink(config, fabric, worker.number, rank, landed)

    def _peer(self, worker: Worker) -> HandoverPeer | None:
        """Who moves prompts between this worker and others."""
        return None

    @property
    def used(self) -> list[Worker]:
        """Workers that ever took requests."""
        return [worker for worker in self.workers if worker.began]

    def _enlist(self, holder: Holder, worker: Worker) -> None:
        """Let requests go to a rank of ``worker``."""
        worker.began = True
        self._open += 1
        self.router.add_worker(holder, worker.role, self._paces[holder])

    def _drain(self, holder: Holder, worker: Worker) -> None:
        """Let no more requests go to a rank of ``worker``."""
        self._open -= 1
        self.router.drain(holder)

    def _remove(self, holder: Holder, worker: Worker) -> None:
        """A rank of ``worker``, which is drained, is gone."""
        self.router.remove_worker(holder)

    def _feed(self, kind: WorkerConfig, holder: Holder) -> RunFeed | None:
        """The way of a rank's own caches into the index, if the router reads one. What is shared is the pool's."""
        if self.indexer is None:
            return None
        below = kind.engine.tiers
        tiers = [Tier.G1]
        if below is not None:
            tiers += [tier for tier, level in below.levels if level.scope == "private"]
        return self.indexer.attach(holder, kind.engine.specs, tiers)

    def _live(self, planned: tuple[Worker, str], now: int) -> None:
        """A worker starts, stops taking requests, or fails."""
        worker, what = planned
        holders = [holder for holder, (home, _) in self._by_holder.items() if home is worker]
        if what == "start":
            worker.alive = True
            self._agenda.put(now, REROUTING)
            for holder in holders:
                self._enlist(holder, worker)
            return
        if not worker.draining:
            worker.draining = True
            for holder in holders:
                self._drain(holder, worker)
        if what == "drain":
            return
        worker.alive = False
        self._agenda.put(None, PASS_END, worker.number)
        self._agenda.put(now, REROUTING)
        worker.engine.advance(now)
        for core in worker.cores:
            core.tell()
        for holder in holders:
            self._remove(holder, worker)
            if self.indexer is not None and worker.cores[0].batcher is not None:
                self.indexer.detach(holder)
        for core in worker.cores:
            if core.offload is not None:
                core.offload.close(now)
        if self.pulls is not None:
            self.pulls.leave(worker, holders, now)
        self._lose(worker, now)
        worker.jobs = {}

    # -- workers that come and go by what there is to do ------------------------------------------------------------

    def _come(self, worker: Worker, now: int) -> None:
        """``worker`` takes requests from now on."""
        worker.alive, worker.draining = True, False
        self._agenda.put(now + 1, REROUTING)  # requests of this instant have been routed
        for holder, (home, _) in self._by_holder.items():
            if home is worker:
                self._enlist(holder, worker)
                if self.pulls is not None:
                    self.pulls.back(holder)

    def _go(self, worker: Worker, now: int) -> None:
        """``worker`` takes no more requests, and those that wait there may go elsewhere."""
        worker.draining = True
        for holder, (home, _) in self._by_holder.items():
            if home is worker:
                self._drain(holder, worker)
        if self.config.autoscale is not None and self.config.autoscale.moves:
            self._move(worker, now)

    def _move(self, worker: Worker, now: int) -> None:
        """Requests that wait at ``worker``, and of which it has computed nothing, are routed again."""
        worker.engine.advance(now)
        for rank, core in enumerate(worker.cores):
            for job in [one for one in core.scheduler.waiting if not one.tables and not one.output]:
                del worker.jobs[job.id]
                worker.recorders[rank].withdrawn.add(job)
                worker.cancel(job, now, rank)
                self.router.finished(job.id, now)
                self._homeless.append(self._rows[job.id])
        self._touch(worker.number, now)
        self._agenda.put(now + 1, REROUTING)

    def _switch_off(self, worker: Worker, now: int) -> int:
        """``worker``, which has nothing to do, is gone; returns how many cached blocks went with it."""
        lost = 0
        if self.pulls is not None:
            self.pulls.leave(worker, [holder for holder, (home, _) in self._by_holder.items() if home is worker], now)
            for core in worker.cores:
                if core.offload is not None:
                    core.offload.tick(now)  # what it pulled is given up, too
        for core in worker.cores:
            pools = [core.scheduler.manager.pool]
            if core.offload is not None:
                pools += [tier.store.pool for tier in core.offload.tiers if not tier.shared]
            for pool in pools if self.config.autoscale is None or not self.config.autoscale.warm else ():
                lost += pool.num_blocks - 1 - pool.unnamed
                pool.reset()
            core.begin(now)  # announces it
        if lost:
            for recorder in worker.recorders:
                self._seen.switched_off(recorder.number)
        worker.alive = False
        return lost

    def _lose(self, worker: Worker, now: int) -> None:
        """``worker`` has failed: what it had starts over."""
        for name in worker.jobs:
            self._start_over(self._rows[name])

    def _start_over(self, row: TraceRequest) -> None:
        """A request is to be routed again, from the beginning."""
        record = self.records.open[row.id]
        record.retries += 1
        record.admitted = record.first_token = -1
        self._homeless.append(row)

    def _hand_over(self, now: int) -> None:
        """What travels from worker to worker, and has arrived by ``now``, is there."""
        assert self.fabric is not None
        self.fabric.land(now)
        self._agenda.put(self.fabric.due(), HANDOVER, NETWORK)

    def _reroute(self, now: int) -> None:
        """Route the requests that wait for a worker, if one takes any."""
        if not self._homeless or not self._open:
            return
        self._look(now)
        homeless, self._homeless = self._homeless, []
        for row in homeless:
            self._dispatch(row, self.records.open[row.id], now)


def _make_indexer(config: ReplayConfig, block_size: int) -> RunIndexer:
    """What the router knows of caches: all of it, or what digests tell."""
    digests: DigestIndex | None = None
    if config.digest_error:
        digests = DigestIndex(max(kind.engine.num_gpu_blocks for kind in config.workers), config.digest_error)
    return RunIndexer(block_size, lag=config.event_lag, every=config.digest_every, backend=digests)
