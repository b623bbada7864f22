"""Repetition of a live run in virtual time: fresh engines fed with the stamps, a fresh router and index fed in the
journal's order.

Engines produce batches of events as they are advanced; the index is given the batch that the journal names, just before the
decisions that had seen it. A request goes to the engine that *this* router chooses, at the stamp it had. Nothing waits and
nothing reads a clock, so whatever comes out follows from stamps and sequences alone.
"""

from collections import deque
from collections.abc import Callable, Mapping

from kvyard.engine.job import Job
from kvyard.errors import KvyardError
from kvyard.events.mirror import Mirror
from kvyard.events.transport import Origin, Update
from kvyard.events.types import Cleared, Event, EventBatch
from kvyard.events.wire import Decoder, Encoder
from kvyard.hashing import Namespace
from kvyard.index import Holder, MemoryIndex, Source
from kvyard.lab.rehearsal.log import (
    EngineAction,
    EngineLog,
    LiveRecording,
    Log,
    RecordedPrompt,
    TransferAction,
    network_lines,
    transfer_facts,
    whole_log,
)
from kvyard.router import Router, RouteRequest
from kvyard.router import journal as did
from kvyard.server.mock.actions import ACTIONS
from kvyard.server.mock.handovers import Act, Join, WorkerHandovers, prompt_sizes
from kvyard.server.mock.incoming import IncomingPrompt, PromptAddress, PromptSource
from kvyard.server.mock.worker import MockWorker
from kvyard.tiers.network import Flow, Network

Prompts = Callable[[str], RecordedPrompt]
"""A request's prompt by its id."""


class Apart(Exception):
    """The run can't be followed any further, because it has taken another way; the text says where."""


class OfflineEngine:
    """One worker in virtual time."""

    def __init__(self, number: int, recording: LiveRecording, prompts: Prompts, join: Join | None) -> None:
        from kvyard.clock import WallClock

        # The worker is built as the live one was and never started: its clock stands for nothing.
        self.worker = MockWorker(number, recording.fleet, WallClock(), join=join)
        self.logs = [EngineLog() for _ in self.worker.cores]
        self.present: set[str] = set()
        """Requests that the router has sent here."""
        self._actions = deque(recording.actions[number])
        self._answers = recording.answers
        self._prompts = prompts
        self._jobs: dict[str, Job] = {}
        self._names = [f"{role[0]}{index}" for index, role in enumerate(recording.fleet.roles)]
        self._mirrors: dict[int, tuple[int, Mirror]] = {}
        """By rank: what is held after which batch, as a publisher keeps it for snapshots."""
        for core, log in zip(self.worker.cores, self.logs, strict=True):
            log.batches = {}
            core.watcher = log

    def batch(self, rank: int, seq: int) -> bytes:
        """Return the payload of a batch, for whose sake time passes as far as it must. Raises ``Apart`` where it
        never comes.
        """
        batches = self.logs[rank].batches
        assert batches is not None
        while seq not in batches:
            if not self._step():
                raise Apart(f"{self.worker.name}@{rank} never announces batch {seq}")
        return batches[seq][0]

    def snapshot(self, rank: int, seq: int) -> bytes:
        """Return the payload of all that is held after batch ``seq``, as a publisher would say it. Raises ``Apart`` where the
        last one was later.
        """
        upto, mirror = self._mirrors.get(rank, (-1, Mirror()))
        if seq < upto:
            raise Apart(f"{self.worker.name}@{rank} was restated at {upto} and then at {seq}")
        batches = self.logs[rank].batches
        assert batches is not None
        for number in range(upto + 1, seq + 1):
            self.batch(rank, number)
            mirror.apply(batches[number][1].events)
        self._mirrors[rank] = (seq, mirror)
        return Encoder().encode(EventBatch(stream="", seq=seq, events=list(mirror.events()), rank=rank))

    def finish(self) -> None:
        """Let time pass until nothing is left to do. Raises ``Apart``."""
        while self._step():
            pass

    def _step(self) -> bool:
        """Carry out the next instant; returns whether there was one."""
        engine, actions = self.worker.engine, self._actions
        now = engine.next_decision()
        if actions and (now is None or actions[0].stamp < now):
            now = actions[0].stamp
        if now is None:
            return False
        engine.advance(now)
        while actions and actions[0].stamp <= now:
            self._do(actions.popleft(), now)
        engine.begin(now)
        return True

    def _do(self, action: EngineAction, now: int) -> None:
        carry_out = ACTIONS[action.what]
        if action.what != "submit":
            carry_out(self.worker.engine, self._jobs[action.job], now, action.rank)
            return
        if action.request not in self.present:
            raise Apart(f"{self.worker.name} was sent {action.request} live, and isn't offline")
        prompt = self._prompts(action.request)
        known = self._answers.get(action.job, [])
        answer = known + [0] * (action.max_tokens - len(known))  # one that was given up had more to say
        space = Namespace(salt=prompt.salt)
        job = self.worker.make_job(action.job, prompt.tokens, answer, space, action.priority, action.hints)
        self._jobs[action.job] = job
        end = self.worker.handovers
        if end is not None and action.handed_over:
            end.keep(job, "")
        if end is not None and action.source >= 0:
            address = PromptAddress(host="", port=0, key=action.job)
            source = PromptSource(label=self._names[action.source], number=action.source)
            end.expect(job, action.rank, IncomingPrompt(source=source, address=address, target=self.worker.number))
        carry_out(self.worker.engine, job, now, action.rank)


