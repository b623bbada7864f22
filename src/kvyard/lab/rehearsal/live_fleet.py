"""The stage: a mock fleet and a gateway in front of it, on this event loop, with real HTTP and ZeroMQ between them.

It is what ``kvyard mock`` and ``kvyard gateway`` run, made from the settings of a replay. With ``recorded`` it writes down what
a repetition in virtual time needs.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvyard.clock import pause
from kvyard.engine.job import Job
from kvyard.engine.watcher import Watcher
from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import reachable
from kvyard.lab.rehearsal.log import (
    EngineAction,
    EngineLog,
    LiveRecording,
    TransferAction,
    network_lines,
    transfer_facts,
    whole_log,
)
from kvyard.replay.config import ReplayConfig
from kvyard.router import RouterConfig
from kvyard.router.flow import FLOWS, FlowConfig
from kvyard.router.journal import Entry, read_journal
from kvyard.server.gateway.config import Disaggregation, GatewayConfig, GatewayEngine
from kvyard.server.http import Bounds
from kvyard.server.indexer.config import Patience
from kvyard.server.mock.config import MockConfig
from kvyard.server.mock.driver import Journal
from kvyard.server.mock.fleet import MockFleet
from kvyard.server.mock.incoming import IncomingPrompt
from kvyard.server.running import AsyncService, HttpServer, listen

ANY = "tcp://127.0.0.1:0"
MOST = 1 << 20
LOOK = 0.02
"""Seconds between two looks at whether something is so."""
PATIENT = Patience(reply_ms=20_000)
"""All parts share one loop here: an answer that takes long is no sign of a loss."""
TIMES = ("predicted_ttl_s", "approx_ttl_s", "session_ttl_s", "forget_after_s")
"""Settings of a router that are times."""
TOLD = [name for name, value in vars(Watcher).items() if callable(value) and not name.startswith("_")]
"""Reports that a watcher receives."""


class LiveFleet(AsyncService):
    """Use it in an ``async with`` block; then requests are answered at ``url``."""

    def __init__(self, config: ReplayConfig, *, speed: float = 1.0, recorded: bool = False) -> None:
        """Binds ports, starts nothing. Raises ``KvyardError`` for what a live fleet can't be."""
        self.config = config
        self.fleet_config = fleet_config(config, speed)
        self._actions: list[list[EngineAction]] = [[] for _ in range(self.fleet_config.workers)]
        self.fleet = MockFleet(self.fleet_config, journal=self._keep_actions if recorded else None)
        self.clock = self.fleet.clock
        """The engines' nominal time."""
        self._transfers: list[TransferAction] = []
        self._network: list[tuple[int, str, str, dict[str, object]]] = []
        if recorded and self.fleet.handovers is not None:
            self.fleet.handovers.network.journal = self._keep_transfer
        self.logs: list[list[EngineLog]] = []
        self._recorded = recorded
        self._entries: list[Entry] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.gateway: Any = None
        self._port: HttpServer | None = None
        if recorded:
            for worker in self.fleet.workers:
                self.logs.append([EngineLog() for _ in worker.cores])
                for core, watcher, log in zip(worker.cores, worker.watchers, self.logs[-1], strict=True):
                    core.watcher = Both(log, watcher)

    @property
    def url(self) -> str:
        """Return the gateway's address."""
        assert self._port is not None
        return self._port.url

    def _keep_actions(self, number: int) -> Journal:
        actions = self._actions[number]

        def keep(stamp: int, what: str, job: Job, rank: int) -> None:
            end = self.fleet.workers[number].handovers
            prompt = None if end is None else end.incoming.get(job.id)
            source = -1 if prompt is None or prompt.source.number is None else prompt.source.number
            actions.append(EngineAction.of(stamp, what, job, rank, source))

        return keep

    def _keep_transfer(self, stamp: int, what: str, prompt: IncomingPrompt, amount: int) -> None:
        assert prompt.job is not None and prompt.source.number is not None
        name, source, target = prompt.job.id, prompt.source.number, prompt.target
        if what != "landed":
            self._transfers.append(TransferAction(stamp, what, name, source, target))
        self._network.append((stamp, what, name, transfer_facts(what, source, target, amount)))

    async def start(self) -> None:
        from kvyard.server.gateway.routes import build

        await self.fleet.start()
        journal = None
        if self._recorded:
            self._directory = tempfile.TemporaryDirectory(prefix="kvyard-")
            journal = str(Path(self._directory.name) / "journal.jsonl")
        self.gateway_config = self._configure(journal)
        app, self.gateway = build(self.gateway_config)
        await self.gateway.start()
        self._port = HttpServer(app, listen("127.0.0.1", 0), drain_seconds=1.0)
        await self._port.start()
        while not self._ready():
            await pause(LOOK)

    async def stop(self) -> None:
        gateway, port = self.gateway, self._port
        if gateway is not None:
            gateway.drain()
        if port is not None:
            port.hurry()
            await port.stop()
        if gateway is not None:
            await gateway.stop()
        for each in self.fleet.ports:
            each.hurry()
        await self.fleet.stop()
        if self._directory is not None:
            if port is not None:
                self._entries = list(read_journal(str(self.gateway_config.journal)))
            self._directory.cleanup()

    def _configure(self, journal: str | None) -> GatewayConfig:
        config, speed = self.config, self.fleet_config.speed
        engines = []
        for worker, url in zip(self.fleet.workers, self.fleet.urls, strict=True):
            streams = worker.publishers
            engines.append(
                GatewayEngine(
                    url=url,
                    name=worker.name,
                    model=self.fleet_config.served_model_name,
                    events=[reachable(stream.endpoint) for stream in streams],
                    replay=[
                        reachable(stream.replay_endpoint) for stream in streams if stream.replay_endpoint is not None
                    ],
                    block_size=worker.block_size,
                    dp_size=self.fleet_config.dp_size,
                    role=worker.role,
                )
            )
        return GatewayConfig(
            port=0,
            engines=engines,
            router=in_real_time(config.router, speed),
            disaggregation=Disaggregation(
                decider=config.handover.decider,
                decider_options=config.handover.decider_options,
                decode_router=None if config.decode_router is None else in_real_time(config.decode_router, speed),
            ),
            seed=config.seed,
            tokenizer="bytes",
            streams=PATIENT,
            engine_requests=config.engine_requests or MOST,
            queue=config.queue or MOST,
            flow=flow_in_real_time(config.flow, speed),
            queue_seconds=86_400.0,
            down_seconds=86_400.0,
            silent_seconds=86_400.0,
            connect_seconds=60.0,
            health_timeout=60.0,
            unhealthy_after=100,
            limits=Bounds(body_seconds=600.0, body_bytes=64 << 20),
            journal=journal,
        )

    def _ready(self) -> bool:
        """Return true if every engine gets requests and its events are received."""
        gateway = self.gateway
        return all(
            engine.state == "ready"
            and all(listener.status == "active" for listener in gateway.members.listeners(engine))
            for engine in gateway.members.engines.values()
        )

    async def rest(self) -> None:
        """Wait until every engine is idle: transfers to lower tiers and other workers have landed."""
        handovers = self.fleet.handovers
        while any(worker.engine.next_decision() is not None for worker in self.fleet.workers) or (
            handovers is not None and not handovers.idle
        ):
            await pause(LOOK)

    def recording(self) -> LiveRecording:
        """Return the run's recording, once all was idle and the stage is left. Raises ``KvyardError`` if nothing was
        recorded.
        """
        entries = self._entries
        if not entries:
            raise KvyardError("nothing was recorded: make the stage with recorded=True, and ask once it is left")
        every = [log for logs in self.logs for log in logs]
        return LiveRecording(
            fleet=self.fleet_config,
            gateway=self.gateway_config,
            entries=entries,
            actions=[list(actions) for actions in self._actions],
            answers={name: answer for log in every for name, answer in log.answers.items()},
            transfers=list(self._transfers),
            log=whole_log(
                entries,
                {worker.name: logs for worker, logs in zip(self.fleet.workers, self.logs, strict=False)},
                network_lines(self._network),
            ),
            first={name: instant for log in every for name, instant in log.first.items()},
            last={name: instant for log in every for name, instant in log.last.items()},
        )


