"""The same run in virtual time: fresh engines fed with the stamps, a fresh router and index fed in the journal's order.

Engines produce batches of events as they are advanced; the index is given the batch that the journal names, just before the
decisions that had seen it. A request goes to the engine that *this* router chooses, at the stamp it had. Nothing waits and
nothing reads a clock, so whatever comes out follows from stamps and sequences alone.
"""

from collections import deque
from collections.abc import Callable, Mapping

from kvyard.errors import KvyardError
from kvyard.events.mirror import Mirror
from kvyard.events.transport import Origin, Update
from kvyard.events.types import Cleared, Event, EventBatch
from kvyard.events.wire import Decoder, Encoder
from kvyard.hashing import Namespace
from kvyard.index import Holder, MemoryIndex, Source
from kvyard.router import Router, RouteRequest
from kvyard.router import journal as did
from kvyard.server.mock.worker import MockWorker
from kvyard.server.rehearsal.log import (
    EngineAction,
    EngineLog,
    LiveRecording,
    Log,
    RecordedPrompt,
    whole_log,
)

Prompts = Callable[[str], RecordedPrompt]
"""A request's prompt by its id."""


class Apart(Exception):
    """The run can't be followed any further, because it has taken another way; the text says where."""


class OfflineEngine:
    """One worker in virtual time."""

    def __init__(self, number: int, recording: LiveRecording, prompts: Prompts) -> None:
        from kvyard.clock import WallClock

        # The worker is built as the live one was and never started: its clock stands for nothing.
        self.worker = MockWorker(number, recording.fleet, WallClock())
        self.logs = [EngineLog() for _ in self.worker.cores]
        self.present: set[str] = set()
        """Requests that the router has sent here."""
        self._actions = deque(recording.actions[number])
        self._answers = recording.answers
        self._prompts = prompts
        self._jobs: dict[str, object] = {}
        self._mirrors: dict[int, tuple[int, Mirror]] = {}
        """By rank: what is held after which batch, as a publisher keeps it for snapshots."""
        for core, log in zip(self.worker.cores, self.logs, strict=True):
            log.batches = {}
            core.watcher = log

    def batch(self, rank: int, seq: int) -> bytes:
        """The payload of a batch, for whose sake time passes as far as it must. Raises ``Apart`` where it never comes."""
        batches = self.logs[rank].batches
        assert batches is not None
        while seq not in batches:
            if not self._step():
                raise Apart(f"{self.worker.name}@{rank} never announces batch {seq}")
        return batches[seq][0]

    def snapshot(self, rank: int, seq: int) -> bytes:
        """The payload of all that is held after batch ``seq``, as a publisher would say it. Raises ``Apart`` where the last one
        was later.
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
        if action.what == "cancel":
            job = self._jobs[action.job]
            self.worker.engine.cancel(job, now, action.rank)  # type: ignore[arg-type]
            return
        if action.request not in self.present:
            raise Apart(f"{self.worker.name} was sent {action.request} live, and isn't offline")
        prompt = self._prompts(action.request)
        known = self._answers.get(action.job, [])
        answer = known + [0] * (action.max_tokens - len(known))  # one that was given up had more to say
        space = Namespace(salt=prompt.salt)
        job = self.worker.make_job(action.job, prompt.tokens, answer, space, action.priority, action.hints)
        job.arrival = now
        self._jobs[action.job] = job
        self.worker.engine.submit(job, now, action.rank)


class Offline:
    """Repeats one recording. ``log`` is what it decided."""

    def __init__(self, recording: LiveRecording, prompts: Prompts) -> None:
        self.entries: list[did.Entry] = []
        """The journal of this run."""
        self.apart = ""
        """Where it left the way of the recording; empty where it didn't."""
        self._recording = recording
        self._prompts = prompts
        self._engines = [OfflineEngine(number, recording, prompts) for number in range(recording.fleet.workers)]
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
        self.router: Router | None = None

    @property
    def log(self) -> Log:
        """What was decided, by place."""
        return whole_log(self.entries, {engine.worker.name: engine.logs for engine in self._engines})

    @property
    def first(self) -> dict[str, int]:
        """When each request's first token is out."""
        return {name: at for engine in self._engines for log in engine.logs for name, at in log.first.items()}

    @property
    def last(self) -> dict[str, int]:
        """When each request is through."""
        return {name: at for engine in self._engines for log in engine.logs for name, at in log.last.items()}

    def run(self) -> None:
        """Repeat everything. Stops, with ``apart`` set, where the recording can't be followed."""
        try:
            for entry in self._recording.entries:
                self._tell(entry)
            for engine in self._engines:
                engine.finish()
        except Apart as error:
            self.apart = str(error)

    def _tell(self, entry: did.Entry) -> None:
        router = self.router
        if isinstance(entry, did.Began):
            self.router = Router(entry.config, (), self.indexer, entry.seed, journal=self._journal)
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
        """The update that ``entry`` names, with the events that this run's engines announce."""
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
