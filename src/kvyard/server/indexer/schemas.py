"""Requests and responses of the indexer. The types check requests, write answers and make the OpenAPI document.

Names are those of Dynamo's standalone indexer if it has them; ``routing_group`` and ``tenant_id`` are one thing under
the names of two of its versions. Everything counts in tokens.
"""

import re
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvyard.blocks.spec import GroupSpec
from kvyard.errors import KvyardError
from kvyard.events.tier import Tier
from kvyard.events.transport.endpoint import at_rank, check
from kvyard.events.wire import dialects
from kvyard.hashing import Media, Namespace
from kvyard.server.health import HealthReason
from kvyard.server.http import Refusal

InstanceId = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1, max_length=200)]
"""Dynamo's are 64-bit numbers, Mooncake's are names."""
Name = Annotated[str, Meta(min_length=1, max_length=400)]
Rank = Annotated[int, Meta(ge=0, le=4095)]
Token = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Hash = int
"""Signed or not: 64 bits of it count."""
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Dialect = Annotated[str, Meta(pattern=f"^({'|'.join(map(re.escape, dialects()))})$")]
"""The wire format of a stream; "auto" finds out."""
if TYPE_CHECKING:
    TierName: TypeAlias = str
else:
    TierName = Literal[tuple(tier.entry.service_name for tier in Tier)]


class ModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request: a model, and a group of its workers."""

    model_name: Name
    tenant_id: Name | None = None
    routing_group: Name | None = None

    @property
    def tenant(self) -> str:
        """The group of workers that is meant. Raises ``Refusal`` if it has two names."""
        if self.tenant_id is not None and self.routing_group not in (None, self.tenant_id):
            raise Refusal(
                422,
                "tenant_id and routing_group differ, and mean the same",
                field="routing_group",
                fix="send one of them",
            )
        return self.tenant_id or self.routing_group or "default"


class Member(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A worker that shares a pool."""

    instance_id: InstanceId
    dp_rank: Rank = 0


class AttentionGroup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """An attention group of the model, where it shouldn't be learned from events."""

    kind: str = "full"
    block_size: Size = 16
    window: Size | None = None
    chunk: Size | None = None
    mode: Literal["none", "all", "align"] = "align"
    eagle: bool = False

    def spec(self, where: str) -> GroupSpec:
        """Return the group's specification for the block manager. Raises ``ConfigError``, naming ``where``."""
        spec = GroupSpec(**msgspec.structs.asdict(self))
        spec.check(where)
        return spec


class StreamRequest(ModelRequest, kw_only=True, forbid_unknown_fields=True):
    """Streams that a request is about."""

    instance_id: InstanceId | None = None
    pool: Name | None = None
    """Instead of a worker: a store that several share."""
    dp_rank: Rank | None = None

    @property
    def called(self) -> str:
        """Return the name of the instance or pool, for messages."""
        return f"pool {self.pool!r}" if self.pool is not None else f"instance {self.instance_id}"