def fleet_config(config: ReplayConfig, speed: float) -> MockConfig:
    """Return the mock fleet that a replay describes. Raises ``KvyardError``, naming the setting, for what only a simulation can
    do.
    """
    kind = config.workers[0]
    plain = [replace(kind, engine=replace(kind.engine, role="both"), count=1, name="w") for kind in config.workers]
    counts = {kind.engine.role: kind.count for kind in config.workers}
    if (
        any(kind != plain[0] for kind in plain)
        or len(counts) != len(config.workers)
        or (len(counts) > 1 and "both" in counts)
    ):
        raise KvyardError(
            "--live self runs workers that are equal but for their roles: leave the tables of workers out"
        )
    for name in ("start", "drain", "fail"):
        if getattr(kind, name):
            raise KvyardError(f"--live self has all workers from beginning to end: leave {name} out")
    if config.disaggregated and config.handover.protocol != "source-first":
        raise KvyardError("--live self hands prompts over as vLLM does: leave protocol out")
    if config.event_lag:
        raise KvyardError("--live self has the lag that its sockets have: leave event_lag out")
    if config.digest_every or config.digest_error:
        raise KvyardError("--live self follows events: leave digest_every and digest_error out")
    mock_config = MockConfig(
        engine=plain[0].engine,
        workers=kind.count,
        prefill=counts.get("prefill", 0),
        decode=counts.get("decode", 0),
        handover=config.handover,
        dp_size=kind.dp_size,
        speed=speed,
        events_endpoint=ANY,
        replay_endpoint=ANY,
        max_waiting=MOST,
        seed=config.seed,
        drain_seconds=1.0,
        limits=Bounds(body_seconds=600.0, body_bytes=64 << 20),
    )
    mock_config.check()
    return mock_config


def in_real_time(config: RouterConfig, speed: float) -> RouterConfig:
    """Return a router's settings for a gateway: it lives in real time, however fast its engines' passes."""
    times = {name: getattr(config, name) / speed for name in TIMES if getattr(config, name)}
    return replace(config, **times)


def flow_in_real_time(config: FlowConfig, speed: float) -> FlowConfig:
    """Flow control's settings for a gateway, likewise: options that are times are those whose names end in their unit."""
    options = FLOWS.resolve(config.policy, config.options)
    timed = {name: value / speed for name, value in options.items() if name.endswith(("_s", "_ms", "_us", "seconds"))}
    return replace(config, options={**config.options, **timed}, patience_s=config.patience_s / speed)


class Both(Watcher):
    """Two watchers of one rank, called in this order."""

    def __init__(self, first: Watcher, second: Watcher) -> None:
        self.first = first
        self.second = second
        self.wants_tokens = first.wants_tokens or second.wants_tokens


def _tell_both(name: str) -> Callable[..., None]:
    def tell(self: Both, *what: Any) -> None:
        getattr(self.first, name)(*what)
        getattr(self.second, name)(*what)

    return tell


for hook in TOLD:
    setattr(Both, hook, _tell_both(hook))
