"""The placement of a fleet with roles: prompts may be computed by one worker and answered by another.

Each of the two worker pools has its router. A decider says which requests take both stages. The others are computed whole by a
decode worker. What lies between the two stages is in ``handovers``.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvyard.clock import MS
from kvyard.engine.job import Job
from kvyard.index import Holder
from kvyard.replay.agenda import COMPUTED, HANDOVER, Agenda
from kvyard.replay.config import ReplayConfig
from kvyard.replay.handovers import Handover, Handovers
from kvyard.replay.index_sync import IndexSync
from kvyard.replay.jobs import PREFILL, FleetJob, JobMaker
from kvyard.replay.listeners import RequestListener
from kvyard.replay.pulls import FleetPulls
from kvyard.replay.record import Record
from kvyard.replay.worker import Worker
from kvyard.replay.worker_pool import WorkerPool
from kvyard.router.deciders import Decider, Prospect, SplitInput, make_decider
from kvyard.router.policies import make_policy
from kvyard.router.worker import WorkerLoad


class SplitRules:
    """Consequences of a config with roles that don't depend on workers."""

    def __init__(self, config: ReplayConfig, front_end: Callable[[int], int] | None = None) -> None:
        """``front_end``: nanoseconds that decode workers take outside of passes, by tokens of a prompt."""
        handover, decode = config.handover, config.routers[1]
        policy = make_policy(decode)
        self.decider: Decider = make_decider(handover.decider, handover.decider_options)
        self.splits_all = None if self.decider.looks else self.decider.splits(None)
        """The split policy's answer if it holds for all requests."""
        self.reserves_first = handover.protocol == "destination-first"
        """True if a decode worker makes room before the prompt is computed."""
        again = handover.second_front_end and not self.reserves_first
        self.second_front_end = front_end if again else None
        """Time between the answer of a prefill worker and the arrival at the engine of a decode worker, by tokens."""
        weighs_caches = policy.needs_index and (decode.policy != "kv" or decode.prefill_scale > 0)
        self.reads_decode_caches = weighs_caches or self.splits_all is not True or config.peer_pull is not None
        """True if anything depends on what decode workers have cached."""
        self.first_tokens_at_once = self.decider.looks or policy.needs_pace or config.autoscale is not None
        """True if anything depends on first tokens at the instant at which they come."""


