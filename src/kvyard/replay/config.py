"""Description of a replay as people write it: a fleet, its routing, and how the trace is driven. Values only."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvyard.clock import SECOND
from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError, suggest
from kvyard.replay.clients import CLIENTS, make_client
from kvyard.replay.clients.client import Client, Pacing
from kvyard.replay.scaling import SCALERS, make_scaler
from kvyard.replay.traces.hinting import parse_hints
from kvyard.replay.warm_up import NO_WARM_UP, WarmUp, parse_warm_up
from kvyard.router import RouterConfig
from kvyard.router.deciders import DECIDERS, make_decider
from kvyard.router.flow import FlowConfig
from kvyard.router.pair import router_pair
from kvyard.router.policies import make_policy
from kvyard.settings import Setting, as_it_is, bandwidth, chosen, count, duration, figures, flag, number, settings_of

FLEET = "Fleet"
"""Heading of settings about workers, in a command's help."""
ROUTER = RouterConfig.heading

LEFT_OUT = {
    "disaggregation_mode": "say prefill and decode, how many workers of each role there are, or role in a table of workers",
    "autoscaling": "say autoscale, as in autoscale=threshold:ttft_p99=1s,min=2,max=16,startup=90s",
    "planner": "say autoscale, as in autoscale=predictive:min=2,max=16,startup=90s",
}
"""Settings that this replay refuses by name."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers of one kind."""

    heading: ClassVar[str] = FLEET
    engine: EngineConfig = EngineConfig()
    count: Annotated[int, Setting("Number of these workers.")] = 1
    dp_size: Annotated[
        int, Setting("Data-parallel ranks of each worker.", also=("data_parallel_size", "dp", "-dp"), flag=True)
    ] = 1
    """Ranks start every pass together."""
    name: Annotated[str, Setting("Prefix of these workers' names.")] = "w"
    start: Annotated[int, Setting("When they begin to take requests.", parse=duration)] = 0
    """In ns, as are the others."""
    drain: Annotated[int | None, Setting("When they stop taking new requests.", parse=duration)] = None
    fail: Annotated[int | None, Setting("When they fail.", parse=duration)] = None
    """Their contents are lost, and their requests are routed again."""

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        if self.count < 1 or self.dp_size < 1:
            raise KvyardError(f"workers {self.name!r}: count and dp_size must be at least 1")
        if self.start < 0:
            raise KvyardError(f"workers {self.name!r} can't start before the replay does, at {self.start} ns")
        for key in ("drain", "fail"):
            when = getattr(self, key)
            if when is not None and when <= self.start:
                raise KvyardError(f"workers {self.name!r} {key} at {when} ns, before they start at {self.start}")
        self.engine.check()