class Register(StreamRequest, kw_only=True, forbid_unknown_fields=True):
    """A stream to listen to: a worker's, one of its ranks', or a shared pool's."""

    endpoint: Name
    members: list[Member] = []
    """Workers that share the pool."""
    block_size: Size | None = None
    """The engine's. It need not be the index's; events are compared with it."""
    dp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of ranks to register, each one port further than the one before."""
    rank_from_events: bool = False
    """One stream carries several ranks, which its batches name."""
    replay_endpoint: Name | None = None
    stream: Name = "engine"
    """Tells several streams of one worker apart, such as an engine's and its offload connector's."""
    topic: str = ""
    dialect: Dialect = "auto"
    clear_scope: Literal["device", "all"] = "all"
    tier: TierName | None = None
    """Tier of everything it announces, if its events name none."""
    groups: Annotated[list[AttentionGroup], Meta(min_length=1, max_length=64)] | None = None
    alignment: Size | None = None
    additional_salt: str | None = None
    """Known to Dynamo, but part of no engine's hashes: only an empty one is accepted."""

    def stream_name(self, rank: int) -> str:
        """Return a stream's name: equal registrations have equal names, on every replica."""
        who = f"pool {self.pool}" if self.pool is not None else f"{self.instance_id}@{rank}"
        return f"{self.model_name}/{self.tenant}/{who}/{self.stream}"

    def for_rank(self, rank: int, offset: int) -> "Register":
        """Return the registration of one rank, with its own ports."""
        replay = None if self.replay_endpoint is None else at_rank(self.replay_endpoint, offset)
        return msgspec.structs.replace(
            self, endpoint=at_rank(self.endpoint, offset), replay_endpoint=replay, dp_rank=rank, dp_size=1
        )

    def check(self) -> None:
        """Raise ``Refusal``, naming the field, for what can't be listened to."""
        if (self.instance_id is None) == (self.pool is None):
            fix = "add instance_id" if self.pool is None else "leave out instance_id or pool"
            raise Refusal(422, "a stream speaks for one instance_id or for one pool", field="instance_id", fix=fix)
        if isinstance(self.instance_id, int) and self.instance_id >= 1 << 64:
            raise Refusal(422, "instance_id has more than 64 bits", field="instance_id", fix="send it as text")
        if self.pool is None and self.members:
            raise Refusal(422, "only a pool has members", field="members", fix="add pool, or leave members out")
        if self.pool is not None and self.dp_size > 1:
            raise Refusal(422, "a pool has no ranks", field="dp_size", fix="leave it out")
        if self.additional_salt:
            raise Refusal(
                422,
                "additional_salt has no effect on any engine's events, so it can't be honoured",
                field="additional_salt",
                fix="leave it out; workers that must not meet go to different routing groups",
            )
        if self.alignment is not None and self.groups is None:
            raise Refusal(422, "alignment belongs to groups", field="alignment", fix="add groups, or leave it out")
        for field in ("endpoint", "replay_endpoint"):
            value = getattr(self, field)
            if value is None:
                continue
            try:
                check(value)
                if value.startswith("inproc://"):
                    raise KvyardError(f"{value!r} is inside another process: use tcp or ipc")
                at_rank(value, self.dp_size - 1)
            except KvyardError as error:
                raise Refusal(400, str(error), field=field, fix="write tcp://HOST:PORT") from None


class Unregister(StreamRequest, kw_only=True, forbid_unknown_fields=True):
    """Streams to remove: all that match."""

    stream: Name | None = None

    def matches(self, have: Register) -> bool:
        """Return true if this is about the stream that was registered as ``have``."""
        if self.pool is not None:
            who = have.pool == self.pool
        else:
            who = have.instance_id is not None and str(have.instance_id) == str(self.instance_id)
        return who and self.dp_rank in (None, have.dp_rank) and self.stream in (None, have.stream)


class MediaItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An image or the like, and the tokens it fills."""

    hash: Name
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]


MediaItems = Annotated[list[MediaItem], Meta(max_length=1000)]


class Wanted(ModelRequest, kw_only=True, forbid_unknown_fields=True):
    """Prompt properties besides tokens, and the workers to ask about."""

    lora_name: str | None = None
    cache_salt: str | None = None
    workers: Annotated[list[InstanceId], Meta(max_length=10_000)] | None = None
    """Only these instances."""

    def namespace(self, media: list[MediaItem] | None = None) -> Namespace:
        """Return the namespace for hashing. Raises ``NamespaceError`` for media that overlap."""
        items = tuple(Media(item.hash, item.offset, item.length) for item in media or ())
        return Namespace(lora_name=self.lora_name or None, salt=self.cache_salt or None, media=items)


class Query(Wanted, kw_only=True, forbid_unknown_fields=True):
    """A prompt as token ids."""

    token_ids: list[Token]
    media: MediaItems = []


class QueryByHash(Wanted, kw_only=True, forbid_unknown_fields=True):
    """A prompt as one hash per full block of the index's block size; see ``names``."""

    block_hashes: list[Hash]


class PromptRequest(Wanted, kw_only=True, forbid_unknown_fields=True):
    """A prompt as token ids or text."""

    token_ids: list[Token] | None = None
    text: str | None = None
    media: MediaItems = []


class ScoreRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """One prompt, or several."""

    batch: "list[BatchPrompt] | None" = None


class BatchPrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of several prompts."""

    token_ids: list[Token] | None = None
    text: str | None = None
    media: MediaItems = []


class ExplainRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """A prompt to be explained for every worker, or one of them."""

    instance_id: InstanceId | None = None
    dp_rank: Rank | None = None


# -- answers --------------------------------------------------------------------------------------------------------


class RegistrationResponse(msgspec.Struct, kw_only=True):
    status: Literal["ok"] = "ok"
    streams: list[str] = []
    """The streams that this was about."""


class InstanceMatch(msgspec.Struct, kw_only=True):
    """Tokens of a prompt that an instance has, cumulative: what is on ``cpu`` goes on where ``gpu`` ends."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    """Per rank, on the device."""
    cpu: int
    disk: int


class Matches(msgspec.Struct, kw_only=True):
    """The answer of Dynamo's indexer."""

    scores: dict[str, dict[str, int]]
    """Per instance and rank, tokens on the device."""
    frequencies: list[int]
    """Always empty, as in Dynamo; kept for its clients."""
    instances: dict[str, InstanceMatch]


class TierTokens(msgspec.Struct, kw_only=True):
    tokens: int
    """Beyond what closer tiers reach."""
    blocks: int
    reach: int


class WorkerScore(msgspec.Struct, kw_only=True):
    """One rank's answer."""

    instance_id: int | str
    dp_rank: int
    tokens: int
    blocks: int
    score: float
    """Blocks, weighted by tier and confidence."""
    tiers: dict[TierName, TierTokens]
    limited_by: int | None
    """The attention group that ended the match."""
    state: Literal["fresh", "catching up", "stale"]
    confidence: float
    age_ms: float
    """Milliseconds since its least recent stream sent anything."""
    reason: str


class PromptScores(msgspec.Struct, kw_only=True):
    """One prompt's answer."""

    tokens: int
    blocks: int
    workers: list[WorkerScore]
    best: WorkerScore | None


class ScoreResponse(msgspec.Struct, kw_only=True):
    model_name: str
    tenant_id: str
    block_size: int
    """The index's."""
    results: list[PromptScores]


class GroupReason(msgspec.Struct, kw_only=True):
    group: int | None
    kind: str
    tokens: int
    why: str


class WorkerExplanation(msgspec.Struct, kw_only=True):
    worker: WorkerScore
    summary: str
    groups: list[GroupReason]


class ExplainResponse(msgspec.Struct, kw_only=True):
    model_name: str
    tenant_id: str
    block_size: int
    tokens: int
    explanations: list[WorkerExplanation]


class ListenerInfo(msgspec.Struct, kw_only=True):
    """One stream."""

    name: str
    endpoint: str
    replay_endpoint: str | None
    status: Literal["pending", "active", "failed"]
    """Connection state; ``failed`` if it ended with an error."""
    state: Literal["fresh", "catching up", "stale"]
    reason: str
    sequence: int
    batches: int
    block_sizes: list[int]
    """Block sizes in events, if they aren't the registered one."""


class WorkerInfo(msgspec.Struct, kw_only=True):
    """One instance, or a pool."""

    instance_id: int | str | None
    pool: str | None
    source: Literal["zmq"] = "zmq"
    status: Literal["pending", "active", "failed"]
    model_name: str
    tenant_id: str
    routing_group: str
    block_size: int | None
    endpoints: dict[str, str]
    """By rank."""
    listeners: dict[str, ListenerInfo]
    """By rank; further streams of one rank by rank and name."""


class IndexerHealth(msgspec.Struct, kw_only=True):
    status: Literal["ok", "degraded", "starting"]
    live: bool
    ready: bool
    degraded: bool
    reasons: list[HealthReason]
    """Problems, the worst first."""
    models: int
    streams: dict[str, int]
    """Number of streams by state."""


class PlaceRows(msgspec.Struct, kw_only=True):
    """Blocks of one worker or pool on one tier for one group, as runs of request keys."""

    instance_id: int | str | None
    pool: str | None
    dp_rank: int
    tier: TierName
    group: int | None
    runs: list[list[int]]


class ModelRows(msgspec.Struct, kw_only=True):
    block_size: int
    names: list[str]
    """Naming of request keys."""
    places: list[PlaceRows]


Rows = dict[str, ModelRows]
"""By ``model:tenant``."""
