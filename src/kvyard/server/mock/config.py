"""Description of a mock fleet as people write it. A value: it opens nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvyard.engine.config import EngineConfig
from kvyard.engine.role import Role
from kvyard.errors import KvyardError
from kvyard.events.tier import LOWER_TIERS
from kvyard.events.transport.endpoint import at_rank, split_tcp
from kvyard.hashing import ALGORITHMS
from kvyard.replay.config import HandoverConfig
from kvyard.replay.settings import OF_AN_ENGINE, engine_config
from kvyard.server.http import Bounds
from kvyard.server.mock.faults import MockFaults
from kvyard.settings import Setting, Settings, chosen, settings_of

DEFAULT_MODEL = "mock"
BLOCK_SIZE = 16
"""Default without a model: vLLM's."""
LONGEST = 32_768
"""Default context without a model; it fits into the default cache many times."""
MOST_RANKS = 10_000
"""Ranks of a fleet in one process, each with its scheduler and its cache."""


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter."""

    name: str
    path: str
    number: int = 1


class MockConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet of equal workers."""

    heading: ClassVar[str] = "Fleet and answers"
    engine: EngineConfig
    workers: Annotated[int, Setting("Number of workers, each with a port of its own.", flag=True)] = 1
    prefill: Annotated[
        int, Setting("Prefill workers, which hand computed prompts over.", also=("prefill_workers",), flag=True)
    ] = 0
    decode: Annotated[
        int,
        Setting(
            "Decode workers; instead of --workers. Prefill workers may be in another mock.",
            also=("decode_workers",),
            flag=True,
        ),
    ] = 0
    dp_size: Annotated[
        int,
        Setting(
            "Data-parallel ranks of each worker.", name="data_parallel_size", also=("dp_size", "dp", "-dp"), flag=True
        ),
    ] = 1
    served_model_name: Annotated[
        str, Setting("Name of the model in requests. [default: the preset's name, or mock]", flag=True)
    ] = DEFAULT_MODEL
    speed: Annotated[float, Setting("Speed relative to a real engine.", flag=True)] = 1.0
    """Nominal seconds that pass in a real one."""
    tokenizer: Annotated[str | None, Setting("A tokenizer.json. [default: every byte is a token]", flag=True)] = None
    hash_algorithm: Annotated[
        str, Setting("Algorithm of block hashes, as in vLLM: {choices}.", flag=True, choices=ALGORITHMS.keys)
    ] = "sha256_cbor"
    hash_seed: Annotated[
        str | None, Setting("PYTHONHASHSEED of all workers. [default: each has its own]", flag=True)
    ] = None
    """Each has its own so that a client that compares hashes of two workers finds out that it mustn't."""
    events_endpoint: Annotated[
        str | None,
        Setting(
            "Endpoint of KV events, such as tcp://*:5557. Further ranks and workers use the ports after it.",
            name="kv_events_endpoint",
            flag=True,
        ),
    ] = None
    """Of the first rank of the first worker. ``None``: nowhere."""
    replay_endpoint: Annotated[
        str | None, Setting("Endpoint that replays lost events.", name="kv_events_replay_endpoint", flag=True)
    ] = None
    events_connect: Annotated[
        bool,
        Setting(
            "Connect to the endpoint, which a router has bound, instead of binding it.",
            name="kv_events_connect",
            flag=True,
        ),
    ] = False
    topic: Annotated[
        str, Setting("Topic of KV events; {worker} stands for the worker's name.", name="kv_events_topic", flag=True)
    ] = ""
    buffer_steps: Annotated[int, Setting("Batches of events that each stream keeps for replay.")] = 10_000
    """vLLM's default."""
    mean_output_tokens: Annotated[int, Setting("Mean length of answers that end before their limit.", flag=True)] = 128
    tool_call_rate: Annotated[float, Setting("Share of requests with tool_choice auto that call a tool.")] = 0.5
    max_loras: Annotated[int, Setting("LoRA adapters that can be loaded at a time.", flag=True)] = 8
    loras: tuple[Lora, ...] = ()
    max_waiting: Annotated[int, Setting("Requests that may wait at a worker.", flag=True)] = 4096
    """More are answered with 503."""
    max_choices: Annotated[int, Setting("Most choices of one request, over all its prompts.")] = 64
    handover: HandoverConfig = HandoverConfig()
    """The network between workers."""
    kv_lease_duration: Annotated[
        float, Setting("Seconds for which a computed prompt is kept for its decode worker.")
    ] = 30.0
    """vLLM's name and default, of its NIXL connector."""
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"], Setting("Handling of a request whose computed prompt doesn't arrive: {choices}.")
    ] = "recompute"
    """As vLLM's option, whose default is ``fail``."""
    kv_transfer_host: Annotated[
        str | None, Setting("Address at which decode workers of other mocks reach this one. [default: --host]")
    ] = None
    faults: MockFaults = MockFaults()
    limits: Bounds = Bounds()
    seed: Annotated[int, Setting("Seed of answers and faults.", flag=True)] = 0
    drain_seconds: Annotated[float, Setting("Seconds for which streams may finish when the server stops.")] = 5.0

    def __post_init__(self) -> None:
        if self.hands_over:
            msgspec.structs.force_setattr(self, "workers", max(0, self.prefill) + max(0, self.decode))

    @property
    def hands_over(self) -> bool:
        """Return true if workers have roles, and prompts go from one to another."""
        return self.prefill != 0 or self.decode != 0

    @property
    def roles(self) -> list[Role]:
        """By the workers' numbers."""
        counts: dict[Role, int] = {"both": self.workers}
        if self.hands_over:
            counts = {"prefill": self.prefill, "decode": self.decode}
        return [role for role, number in counts.items() for _ in range(number)]

    def check(self) -> None:
        """Raise ``KvyardError`` for what no fleet can be."""
        self.engine.check()
        if self.engine.role != "both":
            raise KvyardError(
                f"role = {self.engine.role} is for kvyard replay: say --{self.engine.role} and how many such workers"
            )
        self._check_roles()
        for name in ("workers", "dp_size", "mean_output_tokens", "max_waiting", "max_choices", "buffer_steps"):
            if getattr(self, name) < 1:
                raise KvyardError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.workers * self.dp_size > MOST_RANKS:
            ranks = self.workers * self.dp_size
            raise KvyardError(f"a mock has at most {MOST_RANKS:,} ranks in all, not {ranks:,}: give fewer workers")
        for name in ("max_loras", "drain_seconds"):
            if getattr(self, name) < 0:
                raise KvyardError(f"{name} can't be negative, got {getattr(self, name)}")
        if not 0 < self.speed < float("inf"):
            raise KvyardError(f"speed must be above 0, got {self.speed}")
        if not 0 <= self.tool_call_rate <= 1:
            raise KvyardError(f"tool_call_rate is a share from 0 to 1, got {self.tool_call_rate}")
        tiers = self.engine.tiers
        if tiers is not None and tiers.shared:
            raise KvyardError(
                "a tier shared by workers is for kvyard replay: mock workers have tiers of their own, so say private"
            )
        if self.replay_endpoint is not None and self.events_endpoint is None:
            raise KvyardError("a replay endpoint needs an events endpoint: give --kv-events-endpoint too")
        if self.events_connect and self.workers > 1:
            if "{worker}" not in self.topic:
                raise KvyardError(
                    "workers that connect to one endpoint need topics of their own: put {worker} into the topic"
                )
            if self.replay_endpoint is not None:
                raise KvyardError("workers that connect to one endpoint can't share a replay endpoint: leave it out")
        for worker in range(self.workers):
            for endpoint in (self.events_endpoint, self.replay_endpoint):
                if endpoint is not None:
                    for rank in range(self.dp_size):
                        at_rank(self.endpoint_of(endpoint, worker), rank)

    def _check_roles(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 0:
                raise KvyardError(f"{name} can't be negative, got {getattr(self, name)}")
        if not 0 < self.kv_lease_duration <= 86_400:
            raise KvyardError(f"kv_lease_duration must be from above 0 to 86400 seconds, got {self.kv_lease_duration}")
        self.handover.check()
        if self.hands_over:
            if self.engine.backend == "sglang" or self.engine.speculative is not None or self.engine.async_scheduling:
                raise KvyardError(
                    "a mock hands prompts over without drafts, async_scheduling and SGLang's scheduler: leave that out, or "
                    "replay it without --live"
                )
            if self.engine.bytes_per_block is None:
                raise KvyardError(
                    "hand-overs need to know what a block takes: say model, or bytes_per_block beside groups"
                )

    def endpoint_of(self, endpoint: str, worker: int) -> str:
        """Return the endpoint of the first rank of ``worker``. Raises ``KvyardError`` if there is none."""
        if worker == 0 or self.events_connect or (endpoint.startswith("tcp://") and split_tcp(endpoint)[1] == 0):
            return endpoint
        if endpoint.startswith("ipc://"):
            return f"{endpoint}.{worker}"
        return at_rank(endpoint, worker * self.dp_size)


NOT_THE_NETWORK = ("decider", "decider_options", "protocol")
"""Settings of hand-overs that a router has: a mock does what it is asked."""
OF_HANDOVERS = Settings({name: one for name, one in settings_of(HandoverConfig).items() if name not in NOT_THE_NETWORK})
SETTINGS = Settings(settings_of(MockConfig), OF_HANDOVERS, OF_AN_ENGINE)
"""Everything that can be set of a mock, by name: the fleet's, and those of an engine."""


def make_config(settings: Mapping[str, object], **fields: Any) -> MockConfig:
    """Return the fleet that flat ``settings`` describe, and ``fields`` that have none. Raises ``KvyardError``."""
    given = SETTINGS.parse(settings)
    engine = {name: value for name, value in given.items() if name in OF_AN_ENGINE}
    roles = given.keys() & {"prefill", "decode"}
    if roles and "workers" in given:
        raise KvyardError("workers and prefill/decode both say how many workers there are: leave one of the two out")
    if not roles and (unused := given.keys() & OF_HANDOVERS.keys()):
        raise KvyardError(f"{min(unused)} is for mocks with prefill and decode workers: say how many, or leave it out")
    if roles:
        fields["handover"] = HandoverConfig(**chosen(HandoverConfig, given))
    if "model" in given:
        given.setdefault("served_model_name", _served_name(given["model"]))
        if "gpu" not in given:
            # A mock stands in for an engine whose speed doesn't matter: any times will do until a card is named.
            engine.setdefault("timing", "polynomial")
            if "gpu_memory" not in given:
                engine.setdefault("num_gpu_blocks", EngineConfig().num_gpu_blocks)
    else:
        engine.setdefault("max_model_len", LONGEST)
        if "groups" not in given:
            engine.setdefault("block_size", BLOCK_SIZE)
    orders = [engine.get(name, "lru") for name in ("eviction", *(f"{tier.label}_eviction" for tier in LOWER_TIERS))]
    if all(order in ("lru", "priority") for order in orders):
        engine.setdefault("heed_hints", True)
    engine_settings = engine_config(engine, given.get("seed", 0), given.get("data_parallel_size", 1))
    return MockConfig(engine=engine_settings, **chosen(MockConfig, given), **fields)


def _served_name(model: str) -> str:
    """Return the served name of a model that was given by a preset, by its config.json or by the folder of that."""
    path = Path(model)
    return (path.absolute().parent if path.name == "config.json" else path.absolute()).name.removesuffix(".json")