MOST_RANKS = 100_000
"""Most ranks of all workers together: each takes some memory before anything is replayed."""
NICS: Mapping[str, tuple[int | None, int]] = {
    "cx7": (50 * 10**9, 10_000),
    "nvlink": (450 * 10**9, 10_000),
    "pcie5": (55 * 10**9, 10_000),
    "none": (None, 0),
}
"""Networks between workers by name: bytes per second each way, and nanoseconds until the first byte.

``cx7`` is 400 Gbit/s for each GPU, ``nvlink`` that of an H200; both bandwidths and the latency are those of AIConfigurator's
system files. ``pcie5`` is what an H200 was measured at here (benchmarks/RESULTS-accuracy.md). ``none`` takes no time.
"""


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between workers, for hand-overs and pulls."""

    heading: ClassVar[str] = "The network between workers"
    nic: Annotated[str, Setting("Network port of a worker: {choices}.", flag=True, choices=NICS.keys)] = "cx7"
    nic_bandwidth: Annotated[
        tuple[int | None, int | None] | None,
        Setting("GB/s out of a worker and into it. [default: the nic's]", flag=True, parse=bandwidth),
    ] = None
    nic_latency: Annotated[
        int | None, Setting("Time until the first byte of a transfer. [default: the nic's]", parse=duration)
    ] = None
    node_bandwidth: Annotated[
        tuple[int | None, int | None] | None,
        Setting("GB/s out of a node and into it, shared by its workers.", parse=bandwidth),
    ] = None
    workers_per_node: Annotated[int, Setting("Workers of a node, in the order of the fleet.")] = 8
    bus_bandwidth: Annotated[
        tuple[int | None, int | None] | None,
        Setting(
            "GB/s of a device's bus, out and in, shared by offloading, hand-overs and pulls. [default: no shared bus]",
            parse=bandwidth,
        ),
    ] = None
    contention: Annotated[
        bool, Setting("Transfers share the network. Off: each has it to itself, as in Dynamo's replay.")
    ] = True

    @property
    def bandwidth(self) -> tuple[int | None, int | None]:
        """Bytes per second out of a worker and into it."""
        speed = NICS[self.nic][0]
        return self.nic_bandwidth or (speed, speed)

    @property
    def latency(self) -> int:
        """Nanoseconds until the first byte of a transfer."""
        return NICS[self.nic][1] if self.nic_latency is None else self.nic_latency

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        if self.nic not in NICS:
            raise KvyardError(f"unknown nic {self.nic!r}: {suggest(self.nic, NICS)}")
        if self.workers_per_node < 1:
            raise KvyardError(f"workers_per_node must be at least 1, got {self.workers_per_node}")
        if self.bus_bandwidth is not None and not self.contention:
            raise KvyardError("bus_bandwidth is what transfers share: leave it out, or leave contention on")


class HandoverConfig(NetworkConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfer of prompts from prefill to decode workers."""

    heading: ClassVar[str] = "Prefill and decode apart"
    decider: Annotated[
        str,
        Setting(
            "Split policy, which decides which prompts are handed over: {choices}.", flag=True, choices=DECIDERS.names
        ),
    ] = "always"
    decider_options: Annotated[
        dict[str, float],
        Setting("Options of that split policy, as NAME=VALUE,... .", parse=figures, options=DECIDERS),
    ] = msgspec.field(default_factory=dict)
    protocol: Annotated[
        Literal["source-first", "destination-first"],
        Setting("Choose the decode worker after the prompt is computed, or before: {choices}."),
    ] = "source-first"
    second_front_end: Annotated[
        bool,
        Setting(
            "With source-first: a handed-over prompt passes the decode worker's front end as a new request, as with llm-d's "
            "sidecar and vLLM's router. Off: as in Dynamo."
        ),
    ] = True
    streamed: Annotated[float, Setting("Share of a prompt that is sent layer by layer while it is computed.")] = 0.0
    """The rest goes when it is done."""
    sends: Annotated[
        Literal["missing", "prompt"],
        Setting("Send the blocks that the decode worker lacks, or the whole prompt: {choices}."),
    ] = "missing"
    reserves: Annotated[
        Literal["all", "one"],
        Setting(
            "Handed-over prompts that a decode worker reserves blocks for per pass: {choices}. all: as many as fit, as in "
            "vLLM. one: one, and one more per prompt that arrived since the last pass, as in Dynamo's replay."
        ),
    ] = "all"

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        make_decider(self.decider, self.decider_options)
        super().check()
        if not 0 <= self.streamed <= 1:
            raise KvyardError(f"streamed is a share from 0 to 1, got {self.streamed}")

    def sent_bytes(self, tokens: int, blocks: int, block_bytes: int, block_size: int) -> int:
        """Return the bytes that are sent when a prompt is computed, of ``tokens`` that fill ``blocks``."""
        whole = tokens * block_bytes // block_size if self.sends == "prompt" else blocks * block_bytes
        return whole - int(whole * self.streamed)


class PullConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfer of prefixes that other workers have."""

    source: str = "host"
    """Tier it is read from: the other's ``host`` tier, or its ``device``."""
    min_lead: int = 1024
    """Tokens that the other must have beyond this worker's own."""
    tolerance: int = 1
    """Blocks by which a source may be behind the best one, if it has less to do."""
    in_flight: int = 8
    """Pulls into one worker at a time; beyond that, prompts are computed."""

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        if self.source not in ("host", "device"):
            raise KvyardError(f"peer_pull reads from host or device, not from {self.source!r}")
        for key, least in (("min_lead", 1), ("tolerance", 0), ("in_flight", 1)):
            if getattr(self, key) < least:
                raise KvyardError(f"peer_pull: {key} must be at least {least}, got {getattr(self, key)}")


