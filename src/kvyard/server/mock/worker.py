"""A worker: one engine with its ranks, their event streams, and the adapters it has loaded. It knows no HTTP.

It lives between ``start`` and ``stop``; ``die`` ends it as a crash would, and a new ``start`` gives it an empty cache and a
new stream of events.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random

import msgspec

from kvyard.blocks import NO_HINTS, Hints
from kvyard.blocks.use import NO_FACTS, RequestFacts
from kvyard.clock import WallClock, pause
from kvyard.engine.build import make_core
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.engine.ranks import Ranks
from kvyard.events.batcher import Batcher
from kvyard.events.transport import Publisher
from kvyard.events.transport.endpoint import reachable, split_tcp
from kvyard.events.types import EventBatch, Tier
from kvyard.hashing import Namespace, Run, TokenChain, algorithm
from kvyard.replay.facts import heeded
from kvyard.server.mock.answers import MadeAnswer
from kvyard.server.mock.choice import MockChoice, RequestFlow
from kvyard.server.mock.config import Lora, MockConfig
from kvyard.server.mock.driver import EngineDriver, Journal
from kvyard.server.mock.faults import as_loaded, as_published, as_received, is_lost
from kvyard.server.mock.handovers import Join
from kvyard.server.mock.incoming import IncomingPrompt
from kvyard.server.mock.measures import MockMetrics, RankMeasures
from kvyard.server.mock.rank_watcher import MockRankWatcher
from kvyard.server.mock.schemas import EventStream
from kvyard.server.mock.tally import RecentWork, WorkerTally
from kvyard.server.running import patiently

WAITING_COUNTS = 4
"""Weight of a waiting request relative to a running one when a rank is chosen; as in vLLM."""
TURN = 1 << 16
"""Tokens of a prompt that are hashed before others have their turn."""


class MockWorker:
    """One worker of a mock fleet. Everything happens on one event loop."""

    def __init__(
        self,
        number: int,
        config: MockConfig,
        clock: WallClock,
        journal: Journal | None = None,
        recent: RecentWork | None = None,
        join: Join | None = None,
    ) -> None:
        """``recent`` is the fleet's memory of what happened lately; ``join`` has it take part in hand-overs, where
        there are any. Raises ``KvyardError`` for a config that can't be
        honoured.
        """
        self.number = number
        self.role = config.roles[number]
        self.name = f"worker{number}" if self.role == "both" else f"{self.role[0]}{number}"
        self.config = config
        self.faults = config.faults
        self.random = Random(f"{config.seed} {number}")
        """For faults of requests, drawn on the loop in order of arrival."""
        self.cores: list[EngineCore] = []
        self.watchers: list[MockRankWatcher] = []
        self.publishers: list[Publisher] = []
        self.neighbour: MockWorker | None = None
        """The worker after it, at whose endpoint events are published by mistake if that fault is asked for."""
        self.streams: list[EventStream] = []
        """Endpoints of its ranks, also of the time before it died: it comes back there."""
        self._places: dict[int, tuple[str, str | None]] = {}
        """First endpoint of each rank's stream, so that it is there again after a death."""
        self.loras: dict[str, Lora] = {}
        self.alive = False
        self.tally = WorkerTally(self.name, config.dp_size, recent or RecentWork())
        self.broken: asyncio.Queue[Exception] = asyncio.Queue()
        """Failures of its engine, for the fleet to let it die and come back."""
        self._clock = clock
        self._journal = journal
        self._serial = self.deaths = 0
        self.handovers = None
        if join is not None:
            self.handovers = join(number, self.name, self._act, self._start_over)
        self._build()
        self.longest = config.engine.max_model_len or config.engine.capacity_tokens
        """Tokens of prompt and answer together."""
        self._attach()

    def _build(self) -> None:
        """Make a new engine, with nothing cached."""
        config, faults = self.config, self.faults
        own_seed = config.hash_seed is None or faults.hash_seed
        seed = f"kvyard-mock-{config.seed}-{self.number}" if own_seed else config.hash_seed
        self._algorithm = algorithm(config.hash_algorithm, seed=seed)
        blocks = max(1, int(config.engine.num_gpu_blocks * faults.pool_share))
        self.cores = []
        for rank in range(config.dp_size):
            batcher = None
            if config.events_endpoint is not None:
                batcher = Batcher(
                    [spec.meta for spec in config.engine.block_groups],
                    stream=self.name,
                    rank=rank,
                    with_tokens=True,
                    snapshot=partial(_everything, self.cores, rank),
                )
            self.cores.append(
                make_core(
                    msgspec.structs.replace(
                        config.engine,
                        role=self.role,
                        num_gpu_blocks=blocks,
                        tiers=as_loaded(faults, config.engine.tiers),
                    ),
                    name=f"{self.name}@{rank}",
                    batcher=batcher,
                    plans=False,
                    ranks=config.dp_size,
                    peer=self.handovers,
                )
            )
        manager = self.cores[0].scheduler.manager
        self.block_size = manager.geometry.hash_block_size
        self.engine = Ranks(self.cores)

    def _attach(self) -> None:
        """Have the engine watched."""
        self.loras = {lora.name: lora for lora in self.config.loras}
        self.watchers = []
        self.measures = MockMetrics(self, self.config.served_model_name, self.longest)
        for rank, core in enumerate(self.cores):
            watcher = MockRankWatcher(
                rank, RankMeasures(self.measures, rank), self.tally, partial(self._announce, rank)
            )
            watcher.core = core
            watcher.handovers = self.handovers
            core.watcher = watcher
            self.watchers.append(watcher)

    # -- life -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the event streams and let time pass. Raises ``KvyardError``, with nothing left open, if that fails."""
        config = self.config
        self.driver = EngineDriver(
            self.engine,
            self._clock,
            config.speed,
            settled=self._settle,
            lagged=self.measures.lagged,
            failed=self.broken.put_nowait,
            journal=self._journal or (lambda stamp, what, job, rank: None),
        )
        if config.events_endpoint is not None:
            try:
                for rank, core in enumerate(self.cores):
                    assert isinstance(core.batcher, Batcher)
                    self.publishers.append(await self._publisher(rank, core.batcher))
            except BaseException:
                self._close_streams()
                raise
        self.streams = [
            EventStream(
                rank=publisher.rank,
                endpoint=reachable(publisher.endpoint),
                replay_endpoint=None if publisher.replay_endpoint is None else reachable(publisher.replay_endpoint),
            )
            for publisher in self.publishers
        ]
        self.alive = True

    async def _publisher(self, rank: int, batcher: Batcher) -> Publisher:
        config = self.config
        assert config.events_endpoint is not None
        endpoint, replay = config.endpoint_of(config.events_endpoint, self.number), config.replay_endpoint
        replay = None if replay is None else config.endpoint_of(replay, self.number)
        if rank in self._places:
            endpoint, replay = self._places[rank]
        open_publisher = partial(self._open_publisher, rank, batcher, endpoint, replay)
        publisher = await patiently(open_publisher) if self.deaths else open_publisher()
        again = publisher.replay_endpoint
        self._places[rank] = (_base(publisher.endpoint, rank), None if again is None else _base(again, rank))
        return publisher

    def _open_publisher(self, rank: int, batcher: Batcher, endpoint: str, replay: str | None) -> Publisher:
        config = self.config
        publisher = Publisher(
            endpoint,
            batcher.resync,
            replay=replay,
            topic=config.topic.replace("{worker}", self.name),
            rank=rank,
            bind=not config.events_connect,
            buffer_steps=config.buffer_steps,
        )
        publisher.withhold = self._withheld
        publisher.start()
        return publisher

    def stop(self) -> None:
        """End in order: requests that are left are given up, events go out, streams close."""
        if self.alive:
            self.alive = False
            self._break("the server is shutting down")
            self.driver.stop()
        self._close_streams()

    def die(self) -> None:
        """End as in a crash: no client is notified, and all that was cached is gone."""
        self.deaths += 1
        self.stop()
        if self.handovers is not None:
            self.handovers.forget()
        self._build()
        self._attach()

    def _break(self, why: str) -> None:
        for watcher in self.watchers:
            for choice in watcher.choices.values():
                choice.flow.broken = why
                choice.flow.tell()
            self.tally.failed += len(watcher.choices)
            watcher.choices.clear()

    def _close_streams(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self.publishers = []

    # -- requests -------------------------------------------------------------------------------------------------------

    @property
    def stalled(self) -> bool:
        """Return true if the engine was stopped by ``stall``."""
        return self.alive and self.driver.frozen

    @property
    def load(self) -> int:
        """Choices that wait or run."""
        return sum(len(watcher.choices) for watcher in self.watchers)

    @property
    def waiting(self) -> int:
        """Choices that wait."""
        return self.load - sum(len(core.scheduler.running) for core in self.cores)

    def choose_rank(self) -> int:
        """Return the rank with the least to do, the first of equals."""

        def weight(rank: int) -> int:
            running = len(self.cores[rank].scheduler.running)
            return WAITING_COUNTS * max(0, len(self.watchers[rank].choices) - running) + running

        return min(range(len(self.cores)), key=weight)

    async def hash_in_turns(self, prompt: Sequence[int], namespace: Namespace) -> TokenChain:
        """Hash a long prompt, ``TURN`` tokens at a time."""
        chain = TokenChain(prompt[:TURN], self.block_size, self._algorithm, namespace)
        for start in range(TURN, len(prompt), TURN):
            await pause()
            chain.append(prompt[start : start + TURN])
        await pause()
        return chain

    def make_job(
        self,
        name: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        namespace: Namespace,
        priority: int = 0,
        hints: Hints = NO_HINTS,
        chain: TokenChain | None = None,
    ) -> Job:
        """Return a job for this worker's engine that will produce ``answer``; ``chain`` if the prompt is hashed already.
        Nothing is submitted.
        """
        return Job(
            name,
            TokenChain(prompt, self.block_size, self._algorithm, namespace) if chain is None else chain,
            len(answer),
            priority=priority,
            hints=heeded(hints, self.cores[0].scheduler.manager),
            facts=RequestFacts(tenant=namespace.salt) if namespace.salt else NO_FACTS,
            sample=lambda start, stop: answer[start:stop],
        )

    def submit(
        self,
        flow: RequestFlow,
        prompt: Sequence[int],
        answer: MadeAnswer,
        namespace: Namespace,
        *,
        rank: int,
        priority: int = 0,
        hints: Hints = NO_HINTS,
        request: str = "",
        keep: str | None = None,
        incoming: IncomingPrompt | None = None,
        chain: TokenChain | None = None,
    ) -> MockChoice:
        """Hand one choice to a rank; it arrives now. ``request`` is the caller's name for it, which its job's id ends in. Its
        prompt is kept under the name ``keep`` for another worker, or is ``incoming`` from one; ``chain`` if it is hashed
        already.
        """
        self._serial += 1
        self.tally.came += 1
        name = f"{self.name}-{self._serial} {request}" if request else f"{self.name}-{self._serial}"
        received, space = as_received(self.faults, prompt, namespace, self._serial)
        if received is not prompt or space is not namespace:
            chain = None  # another prompt than the one that was hashed
        job = self.make_job(name, received, answer.ids, space, priority, hints, chain)
        if self.handovers is not None and keep is not None:
            self.handovers.keep(job, keep)
        if self.handovers is not None and incoming is not None:
            self.handovers.expect(job, rank, incoming)
        choice = MockChoice(len(flow.choices), job, answer, rank, flow)
        flow.choices.append(choice)
        self.watchers[rank].choices[job.id] = choice
        choice.arrival = self.driver.submit(job, rank)
        return choice

    def _act(self, what: str, job: Job, rank: int, time: int | None) -> None:
        """Pass an action on a hand-over to the engine."""
        if self.alive:
            self.driver.act(what, job, rank, time)

    def _start_over(self, prompt: IncomingPrompt) -> None:
        """Compute a prompt here that will not arrive, or cancel its request."""
        job, rank = prompt.job, prompt.rank
        assert job is not None
        choice = self.watchers[rank].choices.pop(job.id, None)
        self._act("withdraw", job, rank, None)
        if choice is None or not self.alive:
            return
        if self.config.kv_load_failure_policy == "fail":
            self.tally.failed += 1
            choice.flow.broken = "the prompt could not be had from the engine that computed it"
            choice.flow.tell()
            return
        self._serial += 1
        _, space, request = job.id.partition(" ")
        prompt_ids = list(job.chain.tokens[: job.num_prompt_tokens])  # type: ignore[union-attr]
        name = f"{self.name}-{self._serial}{space}{request}"
        choice.job = self.make_job(name, prompt_ids, choice.answer.ids, job.chain.namespace, job.priority, job.hints)
        self.watchers[rank].choices[choice.job.id] = choice
        self.driver.submit(choice.job, rank)

    def give_up(self, flow: RequestFlow) -> None:
        """Cancel what is left of a flow whose client disconnected."""
        if self.alive:
            for choice in flow.choices:
                if choice.ended < 0:
                    self.driver.cancel(choice.job, choice.rank)

    def reset(self) -> asyncio.Future[bool]:
        """Evict everything cached on the device, unless a request uses it; the result is true if it was."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def action(now: int) -> None:
            was = all([core.scheduler.manager.reset() for core in self.cores])
            if not done.done():
                done.set_result(was)

        self.driver.receive(action)
        return done

    def end_session(self, session: str) -> asyncio.Future[int]:
        """Evict blocks that only ``session`` has used first from now on; the result is their number."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def action(now: int) -> None:
            count = 0
            for core in self.cores:
                count += core.scheduler.manager.end_session(session)
                if core.offload is not None:
                    count += core.offload.end_session(session)
            if not done.done():
                done.set_result(count)

        self.driver.receive(action)
        return done

    def stall(self, seconds: float) -> None:
        """Let the engine stand still for this many real seconds."""
        driver = self.driver
        driver.freeze()
        asyncio.get_running_loop().call_later(seconds, driver.thaw)

    def _settle(self) -> None:
        for watcher in self.watchers:
            if watcher.news:
                watcher.settle()

    # -- events ---------------------------------------------------------------------------------------------------------

    def _announce(self, rank: int, batch: EventBatch, now: int) -> None:
        faults = self.faults
        if not self.publishers or faults.events_off:
            return
        if faults.never_removes or faults.never_clears or faults.wrong_tier or faults.repeat_events:
            batch = msgspec.structs.replace(batch, events=as_published(faults, batch.events))
        sender = self.neighbour if faults.crossed_events and self.neighbour is not None else self
        if sender.publishers:
            sender.publishers[rank].publish(batch, now)

    def _withheld(self, batch: EventBatch) -> bool:
        rank = batch.rank or 0
        withheld = is_lost(self.faults, f"{self.config.seed} {self.name}@{rank} {self.deaths}", batch.seq)
        self.measures.announced(rank, withheld)
        stream = self.tally.streams[rank]
        stream.seq, stream.at = batch.seq, self._clock.now()
        if withheld:
            stream.withheld += 1
        else:
            stream.sent += 1
        return withheld

    def seen(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.measures.seen(path, status, seconds)
        self.tally.answered(path, status)


def _base(endpoint: str, rank: int) -> str:
    """Return the endpoint of rank 0 that goes with ``endpoint`` of ``rank``."""
    if endpoint.startswith("tcp://"):
        host, port = split_tcp(endpoint)
        return f"tcp://{host}:{port - rank}"
    return endpoint.removesuffix(f"_dp{rank}")


def _everything(cores: Sequence[EngineCore], rank: int) -> list[tuple[int, Tier, list[Run]]]:
    """Return the contents of a rank's tiers, for a batcher that must announce them again."""
    return cores[rank].snapshot()