class OfflineNetwork:
    """The network between workers, in virtual time: what they send, at the stamps that the live one gave it."""

    def __init__(self, recording: LiveRecording) -> None:
        self.lines: list[tuple[int, str, str, dict[str, object]]] = []
        """Events: time, kind, job, and facts."""
        self._sizes = prompt_sizes(recording.fleet)
        self._reserves_one = recording.fleet.handover.reserves == "one"
        self._transfers = recording.transfers
        self._sent: dict[str, IncomingPrompt] = {}
        """By job: what the workers of this run send."""

    def join(self, number: int, label: str, act: Act, lost: Callable[[IncomingPrompt], None]) -> WorkerHandovers:
        """Add a worker; its reports come from the recording."""
        return WorkerHandovers(number, label, 0, self, act=act, lost=lost, reserves_one=self._reserves_one)

    def takes_time(self, prompt: IncomingPrompt) -> bool:
        return self._sizes.take_time(prompt)

    def send(self, prompt: IncomingPrompt, now: int) -> None:
        assert prompt.job is not None
        self._sent[prompt.job.id] = prompt

    def finish(self) -> None:
        """Let everything travel. Raises ``Apart`` where a worker sent something live and doesn't now."""
        network = Network(self._sizes.config.latency, shared=self._sizes.config.contention)
        flows: dict[int, TransferAction] = {}
        by_job: dict[str, Flow] = {}
        for action in self._transfers:
            prompt = self._sent.get(action.job)
            if prompt is None:
                raise Apart(f"{action.job} was sent a prompt live, and isn't offline")
            self._land(network.advance(action.stamp), flows)
            if action.what == "stopped":
                network.cancel(action.stamp, by_job[action.job])
                self._tell(action.stamp, action, 0)
                continue
            ports = self._sizes.ports(prompt)
            for port, limit in ports.items():
                network.add_port(port, limit)
            flow = network.submit(action.stamp, ports, self._sizes.nbytes(prompt))
            flows[flow.number], by_job[action.job] = action, flow
            self._tell(action.stamp, action, flow.nbytes)
        while (due := network.earliest()) is not None:
            self._land(network.advance(due), flows)

    def _land(self, landed: list[Flow], flows: Mapping[int, TransferAction]) -> None:
        for flow in landed:
            assert flow.ended is not None
            self._tell(flow.ended, flows[flow.number], flow.queued, "landed")

    def _tell(self, time: int, action: TransferAction, amount: int, what: str = "") -> None:
        name = what or action.what
        self.lines.append((time, name, action.job, transfer_facts(name, action.source, action.target, amount)))