def read_pull(name: str, value: object) -> PullConfig | None:
    """Return ``host`` or ``device``, then ``:NAME=VALUE,...``; or a table with ``source`` and the same names. ``off`` for none.
    Raises ``KvyardError`` for anything else.
    """
    if value is True:
        value = "host"
    if value is False or value == "off":
        return None
    if isinstance(value, str):
        head, _, rest = value.partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair.strip()]
        value = {"source": head.strip(), **{key.strip(): worth.strip() for key, _, worth in pairs}}
    if not isinstance(value, Mapping):
        raise KvyardError(f"{name} is {value!r}: write host or device, such as host:min_lead=1024,in_flight=8")
    fields: dict[str, Any] = {}
    for key, worth in value.items():
        if key == "source":
            fields[key] = str(worth)
        elif key in PullConfig.__struct_fields__:
            fields[key] = count(f"{name}, {key}", worth)
        else:
            known = ", ".join(field for field in PullConfig.__struct_fields__ if field != "source")
            raise KvyardError(f"{name} has no {key!r}: it has {known}")
    pull = PullConfig(**fields)
    pull.check()
    return pull


class AutoscaleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start and stop of workers by load. Times are nanoseconds."""

    policy: str = "threshold"
    options: dict[str, float] = msgspec.field(default_factory=dict)
    """Figures of that policy alone."""
    least: int = 1
    """Workers of each role, at least."""
    most: int = 16
    startup: int = 60 * SECOND
    """From asking for a worker until it takes requests."""
    period: int = 10 * SECOND
    """Interval between two decisions of the scaling policy."""
    warm: bool = False
    """True if a stopped worker still has its caches when it is started again."""
    moves: bool = True
    """True if requests that wait at a worker which is stopped are routed again."""

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        make_scaler(self.policy, self.options)
        if not 1 <= self.least <= self.most:
            raise KvyardError(f"autoscale: min must be at least 1 and at most max, got {self.least} and {self.most}")
        if self.startup < 0 or self.period < 1:
            raise KvyardError("autoscale: startup must not be negative, and period must be more than nothing")


def read_autoscale(name: str, value: object) -> AutoscaleConfig:
    """``POLICY:NAME=VALUE,...``, or a table with ``policy`` and the same names. Raises ``KvyardError`` for anything else."""
    if isinstance(value, str):
        head, _, rest = value.rpartition(":") if value.count(":") > 1 or "=" in value else (value, "", "")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair.strip()]
        value = {"policy": head, **{key.strip(): worth.strip() for key, _, worth in pairs}}
    if not isinstance(value, Mapping):
        raise KvyardError(
            f"{name} is {value!r}: write POLICY:NAME=VALUE,..., such as threshold:ttft_p99=1s,min=2,max=16"
        )
    fields: dict[str, Any] = {"options": {}}
    for key, worth in value.items():
        where = f"{name}, {key}"
        if key in ("min", "max"):
            fields["least" if key == "min" else "most"] = count(where, worth)
        elif key in ("startup", "period"):
            fields[key] = duration(where, worth)
        elif key in ("warm", "moves"):
            fields[key] = flag(where, worth)
        elif key == "policy":
            fields[key] = str(worth)
        else:
            # Figures of a policy: plain numbers, and times in seconds.
            timed = isinstance(worth, str) and worth.strip()[-1:].isalpha()
            fields["options"][key] = duration(where, worth) / SECOND if timed else number(where, worth)
    autoscale = AutoscaleConfig(**fields)
    autoscale.check()
    return autoscale


def _router(name: str, value: object) -> RouterConfig:
    if isinstance(value, str):
        return RouterConfig(policy=value)
    if isinstance(value, Mapping):
        return RouterConfig(**chosen(RouterConfig, settings_of(RouterConfig).parse(value, f" of {name}")))
    raise KvyardError(f"{name} is {value!r}: write the name of a routing policy, or a table of a router's settings")


def read_warm_up(name: str, value: object) -> str:
    """Return a number of requests, a time or the name of a file, as text. Raises ``KvyardError`` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise KvyardError(f"{name} is {value!r}: write a number of requests, a time such as 5m, or the name of a trace")
    return value


class DrivingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Driving of a trace, simulated or live."""

    heading: ClassVar[str] = "Traffic"
    speedup: Annotated[float, Setting("Divide gaps between arrivals, and think times, by this.", flag=True)] = 1.0
    """Compute stays as it is."""
    jitter: Annotated[
        int,
        Setting("Spread arrivals with equal time stamps over up to this time, such as 3s.", flag=True, parse=duration),
    ] = 0
    concurrency: Annotated[
        int | None,
        Setting("Closed loop: sessions (or requests) in flight. Recorded times are ignored.", flag=True),
    ] = None
    hints: Annotated[
        str | None,
        Setting(
            "Session hints, generated from the trace's future, such as session-end:recall=0.5,false=0.1.", flag=True
        ),
    ] = None
    """Engines heed them. ``heed_hints`` alone is for those that the trace has."""
    prefetch: Annotated[
        int,
        Setting(
            "Send a prompt that called a tool again this long before the tool ends, to load what was evicted; 0: never.",
            flag=True,
            parse=duration,
        ),
    ] = 0
    """It loads from lower tiers what the next turn needs on the device. These requests aren't counted."""
    limit: Annotated[int | None, Setting("Replay at most this many requests.", flag=True)] = None
    max_tokens: Annotated[
        int | None, Setting("Leave out requests with more tokens (prompt and answer).", flag=True)
    ] = None
    """Of the requests that ``limit`` takes."""
    seed: Annotated[int, Setting("Seed of random draws.", flag=True)] = 0

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        for key, most in (("limit", self.limit), ("max_tokens", self.max_tokens), ("concurrency", self.concurrency)):
            if most is not None and most < 1:
                raise KvyardError(f"{key} must be at least 1, got {most}")
        if not 0 < self.speedup < math.inf:
            raise KvyardError(f"speedup must be a number above 0, got {self.speedup}")
        if self.hints is not None:
            parse_hints(self.hints)
        if self.prefetch < 0:
            raise KvyardError(f"prefetch must not be negative, got {self.prefetch}")
        if self.jitter < 0:
            raise KvyardError(f"jitter must not be negative, got {self.jitter}")


