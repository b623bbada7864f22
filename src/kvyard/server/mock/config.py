"""What people write to describe a mock fleet. A value: it opens nothing."""

from __future__ import annotations

import msgspec

from kvyard.engine.config import EngineConfig
from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import at_rank, split_tcp
from kvyard.server.http import Bounds
from kvyard.server.mock.faults import Faults

DEFAULT_MODEL = "mock"


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter."""

    name: str
    path: str
    number: int = 1


class MockConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet of equal workers."""

    engine: EngineConfig
    workers: int = 1
    dp_size: int = 1
    served_model_name: str = DEFAULT_MODEL
    speed: float = 1.0
    """How many nominal seconds pass in a real one."""
    tokenizer: str | None = None
    """A ``tokenizer.json``; without one, every byte is a token."""
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str | None = None
    """Of block hashes; without one, every worker has its own, so that nobody gets away with comparing them."""
    events_endpoint: str | None = None
    """Where the first rank of the first worker publishes; the others are as many ports further. ``None``: nowhere."""
    replay_endpoint: str | None = None
    events_connect: bool = False
    """Whether streams connect to the endpoint, where a router has bound it, instead of binding it."""
    topic: str = ""
    """``{worker}`` in it stands for the worker's name."""
    buffer_steps: int = 10_000
    """Batches of events that each stream keeps for replay, as in vLLM."""
    mean_output_tokens: int = 128
    """How long an answer is that nobody cuts, on average."""
    tool_call_rate: float = 0.5
    """How often ``tool_choice: auto`` calls a tool."""
    max_loras: int = 8
    loras: tuple[Lora, ...] = ()
    max_waiting: int = 4096
    """Requests that may wait for a worker; more are answered with 503."""
    max_choices: int = 64
    """Choices of one request, over all its prompts."""
    faults: Faults = Faults()
    limits: Bounds = Bounds()
    seed: int = 0
    drain_seconds: float = 5.0
    """What streams get to finish in when the server is told to end."""

    def check(self) -> None:
        """Raise ``KvyardError`` for what no fleet can be."""
        self.engine.check()
        for name in ("workers", "dp_size", "mean_output_tokens", "max_waiting", "max_choices", "buffer_steps"):
            if getattr(self, name) < 1:
                raise KvyardError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.speed < float("inf"):
            raise KvyardError(f"speed must be above 0, got {self.speed}")
        if not 0 <= self.tool_call_rate <= 1:
            raise KvyardError(f"tool_call_rate is a share from 0 to 1, got {self.tool_call_rate}")
        if self.drain_seconds < 0:
            raise KvyardError(f"drain_seconds can't be negative, got {self.drain_seconds}")
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

    def endpoint_of(self, endpoint: str, worker: int) -> str:
        """Where ``worker`` has its first rank. Raises ``KvyardError`` where there is no such place."""
        if worker == 0 or self.events_connect or (endpoint.startswith("tcp://") and split_tcp(endpoint)[1] == 0):
            return endpoint
        if endpoint.startswith("ipc://"):
            return f"{endpoint}.{worker}"
        return at_rank(endpoint, worker * self.dp_size)
