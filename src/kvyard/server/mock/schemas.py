"""The bodies of the mock's routes, as OpenAI and vLLM have them. Fields that change nothing here are taken and ignored."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvyard.server.mock.faults import Faults

Json = dict[str, Any]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream says besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Ask(msgspec.Struct, kw_only=True):
    """What both kinds of completion take."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    response_format: Json | None = None


class Completion(Ask, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class Message(msgspec.Struct, kw_only=True):
    """One turn."""

    role: str
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None


class Chat(Ask, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True


class CachedTokens(msgspec.Struct, kw_only=True):
    """Part of ``Usage``."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """What a request took."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens


class Model(msgspec.Struct, kw_only=True):
    """A model or an adapter."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "kvyard"
    permission: list[Json] = []


class Models(msgspec.Struct, kw_only=True):
    """``GET /v1/models``."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokenize(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
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


class Stream(msgspec.Struct, kw_only=True):
    """Where a rank's events are."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None


class WorkerState(msgspec.Struct, kw_only=True):
    """One worker of the fleet."""

    name: str
    url: str
    alive: bool
    block_size: int
    running: int
    waiting: int
    kv_cache_usage: float
    streams: list[Stream]
    faults: Faults


class FaultPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/faults``: what to change, on this worker."""

    error_rate: float | msgspec.UnsetType = msgspec.UNSET
    error_status: int | msgspec.UnsetType = msgspec.UNSET
    latency_ms: float | msgspec.UnsetType = msgspec.UNSET
    abort_rate: float | msgspec.UnsetType = msgspec.UNSET
    abort_after: int | msgspec.UnsetType = msgspec.UNSET
    stall_rate: float | msgspec.UnsetType = msgspec.UNSET
    stall_after: int | msgspec.UnsetType = msgspec.UNSET
    event_loss: float | msgspec.UnsetType = msgspec.UNSET


class Outage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/kill``, ``/admin/revive`` and ``/admin/stall``: which worker, and for how long."""

    worker: int | None = None
    """By number; the one that is asked where it is left out."""
    seconds: float | None = None
    """Real seconds. A worker that is killed without them stays dead until it is revived."""


class Done(msgspec.Struct, kw_only=True):
    """It was done."""

    status: Literal["ok"] = "ok"
