"""Sessions in a report: how long they took and why, what they found, and the slowest of them."""

import msgspec

from kvyard.replay.report.numbers import Share, Spread

CAUSES = {
    "queue": "Queue",
    "load": "Loads from lower tiers",
    "prefill": "Prefill",
    "transfer": "Transfer between workers",
    "decode": "Decode",
    "tool": "Tools",
    "think": "Think time",
}
"""Causes of a session's time."""


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a session."""

    id: str
    agent: str = ""
    """The sub-agent that sent it; empty for the session itself."""
    worker: str = ""
    at_s: float = 0.0
    """Arrival, from the session's start."""
    ms: dict[str, float] = msgspec.field(default_factory=dict)
    """Its time by a name of ``CAUSES``; together they are its end-to-end latency."""
    held_ms: float = 0.0
    """Of its time in queues, milliseconds that flow control held it back."""
    input: int = 0
    output: int = 0
    cached: int = 0
    """Prompt tokens found on the device,"""
    loaded: int = 0
    """and loaded from lower tiers."""
    own: int = 0
    """Prompt tokens that earlier requests of the session had."""
    evicted: int = 0
    """Prompt tokens that its worker had computed before and has evicted since."""
    miss: str = ""
    """Why the prefix ended that was found; a name of ``MISSES``."""
    status: str = "finished"


class SlowSession(msgspec.Struct, frozen=True, kw_only=True):
    """One of the sessions that took longest."""

    id: str
    start_s: float
    """From the first arrival of the run."""
    completion_ms: float
    idle_ms: float | None = None
    """Its service time alone on an idle fleet; null in a live run."""
    slowdown: float | None = None
    requests: int
    migrations: int
    causes_ms: dict[str, float]
    turns: list[SessionTurn]
    """In order of arrival; the ones that took longest where the session has very many."""
    left_out: int = 0
    """Requests that ``turns`` leaves out."""


class SizeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A quarter of the sessions, by their service time alone on an idle fleet."""

    sessions: int
    idle_ms: float
    """Mean of that time,"""
    service_ms: float
    """and of the time it took."""
    slowdown_mean: float
    slowdown_p90: float


class Residency(msgspec.Struct, frozen=True, kw_only=True):
    """Token-seconds on devices: ``held``, ``idle`` and ``free`` add up to ``pool``."""

    pool: float
    """Tokens that fit on the devices, times the duration of the run."""
    held: float
    """Mean of requests that ran."""
    idle: float
    """Cached while no request held it."""
    free: float
    kept: float
    """Tokens of its own that a session's next request found on the device, times how long after its latest one that was. What
    sessions share counts for each of them."""


class SessionsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions: conversations, and agents each with all its sub-agents. A session lasts from its first request's arrival to
    the end of its last.
    """

    count: int
    finished: int
    """Sessions all of whose requests finished. What follows is of these, unless it says otherwise."""
    requests: int
    """Requests of all sessions."""
    completion: Spread
    """Milliseconds from beginning to end."""
    service: Spread
    """Milliseconds of those that the session waited for the fleet: without tools and think time."""
    slowdown: Spread | None = None
    """Service time / service time of the same session alone on an idle fleet; null in a live run."""
    turns: Spread
    """Requests per session."""
    causes_ms: dict[str, float]
    """Mean milliseconds of a session by a name of ``CAUSES``, along the requests that its end waited for; together they are
    the mean completion time."""
    migrations: Share
    """Share of all sessions."""
    reuse: dict[str, Share] = msgspec.field(default_factory=dict)
    """Shares of all sessions' prompt tokens: found that the session itself had sent before (``within``), found thanks to
    others (``across``), and computed though the session had sent it before (``again``)."""
    jain: float | None = None
    """Jain's index of the sessions' slowdowns: 1 if all are alike, 1 / sessions where one has it all."""
    sizes: list[SizeGroup] = msgspec.field(default_factory=list)
    """Smallest first."""
    residency: Residency | None = None
    slowest: list[SlowSession] = msgspec.field(default_factory=list)
    """The ten that took longest, longest first."""
