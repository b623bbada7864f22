"""Content of a dashboard: a fleet at one moment, as plain values. The contract between the page and the server that it
shows.

Counters count from the start of the server, or of the worker they are about; the page makes rates of them. What a source
doesn't know stays at its default, and the page leaves it out. Names may be anything: the page shows them as text. Nothing
of a request's text belongs in here, nor anything made from it that could be turned back.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvyard import __version__
from kvyard.clock import MS, SECOND
from kvyard.engine.role import Role
from kvyard.events.types import Tier

WorkerState = Literal["ready", "busy", "starting", "draining", "stalled", "suspect", "down"]
"""``busy``: takes nothing more for now. ``suspect``: failed lately and is being watched. ``down``: gets no requests."""
StreamState = Literal["fresh", "catching up", "stale", "sending", "failed"]
"""A reader's view of a stream; ``sending`` is the publisher's."""

WINDOW = 60 * SECOND
"""Window of latencies: the last minute."""
MOST_LATENCIES = 4096
"""Latencies that are kept at most."""
MOST_DECISIONS = 50
"""Decisions in a view; the newest first."""


class TierView(msgspec.Struct, kw_only=True, frozen=True):
    """One tier of a worker, in blocks."""

    name: str
    """Of a ``Tier``: ``G1`` for the device, ``G2`` for host memory, ..."""
    held: int = 0
    """Held by requests and transfers: can't be evicted."""
    idle: int = 0
    """Cached, and not held: what the next prompt may find, or push out."""
    capacity: int | None = None
    """``None`` if it isn't known."""


PromptSources: TypeAlias = dict[str, int]
"""Prompt tokens by source; they add up to all that were admitted or routed. By a tier's label; ``elsewhere``: computed,
though another worker had them; ``computed``: computed otherwise."""


def by_label(tiers: Sequence[int]) -> dict[str, int]:
    """Return figures by tier, closest first, under what people call the tiers; 0 for those that are not given."""
    return {tier.label: tiers[level] if level < len(tiers) else 0 for level, tier in enumerate(Tier)}


def prompt_sources(tiers: Sequence[int] = (), computed: int = 0, elsewhere: int = 0) -> PromptSources:
    """Make the view from ``tiers``, tokens by tier, closest first."""
    return {**by_label(tiers), "elsewhere": elsewhere, "computed": computed}


class PromisesView(msgspec.Struct, kw_only=True, frozen=True):
    """Prompt tokens that a router expected at workers, and those that they found. Counters of tokens; promised is delivered
    plus missing.
    """

    promised: int = 0
    delivered: int = 0
    missing: dict[str, int] = {}
    """By reason."""
    unpromised: int = 0
    """Found beyond what was promised."""
    kept: int = 0
    """Promises of which everything was found."""
    broken: int = 0
    """Promises of which something is missing."""


class WorkerStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One worker, its ranks taken together."""

    name: str
    model: str = ""
    url: str = ""
    state: WorkerState = "ready"
    reason: str = ""
    """Why it isn't ready."""
    role: Role = "both"
    """Part of a request that it computes."""
    ranks: int = 1
    running: int = 0
    waiting: int = 0
    requests: int = 0
    """Counter: ended, however."""
    failed: int = 0
    """Counter: of those, without an answer. Not those whose client hung up."""
    prompt_tokens: int = 0
    """Counter."""
    output_tokens: int = 0
    """Counter; where tokens are unknown, streamed chunks."""
    tiers: list[TierView] = []
    prompts: PromptSources = msgspec.field(default_factory=prompt_sources)
    promises: PromisesView | None = None
    """``None`` where no router is asked."""
    announced_by: str = ""
    """The other worker whose events rise when this one computes something: their event endpoints are crossed."""


class StreamView(msgspec.Struct, kw_only=True, frozen=True):
    """One stream of KV events."""

    name: str
    worker: str = ""
    endpoint: str = ""
    state: StreamState = "fresh"
    reason: str = ""
    seq: int = -1
    """The last batch's; -1 before the first."""
    epoch: int = 0
    """Counts the publisher's restarts that were noticed."""
    batches: int = 0
    """Counter: applied, or sent."""
    waiting: int = 0
    """Batches that were read and not applied yet."""
    gaps: int = 0
    missed: int = 0
    """Batches that were missing when a gap was seen, or withheld by a publisher on request."""
    restarts: int = 0
    stored: int = 0
    """Counter of blocks, as are the removed ones."""
    removed: int = 0
    block_sizes: list[int] = []
    """Block sizes of its events other than the configured one."""
    lag_ms: float | None = None
    """From the latest batch's stamp until it was applied."""
    age_s: float | None = None
    """Seconds since anything was received."""


class TransferView(msgspec.Struct, kw_only=True, frozen=True):
    """Copies over one link in one direction."""

    worker: str
    source: str
    """A tier's name, as in ``TierView``."""
    target: str
    under_way: int = 0
    landed: int = 0
    """Counter."""
    blocks: int = 0
    """Counter."""
    bytes: int = 0
    """Counter."""
    queued_ms: float = 0.0
    """Counter: how much later copies landed, together, than on an idle link."""
    bandwidth: float | None = None
    """Bytes a second that the link can do."""


