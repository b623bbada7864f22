"""Parts of a report that not every fleet has: lower tiers, roles, pulls, autoscaling, tenants and flow control."""

import msgspec

from kvyard.replay.report.numbers import Share, Spread


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of one kind between two tiers, the whole fleet together."""

    transfers: int
    """Transfers that landed."""
    blocks: int
    bytes: int
    waiting_ms: float
    """Sum of the delays of landings compared with idle links."""


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of the links to a tier, all of them together."""

    links: int
    bytes: int
    busy: Share
    """Share of the time."""
    bandwidth: Share | None = None
    """Share of the links' capacity; ``None`` if they have no limit."""


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, all workers together."""

    capacity_blocks: int
    """Blocks of the device's size."""
    evicted_blocks: int
    """Cached blocks evicted to make room."""
    links: dict[str, LinkUse] = msgspec.field(default_factory=dict)
    """To the tier above, by direction: ``outward`` and ``inward``."""


class RoleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role together."""

    workers: int
    worker_seconds: float
    """Cost: workers times the duration of the run."""
    busy: Share
    """Share of that time."""


class HandoverReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-overs between prefill and decode workers."""

    decider: str
    protocol: str
    handed_over: Share
    stages: dict[str, Spread]
    """Milliseconds in each stage from arrival to first token, of finished requests that were handed over."""
    bytes: int
    """Sent, of those."""
    waiting_ms: float
    """Sum of the delays of their blocks compared with an idle network."""
    network: dict[str, LinkUse] = msgspec.field(default_factory=dict)
    """By way."""
    roles: dict[str, RoleReport] = msgspec.field(default_factory=dict)


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """Pulls between workers."""

    source: str
    """Tier that was read: ``host`` or ``device``."""
    tokens: Share
    """Share of all prompt tokens that another worker had."""
    begun: int
    landed: int
    ms: float
    """From its beginning until it had landed, of those that did, on average."""
    gone: int
    """Pulls that found too little where the router had seen it."""
    failed: int
    """Pulls whose source failed."""
    busy: int
    """Prompts that were computed because too many pulls were in flight,"""
    no_room: int
    """or because the first tier had no room."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests for which the load policy chose to compute, by reason."""


class ScalingCost(msgspec.Struct, frozen=True, kw_only=True):
    """Price of the cards that an autoscaled fleet used."""

    amount: float
    currency: str
    prices_of: str
    """Date of the price list."""
    cards: dict[str, float]
    """Price per hour by card."""


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions of an autoscaler, and their effect on caches."""

    policy: str
    startup_s: float
    worker_seconds: dict[str, float]
    """By role, from asking for a worker until it was off: what they cost."""
    mean_workers: dict[str, float]
    """By role: those, over the duration of the run."""
    actions: list[tuple[float, str, int, int]]
    """Time (seconds from the start of the replay), role, workers before and after."""
    stops: int
    """Workers that were switched off."""
    cancelled: int
    """Start-ups that were cancelled."""
    lost_blocks: int
    """Cached blocks that went with them, lower tiers included."""
    lost: Share
    """Share of computed tokens that only workers had which were stopped since."""
    card_seconds: dict[str, float] = {}
    """By role: seconds of workers times the cards of each."""
    cost: ScalingCost | None = None
    """Price of those; null if the price list doesn't have every card."""
    flaps: int = 0
    """Scale-ups that were undone within ``flap_s`` seconds."""
    flap_s: float = 0.0
    workers: dict[str, list[float]] = {}
    """By role: mean number of workers that were on, in the windows of ``series``."""
    within_slo: list[float | None] = []
    """Share of the requests that arrived in each of these windows and finished within the SLO; null without arrivals, empty
    without an SLO."""


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's requests."""

    requests: int
    finished: int
    rejected: int
    input_tokens: int
    output_tokens: int
    computed_tokens: int
    """Cost for the fleet: prompt tokens that had to be computed, and tokens of answers."""
    reused: Share
    held_token_s: float
    """Token-seconds that its requests held on devices: a prompt from admission to the end, an answer as it grew. What requests
    share counts for each."""
    resident_token_s: dict[str, float] = {}
    """Token-seconds by tier of blocks that its requests took, until those were evicted: each block counts for one tenant. Empty
    in a live run."""
    lost_tokens: dict[str, int] = {}
    """Its tokens by tier that were evicted to make room for another tenant."""
    waited_ms: float
    """Mean time that flow control held its requests back."""
    ttft: Spread
    """Milliseconds, of finished requests; so is"""
    e2e: Spread


class CacheTime(msgspec.Struct, frozen=True, kw_only=True):
    """Token-seconds of one tier while tenants were charged for it."""

    pool_token_s: float
    held_token_s: float
    """Of all tenants together, and of requests that named none."""
    empty_token_s: float


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that flow control held back, and why."""

    id: str
    session: str = ""
    tenant: str = ""
    arrival_s: float
    """From the first arrival of the run."""
    waited_ms: float
    ahead: int
    """Requests that waited when it came."""
    overtaken: int
    """Requests that came later and went first."""
    why: str


class FlowReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that flow control held back before the router."""

    policy: str
    engine_requests: int
    """Requests that a worker had at a time, at most."""
    held: Share
    waited: Spread
    """Milliseconds, of requests that had to wait."""
    longest: int
    """Requests that waited at a time, at most."""
    overtaken: int
    """Number of times that a later request went before a waiting one."""
    refused: dict[str, int]
    """Requests that weren't let in: the queue was ``full``, its tenant had its ``share`` of it, or it was ``shed``."""
    longest_waits: list[HeldRequest] = msgspec.field(default_factory=list)
    """The ten that waited longest, longest first."""
