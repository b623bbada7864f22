"""The bodies of the mock's routes beside ``kvyard.openai``: vLLM's own, and the fleet's."""

from typing import Literal

import msgspec

from kvyard.engine.role import Role
from kvyard.openai import ChatMessage, Json
from kvyard.server.mock.faults import MockFaults


class Tokenize(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """The ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    """The text."""

    prompt: str


class LoadLora(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLora(msgspec.Struct, kw_only=True):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str
    lora_int_id: int | None = None


class Version(msgspec.Struct, kw_only=True):
    """``GET /version``."""

    version: str


class ServerLoad(msgspec.Struct, kw_only=True):
    """``GET /load``."""

    server_load: int


class EventStream(msgspec.Struct, kw_only=True):
    """Endpoint of a rank's events."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None


class WorkerState(msgspec.Struct, kw_only=True):
    """One worker of the fleet."""

    name: str
    url: str
    role: Role = "both"
    alive: bool
    block_size: int
    running: int
    waiting: int
    kv_cache_usage: float
    streams: list[EventStream]
    faults: MockFaults


FaultPatch = msgspec.defstruct(
    "FaultPatch",
    [
        (field.name, field.type | msgspec.UnsetType, msgspec.UNSET)
        for field in msgspec.structs.fields(MockFaults)
        if field.name != "kill_after_s"  # that is about a start, and this worker has started
    ],
    kw_only=True,
    forbid_unknown_fields=True,
    namespace={"__doc__": "``POST /admin/faults``: what to change, on this worker."},
)


class Outage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/kill``, ``/admin/revive`` and ``/admin/stall``: which worker, and for how long."""

    worker: int | None = None
    """By number; the one that is asked if it is left out."""
    seconds: float | None = None
    """Real seconds. A worker that is killed without them stays dead until it is revived."""


ClaimKind = Literal["claim", "renew", "release"]


class PromptClaim(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /kv_transfer``: a decode worker of another mock asks for prompts that were computed here."""

    what: ClaimKind
    engine_id: str
    """Of the life of the engine that had them; empty if that isn't known."""
    request_ids: list[str]


class PromptsHeld(msgspec.Struct, kw_only=True):
    """Prompts that are here, or were until now."""

    held: list[str]


class MockDone(msgspec.Struct, kw_only=True):
    """It was done."""

    status: Literal["ok"] = "ok"
