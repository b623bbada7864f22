"""A fleet of workers with roles: prompts may be computed by one worker and answered by another.

Two routers choose: one among those that compute prompts, one among those that decode. A decider says which requests take both
ways. The others are computed whole by a decode worker. What lies between the two ways is in ``handovers``.
"""

from functools import partial

from msgspec.structs import replace

from kvyard.blocks.use import NO_FACTS
from kvyard.clock import MS
from kvyard.engine.handovers import HandoverPeer
from kvyard.engine.job import Job
from kvyard.index import Holder
from kvyard.index.runs import RunFeed
from kvyard.replay.agenda import COMPUTED, HANDOVER, NETWORK
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.handovers import Handover, Handovers
from kvyard.replay.network import make_fabric
from kvyard.replay.record import Record
from kvyard.replay.recorder import Recorder
from kvyard.replay.split_recorder import PREFILL, SplitRecorder
from kvyard.replay.traces import TraceRequest
from kvyard.replay.worker import Worker
from kvyard.router import Router
from kvyard.router.deciders import Decider, Prospect, SplitInput, make_decider
from kvyard.router.pace import Pace
from kvyard.router.policies import make_policy
from kvyard.router.request import Decision, Load
from kvyard.tiers.fabric import Fabric


class SplitFleet(Fleet):
    """Runs a trace on workers with roles."""

    def __init__(self, config: ReplayConfig) -> None:
        """Raises ``KvyardError`` for a config that can't be honoured."""
        config.check()
        first = config.workers[0].engine
        self._decider: Decider = make_decider(config.handover.decider, config.handover.decider_options)
        self._splits_all = None if self._decider.looks else self._decider.splits(None)
        self._early = config.handover.protocol == "destination-first"
        """Whether a decode worker makes room before the prompt is computed."""
        self.handed_over = 0
        """Requests that the decider sent both ways."""
        self.kept = 0
        """Requests that it left to a decode worker."""
        self._computed: list[Handover] = []
        """Prompts that were computed just now, or have no decode worker yet."""
        self._per_pass: list[int] = []
        """Prompt tokens per pass, by worker."""
        self._asks_pace = self._decider.looks
        second = make_policy(config.routers[1])
        weighs = second.needs_index and (config.routers[1].policy != "kv" or config.routers[1].prefill_scale > 0)
        self._reads_decoders = weighs or self._splits_all is not True or config.peer_pull is not None
        """Whether anything depends on what decode workers have cached."""
        self._at_once = self._decider.looks or second.needs_pace or config.autoscale is not None
        """Whether anything depends on first tokens when they come."""
        self._decoders = 0
        """Ranks that take requests to decode."""
        self.handovers = Handovers(
            config.handover,
            make_fabric(config.handover),
            first.bytes_per_block or 0,
            min(spec.block_size for spec in first.specs),
            lambda worker: self._touch(worker.number, self.now),
        )
        self.decode_router: Router | None = None
        super().__init__(config)

    def _make_fabric(self) -> Fabric | None:
        return self.handovers.fabric

    # -- requests -----------------------------------------------------------------------------------------------------

    def _look(self, now: int) -> None:
        if self.indexer is None:
            return
        for worker in self.workers:
            if worker.alive and (self._reads_decoders or worker.role != "decode"):
                worker.engine.advance(now)
        self.indexer.flush(now)

    def _dispatch(self, row: TraceRequest, record: Record, now: int) -> None:
        record.stages = None
        if not self._open or not self._decoders:
            self._homeless.append(row)
            return
        facts = NO_FACTS if self._facts is None else self._facts.of(row)
        if not self._splits_all:
            job = self._job(row, record, self._block_size)
            job.facts = facts
            if not self._splits(row, job, now):
                self.kept += 1
                self._keep(row, record, job, now)
                return
        self.handed_over += 1
        hand = Handover(row, record, facts)
        self.handovers.under_way[row.id] = hand
        if self._early:
            self._reserve(hand, now)
        else:
            self._compute(hand, now)

    def _splits(self, row: TraceRequest, job: Job, now: int) -> bool:
        if self._splits_all is not None:
            return self._splits_all
        assert self.decode_router is not None
        request = self._request(row, job)
        decode = self._place(self.decode_router.preview(request, now))
        prefill = self._place(self.router.preview(request, now))
        send_ms = self.handovers.send_ms(decode.uncached)
        return self._decider.splits(SplitInput(row.input_length, decode, prefill, send_ms))

    def _place(self, decision: Decision) -> Prospect:
        worker, _ = self._by_holder[decision.worker]
        pace = self._paces[decision.worker]
        assert pace is not None
        return Prospect(decision, pace, self._per_pass[worker.number])

    def _keep(self, row: TraceRequest, record: Record, job: Job, now: int) -> None:
        """A decode worker does all of it."""
        assert self.decode_router is not None
        decision = self.decode_router.route(self._request(row, job), now)
        worker, rank = self._by_holder[decision.worker]
        self._note_route(record, decision, worker.name_of(rank))
        if self.pulls is not None:
            self.pulls.expect(job, decision, self._load_of)
        self._submit(worker, rank, job, now)

    def _compute(self, hand: Handover, now: int) -> None:
        """Have a prefill worker compute the prompt."""
        row, record = hand.row, hand.record
        job = self._job(row, record, self._block_size, PREFILL)
        job.facts = hand.facts
        job.handed_over = True
        job.max_tokens = 1
        decision = self.router.route(self._request(row, job), now)
        worker, rank = self._by_holder[decision.worker]
        record.overlap, record.best_overlap = decision.overlap, decision.best
        hand.stages.prefill_worker = worker.name_of(rank)
        hand.source, hand.prefill = (worker, rank), job
        if self.pulls is not None:
            self.pulls.expect(job, decision, self._load_of)
        self._submit(worker, rank, job, now)

    def _reserve(self, hand: Handover, now: int) -> None:
        """Have a decode worker make room for the prompt, and answer it when it has come."""
        router = self.decode_router
        assert router is not None
        job = self._job(hand.row, hand.record, self._block_size)
        job.facts = hand.facts
        job.received = True
        decision = router.route(self._request(hand.row, job), now)
        router.prefill_done(hand.row.id, now, seen=False)  # it has none to do
        worker, rank = self._by_holder[decision.worker]
        hand.target, hand.decode = (worker, rank), job
        hand.record.worker = worker.name_of(rank)
        self._submit(worker, rank, job, now)

    def _load_of(self, holder: Holder) -> Load:
        """What a rank has to do of what it is there for."""
        assert self.decode_router is not None
        return (self.decode_router if self._by_holder[holder][0].role == "decode" else self.router).load(holder)

    def _prompt_done(self, worker: Worker, job: Job, now: int) -> None:
        """``worker`` has computed a prompt for another."""
        worker.jobs.pop(job.id, None)
        if self.scaling is not None:
            self.scaling.ended(worker, now)
        name = job.id.removesuffix(PREFILL)
        self.router.prefill_done(name, now)
        self.router.finished(name, now)
        self._computed.append(self.handovers.under_way[name])
        self._agenda.put(now, HANDOVER, COMPUTED)

    def _hand_over(self, now: int) -> None:
        self.handovers.land(now)
        computed, self._computed = self._computed, []
        if computed and not self._early and self._reads_decoders:
            self._look(now)
        for hand in computed:
            if hand.stages.held < 0:
                self.handovers.held(hand, now)
            if self._early:
                continue
            if self._decoders:
                self._reserve(hand, now)
            else:
                self._computed.append(hand)
        self._agenda.put(self.handovers.due(), HANDOVER, NETWORK)

    def _start_passes(self, now: int) -> None:
        super()._start_passes(now)
        if self._early and self._open:
            for hand in self.handovers.take_reserved():
                self._compute(hand, now)
        self._agenda.put(self.handovers.due(), HANDOVER, NETWORK)

    def _first_token(self, job: Job, now: int) -> None:
        if not self._at_once and self._splits_all:
            return  # its prompt was computed elsewhere, and that has been told
        assert self.decode_router is not None
        self.decode_router.prefill_done(job.id, now)
        if self.scaling is not None:
            self.scaling.first_token(self.records.open[job.id])
        self._decider.served((now - self.records.open[job.id].arrival) / MS)

    def _done(self, worker: Worker, job: Job, now: int) -> None:
        assert self.decode_router is not None
        worker.jobs.pop(job.id, None)
        if self.scaling is not None:
            self.scaling.ended(worker, now)
        name = job.id.removesuffix(PREFILL) if job.handed_over else job.id
        hand = self.handovers.under_way.get(name)
        if hand is not None:  # one of the two refused it
            self._give_up(hand, worker, now)
        self.decode_router.finished(name, now)
        self._over(self._rows.pop(name), now)

    def _reroute(self, now: int) -> None:
        super()._reroute(now)
        if self._computed and self._decoders:
            self._agenda.put(now, HANDOVER, COMPUTED)

    def _keeps_still(self) -> bool:
        return False

    def _can_follow(self) -> bool:
        return False  # what is handed over changes the caches of two workers, in between passes too

    # -- workers ------------------------------------------------------------------------------------------------------

    def _move(self, worker: Worker, now: int) -> None:
        """What waits at ``worker`` stays there: its other part is at another worker already, or follows from this one."""

    def _make(self, kind: WorkerConfig, pace: Pace | None) -> None:
        self._per_pass.append(kind.engine.tokens_per_pass)
        super()._make(kind, pace)

    def _recorder(self, worker: Worker, number: int) -> Recorder:
        return SplitRecorder(
            number,
            self.records.open,
            self._seen,
            self.gaps,
            worker.block_size,
            first_token=self._first_token,
            ended=partial(self._done, worker),
            computed=partial(self._prompt_done, worker),
            at_once=self._at_once,
        )

    def _feed(self, kind: WorkerConfig, holder: Holder) -> RunFeed | None:
        if kind.engine.role == "decode" and not self._reads_decoders:
            return None
        return super()._feed(kind, holder)

    def _peer(self, worker: Worker) -> HandoverPeer | None:
        return self.handovers.join(worker)

    def _enlist(self, holder: Holder, worker: Worker) -> None:
        router = self.decode_router
        if router is None:
            config = self.config.routers[1]
            if not self._reads_decoders:
                config = replace(config, predicted_ttl_s=0)
            router = self.decode_router = self._make_router(config, 1, self._reads_decoders)
        if worker.role != "decode":
            super()._enlist(holder, worker)
        if worker.role != "prefill":
            worker.began = True
            self._decoders += 1
            router.add_worker(holder, worker.role, self._paces[holder])

    def _drain(self, holder: Holder, worker: Worker) -> None:
        assert self.decode_router is not None
        if worker.role != "decode":
            super()._drain(holder, worker)
        if worker.role != "prefill":
            self._decoders -= 1
            self.decode_router.drain(holder)

    def _remove(self, holder: Holder, worker: Worker) -> None:
        assert self.decode_router is not None
        if worker.role != "decode":
            super()._remove(holder, worker)
        if worker.role != "prefill":
            self.decode_router.remove_worker(holder)

    def _lose(self, worker: Worker, now: int) -> None:
        lost = self.handovers.lost(worker)
        for hand in lost:
            self._give_up(hand, worker, now)
        for name in worker.jobs:
            if not name.endswith(PREFILL) and name not in {hand.row.id for hand in lost}:
                self._start_over(self._rows[name])
        for hand in lost:
            self._start_over(hand.row)

    def _give_up(self, hand: Handover, worker: Worker, now: int) -> None:
        """A hand-over comes to nothing, because of ``worker``: what others hold for it goes back."""
        assert self.decode_router is not None
        self.handovers.give_up(hand, now)
        for place, job in ((hand.source, hand.prefill), (hand.target, hand.decode)):
            if place is None or job is None or place[0] is worker or not place[0].alive:
                continue
            other, rank = place
            if other.jobs.pop(job.id, None) is not None:
                other.recorders[rank].withdrawn.add(job)
                other.engine.advance(now)
                other.cancel(job, now, rank)
                self.handovers.withdraw(place, job)
                self._touch(other.number, now)
        if hand in self._computed:
            self._computed.remove(hand)
        self.router.finished(hand.row.id, now)
        self.decode_router.finished(hand.row.id, now)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless no prompt is held without a reason, and the network is sound."""
        self.handovers.check_integrity()
