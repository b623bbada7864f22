"""The bodies of the gateway's own routes. Those of the OpenAI API are in ``kvyard.openai``."""

from typing import Any, Literal

import msgspec

from kvyard.engine.role import Role
from kvyard.server.health import HealthReason
from kvyard.server.indexer.schemas import ListenerInfo, Name


class ExplainRoute(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /explain``: a request as it would be sent, and where."""

    body: dict[str, Any]
    path: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"] | None = None
    """Left out, what the body looks like."""
    session: str | None = None


class RouteCandidate(msgspec.Struct, kw_only=True):
    """An engine's rank, as a decision sees it. Counts are blocks unless noted."""

    worker: str
    cost: float
    tiers: dict[str, int]
    """Of the prompt, by the label of the tier: ``device``, ``host``, ..."""
    predicted: int
    prefill_tokens: int
    active_blocks: int
    shared_blocks: int
    active_requests: int


class RouteExplained(msgspec.Struct, kw_only=True):
    """Decision that would be taken now."""

    model: str
    pool: str
    worker: str
    url: str
    policy: str
    why: str
    cost: float
    tokens: int
    blocks: int
    hit_blocks: int
    best_blocks: int
    best_worker: str | None
    regret_blocks: int
    block_size: int
    candidates: list[RouteCandidate]
    said: str
    """Explanation in words."""
    not_considered: dict[str, str]
    """Engines of the pool that can't be chosen, and why."""
    handed_over: bool | None = None
    """True if another engine would compute the prompt; ``None`` if engines have no roles, or the request can't be split."""
    prefill_worker: str | None = None
    """Engine that would compute the prompt."""


class NamedEngine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Name of an engine."""

    engine: Name


class EngineInfo(msgspec.Struct, kw_only=True):
    """One engine."""

    name: str
    url: str
    pool: str | None
    state: Literal["starting", "ready", "suspect", "down"]
    draining: bool
    reason: str
    models: list[str]
    dp_size: int
    role: Role
    in_flight: int
    requests: int
    failed: int
    streams: list[ListenerInfo]


class GatewayHealth(msgspec.Struct, kw_only=True):
    """Health of the gateway."""

    status: Literal["ok", "degraded", "no engine", "draining"]
    """One word: degraded is ready, and not as it was meant to be."""
    live: bool
    ready: bool
    degraded: bool
    reasons: list[HealthReason]
    """Problems, the worst first."""
    engines: dict[str, int]
    """Number of engines by state."""
    streams: dict[str, int]
    under_way: int
    queued: int


class SessionClosed(msgspec.Struct, kw_only=True):
    """``POST /close_session``."""

    engines: list[str]
    """Engines that took notice: others lack this route, or are down."""