class Offline:
    """Repeats one recording. ``log`` is what it decided."""

    def __init__(self, recording: LiveRecording, prompts: Prompts) -> None:
        self.entries: list[did.Entry] = []
        """The journal of this run."""
        self.apart = ""
        """First deviation from the recording; empty if there is none."""
        self._recording = recording
        self._prompts = prompts
        self._network = OfflineNetwork(recording) if recording.fleet.hands_over else None
        join = None if self._network is None else self._network.join
        self._engines = [OfflineEngine(number, recording, prompts, join) for number in range(recording.fleet.workers)]
        self._by_name: Mapping[str, OfflineEngine] = {engine.worker.name: engine for engine in self._engines}
        self._sources: dict[str, Source] = {}
        self._decoders: dict[str, Decoder] = {}
        self._journal = self.entries.append
        began = next((entry for entry in recording.entries if isinstance(entry, did.Began)), None)
        if began is None:
            raise KvyardError("the journal doesn't begin at the beginning: record it from the gateway's start")
        index = recording.gateway.index()
        self.indexer = did.JournaledIndexer(
            index.identity(began.block_size),
            MemoryIndex(),
            weights=index.weights,
            trust=index.trust,
            journal=self._journal,
        )
        self.routers: dict[str, Router] = {}
        """By name: the first has none."""

    @property
    def log(self) -> Log:
        """Return the decisions, by place."""
        network = None if self._network is None else network_lines(self._network.lines)
        return whole_log(self.entries, {engine.worker.name: engine.logs for engine in self._engines}, network)

    @property
    def first(self) -> dict[str, int]:
        """Return the time of each request's first token."""
        return {name: time for engine in self._engines for log in engine.logs for name, time in log.first.items()}

    @property
    def last(self) -> dict[str, int]:
        """Return the time of each request's last token."""
        return {name: time for engine in self._engines for log in engine.logs for name, time in log.last.items()}

    def run(self) -> None:
        """Repeat everything. Stops, with ``apart`` set, where the recording can't be followed."""
        try:
            for entry in self._recording.entries:
                self._tell(entry)
            for engine in self._engines:
                engine.finish()
            if self._network is not None:
                self._network.finish()
        except Apart as error:
            self.apart = str(error)

    def _tell(self, entry: did.Entry) -> None:
        router = self.routers.get(entry.router)
        if isinstance(entry, did.Began):
            journal = did.named(self._journal, entry.router) if entry.router else self._journal
            self.routers[entry.router] = Router(entry.config, (), self.indexer, entry.seed, journal=journal)
        elif isinstance(entry, did.Listening):
            self._sources[entry.source.stream] = entry.source
            self.indexer.register(entry.source)
        elif isinstance(entry, did.Applied):
            self.indexer.apply(self._update(entry), entry.at)
        elif isinstance(entry, did.Unheard):
            self.indexer.unregister(entry.stream)
        elif isinstance(entry, did.Lost):
            self.indexer.lose(entry.stream, entry.reason)
        elif isinstance(entry, did.Shared):
            self.indexer.share(entry.pool, entry.members)
        elif router is None:
            raise KvyardError(f"the journal has a {type(entry).__name__} before the router began")
        elif isinstance(entry, did.Routed | did.NotRouted | did.Previewed):
            self._route(router, entry)
        elif isinstance(entry, did.FirstToken):
            router.prefill_done(entry.id, entry.at, entry.seen)
        elif isinstance(entry, did.Progressed):
            router.progressed(entry.id, entry.output_tokens, entry.at)
        elif isinstance(entry, did.Ended):
            (router.refused if entry.refused else router.finished)(entry.id, entry.at)
        elif isinstance(entry, did.Joined):
            router.add_worker(entry.worker, entry.role)
        elif isinstance(entry, did.Drained):
            router.drain(entry.worker)
        elif isinstance(entry, did.Left):
            router.remove_worker(entry.worker)
        elif isinstance(entry, did.Booked):
            raise KvyardError("requests of other gateways are in this journal: prove a gateway that is alone")

    def _route(self, router: Router, entry: did.Routed | did.NotRouted | did.Previewed) -> None:
        prompt = self._prompts(entry.id)
        keys = self.indexer.identity.keys(prompt.tokens, Namespace(salt=prompt.salt))
        request = RouteRequest(entry.id, keys, len(prompt.tokens), prompt.session, entry.expected_output)
        try:
            if isinstance(entry, did.Previewed):
                router.preview(request, entry.at, exclude=entry.excluded)
                return
            decision = router.route(request, entry.at, exclude=entry.excluded)
        except KvyardError:
            return  # it is in the journal, as it was the first time
        engine = self._engine(decision.worker)
        engine.present.add(entry.id)

    def _engine(self, worker: Holder) -> OfflineEngine:
        engine = self._by_name.get(worker.name)
        if engine is None:
            raise Apart(f"there is no worker {worker.name} in the fleet")
        return engine

    def _update(self, entry: did.Applied) -> Update:
        """Return the update that ``entry`` names, with the events that this run's engines announce."""
        source = self._sources[entry.stream]
        events: list[Event] = []
        if entry.events:
            engine = self._engine(source.holder())
            decoder = self._decoders.setdefault(entry.stream, Decoder())
            if entry.origin == Origin.SNAPSHOT:
                events = list(decoder.decode(engine.snapshot(source.rank, entry.seq)).events)
            elif entry.dialect == "none":
                events = [Cleared()]  # the subscriber's own word that all before is void
            else:
                events = list(decoder.decode(engine.batch(source.rank, entry.seq)).events)
        return Update(
            stream=entry.stream,
            topic=entry.topic,
            epoch=entry.epoch,
            seq=entry.seq,
            rank=entry.rank,
            origin=entry.origin,
            state=entry.state,
            dialect=entry.dialect,
            events=events,
            reason=entry.reason,
            replaces=entry.events > 0 and entry.dialect == "none",
        )