class ReplayConfig(DrivingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole replay."""

    client: Annotated[
        str | None,
        Setting(
            "Send requests as this load generator does (pace, lengths, warm-up): {choices}.",
            flag=True,
            choices=CLIENTS.names,
        ),
    ] = None
    client_options: Annotated[
        dict[str, float],
        Setting("Options of that client, as NAME=VALUE,... .", parse=figures, options=CLIENTS),
    ] = msgspec.field(default_factory=dict)
    turnaround: Annotated[
        int | None,
        Setting(
            "Closed loop: time from an answer to the next request. [default: the client's; 7ms]",
            flag=True,
            parse=duration,
        ),
    ] = None
    warm_up: Annotated[
        str | None,
        Setting(
            "Warm the caches up, without counting it: the first REQUESTS, the first TIME (such as 5m), or another TRACE.",
            flag=True,
            parse=read_warm_up,
        ),
    ] = None
    workers: Annotated[
        tuple[WorkerConfig, ...],
        Setting(
            "Number of workers. [default: 8] In a file also a table per kind of worker.",
            flag=True,
            parse=as_it_is,
            heading=FLEET,
        ),
    ] = (WorkerConfig(),)
    router: RouterConfig = RouterConfig()
    """With workers of different roles, of those that compute prompts."""
    flow: FlowConfig = FlowConfig()
    """Orders the requests that ``engine_requests`` holds back."""
    engine_requests: Annotated[
        int | None,
        Setting(
            "Requests in flight per worker; others wait before the router. [default: no limit]",
            flag=True,
            heading=FlowConfig.heading,
        ),
    ] = None
    queue: Annotated[
        int | None,
        Setting(
            "Requests that wait before the router; others are refused. [default: no limit]",
            flag=True,
            heading=FlowConfig.heading,
        ),
    ] = None
    decode_router: Annotated[
        RouterConfig | None,
        Setting(
            "Routing policy among decode workers. [default: fewest blocks held]",
            flag=True,
            parse=_router,
            heading=HandoverConfig.heading,
        ),
    ] = None
    handover: HandoverConfig = HandoverConfig()
    """Its network is also the one of ``peer_pull``."""
    peer_pull: Annotated[
        PullConfig | None,
        Setting(
            "Pull prefixes that only another worker has from its host or device, as in host:min_lead=1024,in_flight=8.",
            flag=True,
            parse=read_pull,
            heading=FLEET,
        ),
    ] = None
    autoscale: Annotated[
        AutoscaleConfig | None,
        Setting(
            "Scaling policy: {choices} or module:Class, as in threshold:ttft_p99=1s,min=2,max=16,startup=90s.",
            flag=True,
            parse=read_autoscale,
            choices=SCALERS.names,
            heading=FLEET,
        ),
    ] = None
    render_token_us: Annotated[
        float,
        Setting("Microseconds per prompt token that a render service needs to tokenize a prompt before it is routed."),
    ] = 0.0
    renderers: Annotated[int, Setting("Prompts that the render service tokenizes at a time; 0: no limit.")] = 0
    event_lag: Annotated[
        int,
        Setting(
            "Delay of KV events on their way to the router, such as 50ms.", flag=True, parse=duration, heading=ROUTER
        ),
    ] = 0
    digest_every: Annotated[
        int,
        Setting(
            "Interval at which workers send the router digests of their caches, such as 10s; 0: events instead.",
            flag=True,
            parse=duration,
            heading=ROUTER,
        ),
    ] = 0
    digest_error: Annotated[
        float,
        Setting("Share of missing blocks that a digest reports as present, such as 0.01.", flag=True, heading=ROUTER),
    ] = 0.0
    """With 0 digests have full names, which are exact."""
    plans: Annotated[
        bool, Setting("Compute several equal passes in one step. Off: one by one, with equal results, as a check.")
    ] = True
    """Results are equal, and take longer."""
    samples: Annotated[int, Setting("Approximate number of points of the timeline.")] = 150

    @property
    def warmed_by(self) -> WarmUp:
        """Return the warm-up, whose requests aren't counted."""
        return NO_WARM_UP if self.warm_up is None else parse_warm_up(self.warm_up)

    @property
    def load_client(self) -> Client:
        """The client that sends the requests."""
        return make_client(self.client, self.client_options)

    @property
    def pacing(self) -> Pacing:
        """Return the client's pacing."""
        pacing = self.load_client.pacing(self.concurrency)
        return pacing if self.turnaround is None else pacing._replace(turnaround=self.turnaround)

    def made_of(self, kind: WorkerConfig) -> int:
        """Return the number of workers of ``kind`` that a fleet makes, including those that may come later."""
        return kind.count if self.autoscale is None else self.autoscale.most

    @property
    def depth(self) -> int:
        """Number of lower tiers of the workers that have the most."""
        return max(len(kind.engine.tiers.tiers) if kind.engine.tiers is not None else 0 for kind in self.workers)

    @property
    def disaggregated(self) -> bool:
        """Return true if prompts and answers may be computed by different workers."""
        return any(kind.engine.role != "both" for kind in self.workers)

    @property
    def routers(self) -> tuple[RouterConfig, ...]:
        """The router; with workers of different roles, that of those that compute prompts and that of those that decode."""
        if not self.disaggregated:
            return (self.router,)
        mixed = any(kind.engine.role == "both" for kind in self.workers)
        return router_pair(self.router, self.decode_router, mixed)

    def _check_autoscale(self, autoscale: AutoscaleConfig) -> None:
        autoscale.check()
        if self.warm_up is not None:
            raise KvyardError(
                "warm_up is not modelled with autoscale, whose costs count from the start: leave one of them out"
            )
        roles = [kind.engine.role for kind in self.workers]
        if len(set(roles)) < len(roles):
            raise KvyardError(
                "autoscale starts workers like those that are there: give one kind of workers for each role"
            )
        for kind in self.workers:
            if kind.start or kind.drain is not None or kind.fail is not None:
                raise KvyardError("autoscale says when workers come and go: leave out start, drain and fail")
            if not autoscale.least <= kind.count <= autoscale.most:
                raise KvyardError(
                    f"autoscale: {kind.count} workers {kind.name!r} at the start are not from min {autoscale.least} to "
                    f"max {autoscale.most}"
                )

    def _check_flow(self) -> None:
        for key in ("engine_requests", "queue"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise KvyardError(f"{key} must be at least 1, got {value}")
        if self.engine_requests is None:
            if self.queue is not None or self.flow != FlowConfig():
                raise KvyardError(
                    "flow control orders requests that wait before the router, and without engine_requests none waits: "
                    "set it too"
                )
        elif self.disaggregated:
            raise KvyardError(
                "engine_requests is not modelled with prefill and decode workers: leave it out, or the roles"
            )

    def _check_roles(self) -> None:
        self.handover.check()
        for role, does in (("prefill", "compute prompts"), ("decode", "decode")):
            if not any(kind.engine.role in (role, "both") and kind.start == 0 for kind in self.workers):
                raise KvyardError(f"no worker is there at the start to {does}: add one of role {role}, or both")
        first = self.workers[0].engine
        for kind in self.workers:
            if kind.engine.specs != first.specs:
                raise KvyardError("workers that hand prompts over must have the same attention groups and block sizes")
            if kind.engine.bytes_per_block is None:
                raise KvyardError(
                    "hand-overs need to know what a block takes: say model, or bytes_per_block beside groups"
                )

    def _check_pulls(self, pulls: PullConfig) -> None:
        pulls.check()
        self.handover.check()
        first = self.workers[0].engine
        for kind in self.workers:
            engine = kind.engine
            if engine.tiers is None:
                raise KvyardError("peer_pull lands in a worker's host tier: give host_blocks or host_bytes")
            if engine.tiers.shared:
                raise KvyardError("peer_pull is not modelled with shared tiers: make them private")
            if engine.specs != first.specs or engine.bytes_per_block != first.bytes_per_block:
                raise KvyardError("workers that pull from each other must have the same attention groups and blocks")
            assert first.tiers is not None
            if engine.tiers.blocks_per_chunk != first.tiers.blocks_per_chunk:
                raise KvyardError("workers that pull from each other must have the same blocks_per_chunk")
            if pulls.source == "device":
                if engine.tiers.blocks_per_chunk > 1:
                    raise KvyardError("peer_pull from a device reads single blocks: leave out blocks_per_chunk")
                if engine.decides_ahead or engine.speculative is not None:
                    raise KvyardError(
                        "peer_pull from a device is not modelled with async_scheduling and draft tokens: pull from host"
                    )

    def check(self) -> None:
        """Raise ``KvyardError`` for invalid settings."""
        super().check()
        self.warmed_by  # noqa: B018 - refuses what isn't a warm-up
        self.pacing  # noqa: B018 - refuses clients and options that there aren't
        if self.turnaround is not None and (self.turnaround < 0 or self.concurrency is None):
            raise KvyardError(
                "turnaround is for a closed loop, and can't be negative: say concurrency too, or leave it out"
            )
        if not self.workers:
            raise KvyardError("a fleet needs at least one worker")
        for kind in self.workers:
            kind.check()
        if all(kind.start > 0 for kind in self.workers):
            raise KvyardError("no worker is there at the start: let one start at 0")
        self._check_flow()
        if self.disaggregated:
            self._check_roles()
        if self.peer_pull is not None:
            self._check_pulls(self.peer_pull)
        if self.autoscale is not None:
            self._check_autoscale(self.autoscale)
        ranks = sum(self.made_of(kind) * kind.dp_size for kind in self.workers)
        if ranks > MOST_RANKS:
            raise KvyardError(f"a fleet has at most {MOST_RANKS:,} ranks in all, not {ranks:,}: give fewer workers")
        if self.samples < 2:
            raise KvyardError(f"samples must be at least 2, got {self.samples}")
        if self.render_token_us < 0 or self.renderers < 0:
            raise KvyardError("render_token_us and renderers must not be negative")
        if self.event_lag < 0:
            raise KvyardError(f"event_lag must not be negative, got {self.event_lag}")
        if self.digest_every < 0:
            raise KvyardError(f"digest_every must not be negative, got {self.digest_every}")
        if not 0 <= self.digest_error < 1:
            raise KvyardError(f"digest_error is a share from 0 to below 1, got {self.digest_error:g}")
        sizes = {min(spec.block_size for spec in kind.engine.specs) for kind in self.workers}
        policy = make_policy(self.router)
        if len(sizes) > 1 and (policy.needs_index or policy.memory is not None or self.peer_pull is not None):
            raise KvyardError(
                f"workers have block sizes {', '.join(map(str, sorted(sizes)))}: {self.router.policy} routing needs one"
            )
