"""The report: everything a replay found out, as plain values in the units people read (milliseconds, tokens, blocks).

Canonical: the same inputs and seed give the same report, byte for byte. Nothing of wall time is in it. It holds all that the
table and the page show, so that both can be made from its file alone. How it is made is in ``make``.
"""

from itertools import pairwise

import msgspec

from kvyard.engine.timing.error_range import RunClass
from kvyard.events.tier import Tier
from kvyard.replay.report.fleet_report import (
    CacheTime,
    FlowReport,
    HandoverReport,
    PullReport,
    ScalingReport,
    TenantReport,
    TierReport,
    TransferReport,
)
from kvyard.replay.report.numbers import Histogram, Share, Spread
from kvyard.replay.report.session_report import SessionsReport
from kvyard.replay.report.sketch import PercentileError

VERSION = 1

LATENCIES = {
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "tpot": "Time per output token",
    "e2e": "End-to-end latency",
    "queue": "Queue time",
}
"""Latencies of each request, in milliseconds, in the order of all tables."""
LENGTHS = {"input": "Input length", "output": "Output length"}
TIERS = tuple(tier.label for tier in Tier)
MOVES = {
    name: f"{source.label} to {target.label}"
    for closer, tier in pairwise(Tier)
    for name, source, target in ((tier.entry.stores, closer, tier), (tier.entry.loads, tier, closer))
} | {"pulls": "from other workers to host"}
"""Kinds of transfers: into and out of each lower tier, closest to the device first, and from worker to worker."""


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a good request, in milliseconds; missing ones don't count."""

    ttft: float | None = None
    itl: float | None = None
    """The mean gap between a request's tokens."""
    e2e: float | None = None
    percentiles: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """Percentiles of the whole run, by names such as ``ttft_p99``."""

    def limit(self, name: str) -> float | None:
        """Return the limit of one request: its own, or the largest of a percentile."""
        own: float | None = getattr(self, name)
        if own is not None or self.percentiles is msgspec.UNSET:
            return own
        kinds = ("itl", "tpot") if name == "itl" else (name,)
        return max((ms for key, ms in self.percentiles.items() if key.partition("_")[0] in kinds), default=None)


REJECTED = 0.01
"""Share of requests that a fleet may reject and meet an SLO. Percentiles are of the requests it served: rejecting the long ones
would look like an improvement."""


def too_many_rejected(rejected_share: float) -> bool:
    """True if a run that rejects this share of its requests meets no SLO."""
    return rejected_share > REJECTED


class PercentileLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A percentile of a run beside its limit."""

    limit_ms: float
    value_ms: float
    met: bool


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests served within an SLO."""

    slo_ms: Slo
    requests: Share
    """Share of all requests: rejected ones count as missed."""
    rejected: float = 0.0
    """Share of requests that were rejected. With more than 1 % no percentile is met."""
    requests_per_s: float
    output_tokens_per_s: float
    percentiles: dict[str, PercentileLimit] | msgspec.UnsetType = msgspec.UNSET
    """Percentile limits of the SLO, by the same names."""


class TimingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the times of some workers' passes."""

    kind: str
    """Kind of timing, such as ``roofline``."""
    source: str
    """In words."""
    error: float | None = None
    """The mean error of passes where it could be checked, a share (0.1 is 10 %); null if it isn't known."""
    held_out: dict[str, float] = {}
    """Errors of ``ttft``, ``tpot`` and ``e2e`` in measured time that was held out of a fit, as shares; empty without one."""
    run_class: RunClass | None = None
    """Published runs that it can be compared with; null where no published run is comparable."""
    workers: int
    """Workers with this timing."""


class StatedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Range in which a figure of this run would lie if it was measured."""

    low: float
    high: float
    """In the unit of the figure."""
    basis: str
    """``published``: 80 % of comparable published runs; ``held-out``: the error in held-out time of the fit's own run;
    ``passes``: the mean error of single passes."""
    of: str = ""
    """Class of those published runs."""
    runs: int = 0
    sources: int = 0


class WaterfallStep(msgspec.Struct, frozen=True, kw_only=True):
    """A level of reuse, and the step that leads down (or up) to it."""

    level: str
    """``infinite``, ``belady``, ``pooled``, ``routed``, ``believed``, ``kept`` or ``delivered``."""
    tokens: int
    """Prompt tokens that needn't be computed at this level."""
    change: int
    """From the level before; 0 for the first."""
    ms: float | None
    """Milliseconds of prefill that the change costs (or saves, below 0); ``None`` if that isn't known."""


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of reuse: from an endless cache to what was delivered."""

    steps: list[WaterfallStep] = msgspec.field(default_factory=list)
    absent: dict[str, str] = msgspec.field(default_factory=dict)
    """Levels that aren't given, with the reason."""


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions of the router, and the reuse that it missed."""

    policy: str
    decisions: int
    retries: int
    """Requests routed again because their worker failed."""
    regret: Share
    best: Share
    belief: Share
    """Share of expected prefixes that were still cached when needed."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part."""

    name: str
    role: str = "both"
    """Part of a request that it computes."""
    requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    loaded_tokens: int = 0
    """Prompt tokens that came from lower tiers."""
    computed_tokens: int | None = None
    """Prompt tokens computed, those computed again after a preemption included. This and what follows is null where only the
    engine knows: in a live run."""
    busy: float | None = None
    """Share of the run in which a pass was in flight."""
    preemptions: int | None = None
    passes: int | None = None
    evicted_blocks: int | None = 0
    tiers: dict[str, int] = msgspec.field(default_factory=dict)
    """Counters of its lower tiers, if it has any."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Totals in equal windows of time, from the first arrival to the last end."""

    window_s: float = 1.0
    arrived: list[int] = msgspec.field(default_factory=list)
    """Requests."""
    finished: list[int] = msgspec.field(default_factory=list)
    ttft_p50: list[float | None] = msgspec.field(default_factory=list)
    """Median of finished requests that arrived in the window, in milliseconds."""
    ttft_p99: list[float | None] = msgspec.field(default_factory=list)
    prompts: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """Prompt tokens by where they came from (a name of ``TIERS``) or why they had to be computed (a name of
    ``MISSES``), by window of first admission."""
    routed: list[list[int]] = msgspec.field(default_factory=list)
    """Requests, per worker."""
    routed_tokens: list[list[int]] = msgspec.field(default_factory=list)


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The state of every worker at points in time."""

    times_s: list[float] = msgspec.field(default_factory=list)
    values: dict[str, list[list[int | float]]] = msgspec.field(default_factory=dict)
    """Per quantity and worker: requests ``running``, ``waiting`` and ``loading``; shares ``device`` (held), ``filled`` (device
    blocks that hold something), and lower tiers by their labels (likewise)."""


class LiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a run against a live endpoint. Times are milliseconds of the endpoint's time."""

    endpoint: str
    model: str | None = None
    speed: float = 1.0
    """Factor by which its time passed faster than real time."""
    lateness: Spread = Spread()
    """Delay of sending after the due time. Latencies count from the due time."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Why requests have no answer, the most frequent reason first."""
    inexact: int = 0
    """Finished requests whose answer had another length than was asked for."""
    absent: list[str] = msgspec.field(default_factory=list)
    """Parts that this report lacks because no client can see them."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    kind: str = "kvyard report"
    version: int = VERSION
    made_by: str = ""
    """The version of kvyard."""
    label: str = ""
    trace: dict[str, object] = msgspec.field(default_factory=dict)
    digest: str = ""
    """Digest of the requests' ids and lengths: runs with equal digests had equal work."""
    config: dict[str, object] = msgspec.field(default_factory=dict)
    timing: list[TimingReport] = msgspec.field(default_factory=list)
    """Accuracy of the times: one for each kind of timing in the fleet. Empty in a live run, where a clock was read."""
    ranges: dict[str, StatedRange] = msgspec.field(default_factory=dict)
    """By metric, such as ``ttft_mean``, the range that comparable runs were measured in; a metric without evidence has none."""
    complete: bool = True
    """True if the run went to the end of its trace."""
    duration_s: float
    """From the first arrival to the last end."""
    requests: dict[str, int]
    """By how they ended, and in all."""
    input_tokens: int
    output_tokens: int
    throughput: dict[str, float]
    """Per second of the run."""
    latency: dict[str, Spread]
    """Milliseconds: ``ttft``, ``itl``, ``tpot``, ``e2e``, ``queue``."""
    percentiles: PercentileError | msgspec.UnsetType = msgspec.UNSET
    """Error bound of percentiles, of requests and of loads; left out if they are exact. Those of ``itl`` always are."""
    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)
    """``latency`` as histograms, for drawing."""
    lengths: dict[str, Spread] = msgspec.field(default_factory=dict)
    """Tokens: ``input``, ``output``."""
    reuse: dict[str, Share]
    """At first admission: each of ``TIERS`` and ``all`` of the prompt tokens. In a live run ``cached`` and
    ``all``, which are the same, or nothing where the endpoint doesn't say."""
    misses: dict[str, Share]
    """Why prefixes ended, by requests."""
    missed_tokens: dict[str, Share] = msgspec.field(default_factory=dict)
    """Why prompt tokens had to be computed. With ``reuse`` they are all there are."""
    goodput: Goodput | None = None
    balance: dict[str, float]
    """Balance of work: coefficient of variation and maximum over mean, of prompt tokens by worker, and the least and the
    most busy worker's share of time. Unknown values are left out."""
    router: RouterReport | None = None
    preemptions: int | None = None
    tiers: dict[str, TierReport] = msgspec.field(default_factory=dict)
    """Existing tiers of ``TIERS``."""
    transfers: dict[str, TransferReport] = msgspec.field(default_factory=dict)
    """By a name of ``MOVES``."""
    loading: Spread = Spread()
    """Milliseconds that requests waited for loads, of those that did."""
    left_requests: int = 0
    """Requests that began without something that lower tiers had: the load policy left it there."""
    left_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens left, by reason. Requests that were preempted count each time they begin."""
    handovers: HandoverReport | None = None
    """Hand-overs of a fleet with prefill and decode workers."""
    pulls: PullReport | None = None
    """Pulls, if workers may pull from each other."""
    scaling: ScalingReport | None = None
    """Scaling, if there is an autoscaler."""
    sessions: SessionsReport | msgspec.UnsetType = msgspec.UNSET
    """Left out where the trace has no sessions."""
    tenants: dict[str, TenantReport] | msgspec.UnsetType = msgspec.UNSET
    """The one with the most tokens first; left out where no request names one. Beyond 50 the others are put together."""
    cache_time: dict[str, CacheTime] | msgspec.UnsetType = msgspec.UNSET
    """By tier, what tenants' ``resident_token_s`` are shares of."""
    flow: FlowReport | msgspec.UnsetType = msgspec.UNSET
    """Left out where no request was held back before the router."""
    bounds: dict[str, Share] = msgspec.field(default_factory=dict)
    """Upper bounds of reuse, if they were asked for."""
    waterfall: Waterfall = Waterfall()
    """Losses of reuse, if bounds were asked for."""
    prefill_ms_per_token: float | None = None
    """Milliseconds of a prompt token in a full pass, on a worker of the first kind."""
    workers: list[WorkerReport]
    series: Series = Series()
    timeline: Samples = Samples()
    pools: "dict[str, Report] | msgspec.UnsetType" = msgspec.UNSET
    """Reports of a fleet's independent pools; left out of other reports."""
    live: LiveReport | None = None
    """Live part of a run against a live endpoint; parts that only a simulation knows are left out then."""

    @property
    def timing_error(self) -> float | None:
        """The largest error of its timings; ``None`` if one of them isn't known, or there is none."""
        known = [timing.error for timing in self.timing if timing.error is not None]
        return max(known) if known and len(known) == len(self.timing) else None
