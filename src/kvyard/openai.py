"""The shapes of the OpenAI API, as vLLM has them: those that servers here take and write, and those that clients here read.

What is read from another server is typed only where it is used: an engine with a strange field elsewhere still works.
"""

from typing import Annotated, Any, Literal

import msgspec

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class StreamOptions(msgspec.Struct, kw_only=True):
    """Parts of a stream besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RetentionDirective(msgspec.Struct, kw_only=True):
    """Retention of a range of tokens in the form of vLLM's pull request 38514."""

    priority: int
    start: int = 0
    end: int | None = None
    duration: float | None = None
    """Seconds."""


class TokenRangeRetention(msgspec.Struct, kw_only=True):
    """Retention of a range of tokens in TensorRT-LLM's form."""

    priority: int
    token_start: int = 0
    token_end: int | None = None
    duration_ms: float | None = None


class KvCacheRetention(msgspec.Struct, kw_only=True):
    """TensorRT-LLM's ``KvCacheRetentionConfig``."""

    token_range_retention_configs: list[TokenRangeRetention] = []
    decode_retention_priority: int | None = None
    decode_duration_ms: float | None = None


class CacheControl(msgspec.Struct, kw_only=True):
    """Retention period of a prompt: text such as 5m in Dynamo, seconds in vLLM's issue 52113."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | float | None = None
    then: Literal["ordinary", "first"] = "ordinary"
    """Priority after the period, a field of our own: ordinary, or the first to be evicted."""


class AgentPriority(msgspec.Struct, kw_only=True):
    """Part of ``NvExt``; it has more fields, which are the router's."""

    priority: int | None = None


class SessionControl(msgspec.Struct, kw_only=True):
    """Part of ``NvExt``: what becomes of a session with this request."""

    session_id: str | None = None
    action: Literal["open", "bind", "close"] | None = None


class NvExt(msgspec.Struct, kw_only=True):
    """Dynamo's extensions, as far as they are hints."""

    agent_hints: AgentPriority | None = None
    cache_control: CacheControl | None = None
    session_control: SessionControl | None = None


LONGEST_NAME = 1 << 16
"""Characters of a session's name, at most."""


class EndedSession(msgspec.Struct, kw_only=True):
    """``POST /close_session``, as SGLang has it."""

    session_id: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]


class AgentHint(msgspec.Struct, kw_only=True):
    """The hint of vLLM's issue 52113, as far as it says how long to keep what."""

    session_id: str | None = None
    cache_control: CacheControl | None = None


class HintFields(msgspec.Struct, kw_only=True):
    """Fields of a request about its session and the value of its tokens, by the names of several engines."""

    session_id: str | None = None
    vllm_xargs: Json | None = None
    retention_directives: list[RetentionDirective] | None = None
    retention_scope: str | None = None
    agent_hint: AgentHint | None = None
    kv_cache_retention_config: KvCacheRetention | None = None
    nvext: NvExt | None = None


class GenerationRequest(HintFields, kw_only=True):
    """Fields that both kinds of completion have."""

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
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    kv_transfer_params: Json | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[Json] | None = ""
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None


class _ChatFields(GenerationRequest, kw_only=True):
    """Fields of a chat besides the conversation."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    add_special_tokens: bool = False


class ChatRequest(_ChatFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]


class BatchChatRequest(_ChatFields, kw_only=True):
    """``POST /v1/chat/completions/batch``: several conversations, each by itself."""

    messages: Annotated[list[Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]


class ResponsesRequest(HintFields, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[Json]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    """Id of the response; vLLM's own field."""
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Json] | None = None
    metadata: Json | None = None
    user: str | None = None
    cache_salt: str | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    cache_salt: str | None = None
    user: str | None = None


class CachedTokens(msgspec.Struct, kw_only=True):
    """Part of ``TokenUsage``."""

    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request. Engines differ in which of them they report."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache; ``None`` if it isn't reported."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class ModelCard(msgspec.Struct, kw_only=True):
    """A model or an adapter, as our servers list it."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["model"] = "model"
    owned_by: str = "kvyard"
    permission: list[Json] | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, kw_only=True):
    """``GET /v1/models``."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ListedModel(msgspec.Struct):
    """A model or an adapter (which has a ``parent``), as an engine lists it."""

    id: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class ListedModels(msgspec.Struct):
    """An engine's answer to ``GET /v1/models``."""

    data: Annotated[list[ListedModel], msgspec.Meta(max_length=10_000)]


class SleepState(msgspec.Struct, kw_only=True):
    """``GET /is_sleeping`` of vLLM in its development mode, in which it can be put to sleep over HTTP."""

    is_sleeping: bool


class EventSource(msgspec.Struct, kw_only=True):
    """Endpoint on which one rank of an engine publishes its KV events, in ``GET /kv_event_sources`` of vLLM since 0.32."""

    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    endpoint: str
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class TokenIds(msgspec.Struct):
    """An engine's answer to ``POST /tokenize``."""

    tokens: list[int]


class ErrorInfo(msgspec.Struct, kw_only=True):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: int = 400


class ErrorBody(msgspec.Struct, kw_only=True):
    """A refusal."""

    error: ErrorInfo