class SplitPlacement(RequestListener):
    """A prefill worker computes a request's prompt and a decode worker its answer, or a decode worker both."""

    def __init__(
        self,
        rules: SplitRules,
        prefill_pool: WorkerPool,
        decode_pool: WorkerPool,
        handovers: Handovers,
        jobs: JobMaker,
        agenda: Agenda,
        *,
        block_size: int,
        index_sync: IndexSync,
        pulls: FleetPulls | None,
    ) -> None:
        self.prefill_pool = prefill_pool
        self.decode_pool = decode_pool
        self.pools: Sequence[WorkerPool] = (prefill_pool, decode_pool)
        self.handovers = handovers
        self.handed_over = 0
        """Requests that the split policy sent through both stages."""
        self.kept = 0
        """Requests that it left to a decode worker."""
        self._rules = rules
        self._jobs = jobs
        self._agenda = agenda
        self._block_size = block_size
        self._index_sync = index_sync
        self._pulls = pulls
        self._computed: list[Handover] = []
        """Prompts that were computed just now, or have no decode worker yet."""
        self._sent_on: list[tuple[int, int, Handover]] = []
        """Computed prompts in the front end of the decode worker, by when they are through; not yet routed there."""
        self._serial = 0

    @property
    def open(self) -> bool:
        return self.prefill_pool.open > 0 and self.decode_pool.open > 0

    # -- stages -------------------------------------------------------------------------------------------------------

    def place(self, record: Record, now: int) -> None:
        facts = self._jobs.facts(record)
        if not self._rules.splits_all:
            job = self._jobs.make(record, self._block_size, facts)
            if not self._splits(job, now):
                self.kept += 1
                self._keep(job, now)
                return
        self.handed_over += 1
        hand = Handover(record, facts)
        self.handovers.in_flight[record.id] = hand
        if self._rules.reserves_first:
            self._reserve(hand, now)
        else:
            self._compute(hand, now)

    def _splits(self, job: FleetJob, now: int) -> bool:
        if self._rules.splits_all is not None:
            return self._rules.splits_all
        decode = self._prospect(self.decode_pool, job, now)
        prefill = self._prospect(self.prefill_pool, job, now)
        send_ms = self.handovers.send_ms(decode.uncached)
        return self._rules.decider.splits(SplitInput(job.num_tokens, decode, prefill, send_ms))

    def _prospect(self, pool: WorkerPool, job: FleetJob, now: int) -> Prospect:
        decision, worker = pool.preview(job, now)
        return Prospect(decision, pool.router.pace(decision.worker), worker.tokens_per_pass)

    def _keep(self, job: FleetJob, now: int) -> None:
        """Have a decode worker do all of it."""
        booking, worker, rank = self.decode_pool.assign(job, now)
        job.record.worker = worker.name_of(rank)
        job.record.overlap, job.record.best_overlap = booking.overlap, booking.best
        if self._pulls is not None:
            self._pulls.expect(job, booking, self._load_of)
        worker.submit(job, now, rank)

    def _compute(self, hand: Handover, now: int) -> None:
        """Have a prefill worker compute the prompt."""
        record = hand.record
        job = self._jobs.make(record, self._block_size, hand.facts, PREFILL)
        job.handed_over = True
        job.max_tokens = 1
        booking, worker, rank = self.prefill_pool.assign(job, now)
        record.overlap, record.best_overlap = booking.overlap, booking.best
        hand.stages.prefill_worker = worker.name_of(rank)
        hand.source, hand.prefill = (worker, rank), job
        if self._pulls is not None:
            self._pulls.expect(job, booking, self._load_of)
        worker.submit(job, now, rank)

    def _reserve(self, hand: Handover, now: int) -> None:
        """Have a decode worker make room for the prompt, and answer it when it has come."""
        record = hand.record
        job = self._jobs.make(record, self._block_size, hand.facts)
        job.received = True
        _, worker, rank = self.decode_pool.assign(job, now)
        self.decode_pool.router.prefill_done(record.id, now, seen=False)  # it has none to do
        hand.target, hand.decode = (worker, rank), job
        record.worker = worker.name_of(rank)
        worker.submit(job, now, rank)

    def _load_of(self, holder: Holder) -> WorkerLoad:
        """Return the load of a rank in the stage that it is there for."""
        return (self.prefill_pool if holder in self.prefill_pool else self.decode_pool).router.load(holder)

    def passes_started(self, now: int) -> None:
        if self._rules.reserves_first and self.prefill_pool.open:
            for hand in self.handovers.take_reserved():
                self._compute(hand, now)

    def hand_over(self, now: int) -> None:
        while self._sent_on and self._sent_on[0][0] <= now:
            hand = heappop(self._sent_on)[2]
            if self.handovers.in_flight.get(hand.record.id) is hand:  # else it was given up
                self._computed.append(hand)
        if self._sent_on:
            self._agenda.put(self._sent_on[0][0], HANDOVER, COMPUTED)
        computed, self._computed = self._computed, []
        reserves_first = self._rules.reserves_first
        if computed and not reserves_first and self._rules.reads_decode_caches:
            self._index_sync.catch_up(now)
        for hand in computed:
            if hand.stages.held < 0:
                self.handovers.held(hand, now)
            if reserves_first:
                continue
            if self.decode_pool.open:
                self._reserve(hand, now)
            else:
                self._computed.append(hand)

    def resume(self, now: int) -> None:
        if self._computed and self.decode_pool.open:
            self._agenda.put(now, HANDOVER, COMPUTED)

    # -- ends of stages -----------------------------------------------------------------------------------------------

    def first_token(self, record: Record, now: int) -> None:
        if not self._rules.first_tokens_at_once and self._rules.splits_all:
            return  # the router knows already that the prompt was computed elsewhere
        self.decode_pool.router.prefill_done(record.id, now)
        self._rules.decider.served(record.ttft / MS)

    def computed(self, worker: int, job: Job, record: Record, now: int) -> None:
        self.prefill_pool.router.prefill_done(job.id, now)
        self.prefill_pool.router.finished(job.id, now)
        hand = self.handovers.in_flight[record.id]
        front_end = self._rules.second_front_end
        if front_end is None:
            self._computed.append(hand)
            self._agenda.put(now, HANDOVER, COMPUTED)
            return
        hand.stages.held = now
        heappush(self._sent_on, (now + front_end(record.input), self._serial, hand))
        self._serial += 1
        self._agenda.put(now if self._computed else self._sent_on[0][0], HANDOVER, COMPUTED)

    def ended(self, worker: int, job: Job, record: Record, now: int) -> None:
        hand = self.handovers.in_flight.get(record.id)
        if hand is not None:  # one of the two refused it
            self._give_up(hand, worker, now)
        self.decode_pool.router.finished(record.id, now)

    # -- workers that go ----------------------------------------------------------------------------------------------

    def withdraw(self, worker: Worker, now: int) -> list[str]:
        """Return nothing: the other stage of a request is at another worker already, or follows from this one."""
        return []

    def lose(self, worker: Worker, now: int) -> list[str]:
        lost = self.handovers.lost(worker)
        for hand in lost:
            self._give_up(hand, worker.number, now)
        ids = [hand.record.id for hand in lost]
        return [id_ for id_ in worker.jobs if not id_.endswith(PREFILL) and id_ not in ids] + ids

    def _give_up(self, hand: Handover, worker: int, now: int) -> None:
        """End a hand-over because of ``worker``, and free what other workers hold for it."""
        self.handovers.give_up(hand, now)
        for place, job in ((hand.source, hand.prefill), (hand.target, hand.decode)):
            if place is None or job is None:
                continue
            other, rank = place
            if other.number == worker or not other.alive or job.id not in other.jobs:
                continue
            other.withdraw(job, now, rank)
            self.handovers.withdraw(place, job)
            other.touch()
        if hand in self._computed:
            self._computed.remove(hand)
        if hand.prefill is not None:
            self.prefill_pool.router.finished(hand.prefill.id, now)
        self.decode_pool.router.finished(hand.record.id, now)