class DecisionView(msgspec.Struct, kw_only=True, frozen=True):
    """One request that was given to a worker, or admitted by one. Counts are blocks unless noted."""

    number: int
    """Counts up, so that the page knows which are new."""
    at: float
    """Seconds since 1970."""
    id: str
    worker: str
    model: str = ""
    policy: str = ""
    why: str = ""
    """A few words."""
    cost: float | None = None
    tokens: int = 0
    """Of the prompt."""
    blocks: int = 0
    tiers: dict[str, int] = {}
    """Blocks of the prompt that were found, by the label of the tier."""
    best: int | None = None
    """The longest prefix that any worker has; ``None`` where it wasn't looked for."""
    best_worker: str = ""
    said: str = ""
    """The whole explanation, as lines of plain text."""


class Latency(msgspec.Struct, kw_only=True, frozen=True):
    """Milliseconds, of the requests of the last minute."""

    p50: float
    p90: float
    p99: float
    count: int


class LatencyWindow:
    """Time of an arrival and its duration, in nanoseconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque(maxlen=MOST_LATENCIES)

    def add(self, time: int, took: int) -> None:
        self._seen.append((time, took))

    def within(self, now: int) -> list[int]:
        """Return the durations within the window."""
        return [took for time, took in self._seen if time > now - WINDOW]

    def latency(self, now: int) -> Latency | None:
        """Return percentiles within the window; ``None`` if there is nothing in it."""
        return latency_of(self.within(now))


def latency_of(times: Sequence[int]) -> Latency | None:
    """Return percentiles of nanoseconds; ``None`` if there are none."""
    ordered = sorted(times)
    if not ordered:
        return None

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / MS

    return Latency(p50=at(0.5), p90=at(0.9), p99=at(0.99), count=len(ordered))


class Totals(msgspec.Struct, kw_only=True, frozen=True):
    """Sums over all workers. Counters, except for requests in flight."""

    requests: int = 0
    """Came in."""
    finished: int = 0
    failed: int = 0
    """Answered with an error of ours or a worker's."""
    refused: int = 0
    """Turned away: too much at once, or a mistake of the client's."""
    cancelled: int = 0
    retried: int = 0
    """Sent to another worker because one failed."""
    under_way: int = 0
    queued: int = 0
    """Of those, not with a worker yet."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompts: PromptSources = msgspec.field(default_factory=prompt_sources)
    promises: PromisesView | None = None
    ttft: Latency | None = None


class ExpectationView(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Hits that engines owe the latest requests, and hits they counted, as ``kvyard expect --watch`` found. Tokens."""

    at: Annotated[float, Meta(ge=0)]
    """Seconds since 1970."""
    requests: Annotated[int, Meta(ge=0)]
    """Requests that were compared."""
    exact: Annotated[int, Meta(ge=0)]
    """Of those, requests whose count is what they are owed."""
    prompt_tokens: Annotated[int, Meta(ge=0)]
    owed: Annotated[int, Meta(ge=0)]
    counted: Annotated[int, Meta(ge=0)]
    cause: Annotated[str, Meta(max_length=64)] = ""
    """The cause that is named; empty if nothing is wrong."""
    fault: bool = False
    """True if engines count something else than they owe; otherwise the cause limits what is owed."""
    sentence: Annotated[str, Meta(max_length=2000)] = ""
    """The cause and its fix."""


class SessionView(msgspec.Struct, kw_only=True, frozen=True):
    """One session. Counters of its requests that are over."""

    name: str
    tenant: str = ""
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those, tokens that engines report as cached."""
    output_tokens: int = 0
    waited_ms: float = 0.0
    """Mean time until an engine was chosen for a request."""
    worker: str = ""
    """The latest one."""
    moves: int = 0
    """Times that a request went to another worker than the one before."""
    lasted_s: float = 0.0
    """From the end of its first request to the end of its latest."""
    age_s: float = 0.0
    """Since the end of its latest request."""


class TenantView(msgspec.Struct, kw_only=True, frozen=True):
    """One tenant. Counters of its requests that are over."""

    name: str
    requests: int = 0
    failed: int = 0
    """Requests without an answer, refused ones among them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    waited_ms: float = 0.0
    """Mean time until an engine was chosen for a request."""
    engine_s: float = 0.0
    """Seconds that engines had its requests."""


class FleetView(msgspec.Struct, kw_only=True, frozen=True):
    """A fleet at one moment."""

    kind: str
    """``mock`` or ``gateway``: the reporter."""
    at: float
    """Seconds since 1970."""
    since: float
    """Start of the server; a new value means that counters began again."""
    version: str = __version__
    policy: str = ""
    reads: Literal["index", "memory", "load", ""] = ""
    """Input of that policy: engines' events, requests sent, or neither. Empty if there is none."""
    remote_index: bool = False
    """True if the index is another server's."""
    speed: float = 1.0
    """Nominal seconds in a real one, for a mock. Rates are by the real clock."""
    notes: list[str] = []
    """Notes for people: injected faults, an unreachable Redis."""
    workers: list[WorkerStatus] = []
    streams: list[StreamView] = []
    transfers: list[TransferView] = []
    decisions: list[DecisionView] = []
    totals: Totals = Totals()
    expectation: ExpectationView | None = None
    """``None`` where no ``kvyard expect --watch`` reports to this server."""
    reasons: dict[str, str] = {}
    """Why promised tokens may be missing, in words."""
    sessions: list[SessionView] = []
    """The latest, the latest first."""
    session_count: int = 0
    """Sessions that are remembered."""
    tenants: list[TenantView] = []
    """The one with the most tokens first."""


ViewSource: TypeAlias = Callable[[], FleetView]
"""The fleet, now. Called about once a second while it is watched, on the server's loop, so it must be quick: a millisecond or
so at 64 workers. It changes nothing. What it raises is logged and shown as a note."""
