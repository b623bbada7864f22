"""The metrics of a run: the one list that tables, pages, comparisons, goals and SLOs read.

To add a metric, add it to ``_all_metrics``. It is then a column of every study's CSV and JSON, can be a goal or a limit, and
is shown in tables and comparisons as its ``shown`` says.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from kvyard.replay.report.report import LATENCIES, TIERS, Report
from kvyard.replay.report.waterfall import LEVELS, LOSSES, lost_ms
from kvyard.replay.report.words import REASONS, SHORT, SOURCES, amount, latency, limit_time, measured, percent, whole

Unit = Literal["ms", "s", "per_s", "share", "count", "ratio", "bytes", "price"]
Better = Literal["low", "high", ""]
Shown = Literal["table", "rare", "comparison", "data"]
Read = Callable[[Report], float | None]

SECONDS_FROM = 10_000.0
"""Milliseconds from which a column or an axis is in seconds."""
MANY_TIMES = 10
"""Times as much from which a change is no percentage."""
NOISE = 0.005
"""Values that differ by at most this share are equally good."""
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
"""Statistics of each latency."""


class Metric(NamedTuple):
    """One number that a report has, or lacks."""

    key: str
    """Name in a comparison's JSON: ``ttft.p99``, ``reuse.all``."""
    title: str
    part: str
    """Heading in a comparison."""
    unit: Unit
    """``s``: milliseconds that are shown in seconds."""
    better: Better
    """Empty if neither direction is better."""
    read: Read
    """Return the value, or ``None`` if the run has none."""
    head: str
    """Heading of a narrow column."""
    shown: Shown = "table"
    """``table``: in every table. ``rare``: in tables where a run has any of it. ``comparison``: in comparisons.
    ``data``: in CSV and JSON alone, which have all metrics."""
    axis: str = ""
    """Title of an axis, where ``title`` needs its heading to be understood."""

    @property
    def name(self) -> str:
        """Name in goals, limits and Python: ``ttft_p99``, ``reuse``."""
        return self.key.removesuffix(".all").replace(".", "_")

    @property
    def column(self) -> str:
        """Name in CSV and JSON, with its unit: ``ttft_p99_ms``."""
        return f"{self.name}_ms" if self.timed else self.name

    @property
    def label(self) -> str:
        """Title of an axis or a chart, with its unit."""
        return self.axis or (f"{self.title}, {self.unit}" if self.timed else self.title)

    @property
    def heading(self) -> str:
        """Heading of a page's column."""
        return f"{self.title}, {self.unit}" if self.timed else self.head

    @property
    def timed(self) -> bool:
        """True for a time."""
        return self.unit in ("ms", "s")

    @property
    def factor(self) -> float:
        """Values times this are in the unit."""
        return 1e-3 if self.unit == "s" else 1.0

    def fitted(self, values: Iterable[float | None]) -> "Metric":
        """Return the metric in the unit that fits ``values``, which share a column or an axis."""
        most = max((value for value in values if value is not None), default=0.0)
        if self.unit != "ms" or most < SECONDS_FROM:
            return self
        return self._replace(unit="s", head=f"{self.head}, s")

    def text(self, value: float | None, unit: bool = False) -> str:
        """Return ``value`` for people, with its unit if it has one and ``unit`` is set; a dash for ``None``."""
        if value is None:
            return "–"
        if self.unit == "share":
            return percent(value)
        if self.unit == "bytes":
            return amount(value)
        if self.unit == "count":
            return whole(value)
        if self.unit == "ratio":
            return f"{value:.3f}"
        return latency(value) if unit and self.timed else measured(value * self.factor)

    def limit_text(self, value: float) -> str:
        """Return a limit that somebody set for people, with its unit."""
        return limit_time(value) if self.timed else self.text(value)

    def change(self, value: float | None, base: float | None) -> float | None:
        """Return the change from ``base``, relative to it; of shares the difference."""
        if value is None or base is None:
            return None
        if self.unit == "share":
            return value - base
        return (value - base) / base if base else None

    def change_text(self, value: float | None, base: float | None) -> str:
        """Return the change from ``base`` for people: percent, or how many times as much; of shares percentage points; empty if
        there is none.
        """
        change = self.change(value, base)
        if change is None:
            return ""
        if change >= MANY_TIMES - 1 and self.unit != "share":
            return f"×{change + 1:,.0f}"
        text = f"{change * 100:+.1f}"
        if float(text) == 0:
            text = "±0"
        return f"{text} pt" if self.unit == "share" else f"{text}%"

    def loss(self, value: float) -> float:
        """Return ``value`` so that smaller is better."""
        return -value if self.better == "high" else value

    def beats(self, value: float | None, other: float | None) -> int:
        """Return 1 if ``value`` is better than ``other``, -1 if it is worse, 0 if they are equally good or one is unknown."""
        if value is None or other is None or not self.better:
            return 0
        if abs(value - other) <= NOISE * max(abs(value), abs(other)):
            return 0
        return 1 if self.loss(value) < self.loss(other) else -1

    def best(self, values: Sequence[float | None]) -> list[int]:
        """Return the positions of the best values; empty if no value is better than the others."""
        known = [value for value in values if value is not None]
        if not known or not self.better:
            return []
        top = min(known, key=self.loss)
        best = [
            index for index, value in enumerate(values) if value is not None and abs(value - top) <= NOISE * abs(top)
        ]
        return best if len(best) < len(known) else []


def _latency(kind: str, statistic: str) -> Read:
    def read(report: Report) -> float | None:
        spread = report.latency.get(kind)  # a live run has no queue
        return float(getattr(spread, statistic)) if spread is not None and spread.count else None

    return read


def _session(kind: str, statistic: str) -> Read:
    def read(report: Report) -> float | None:
        spread = getattr(report.sessions, kind) if report.sessions else None
        return float(getattr(spread, statistic)) if spread is not None and spread.count else None

    return read


def _session_reuse(kind: str) -> Read:
    def read(report: Report) -> float | None:
        return report.sessions.reuse[kind].value if report.sessions and report.sessions.reuse else None

    return read


def _rate(name: str) -> Read:
    return lambda report: report.throughput[name]


def _requests(status: str) -> Read:
    return lambda report: report.requests.get(status, 0)


def _reused(source: str) -> Read:
    return lambda report: report.reuse[source].value if source in report.reuse else None


def _missed(reason: str) -> Read:
    def read(report: Report) -> float | None:
        if report.live is not None and reason != "unknown":
            return None  # a client can't see why something had to be computed
        return report.missed_tokens[reason].value if reason in report.missed_tokens else 0.0

    return read


def _level(key: str) -> Read:
    def read(report: Report) -> float | None:
        tokens = [step.tokens for step in report.waterfall.steps if step.level == key]
        return tokens[0] / report.reuse["all"].whole if tokens and report.reuse["all"].whole else None

    return read


def _lost(key: str) -> Read:
    return lambda report: lost_ms(report).get(key)


def _rejected_share(report: Report) -> float:
    return report.requests.get("rejected", 0) / max(1, report.requests["all"])


def _within_slo(report: Report) -> float | None:
    return report.goodput.requests.part / max(1, report.requests["all"]) if report.goodput is not None else None


SERVED = 0.9
"""Share of the offered requests below which, where they queue, a fleet is overloaded."""


def offered_per_s(report: Report) -> float | None:
    """Return requests that arrived per second, from the first arrival to the last; ``None`` if that isn't known."""
    arrived, window = report.series.arrived, report.series.window_s
    last = max((window_number for window_number, count in enumerate(arrived, 1) if count), default=0)
    return sum(arrived) / (last * window) if last > 1 else None


IN_TABLES = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "itl_mean",
    "itl_p99",
    "e2e_mean",
    "e2e_p99",
    "queue_mean",
)
IN_COMPARISONS = ("itl_p50", "e2e_p50", "queue_p99")


def _latencies() -> Iterator[Metric]:
    for kind in LATENCIES:
        for statistic in STATISTICS:
            name = f"{kind}_{statistic}"
            shown: Shown = "table" if name in IN_TABLES else "comparison" if name in IN_COMPARISONS else "data"
            title = f"{SHORT[kind]} {statistic}"
            head = SHORT[kind] if statistic == "mean" else title
            yield Metric(
                f"{kind}.{statistic}", title, "Latency, ms", "ms", "low", _latency(kind, statistic), head, shown
            )


def _all_metrics() -> Iterator[Metric]:
    yield from _latencies()
    part = "Throughput, per second"
    yield Metric("requests_per_s", "Requests", part, "per_s", "high", _rate("requests_per_s"), "req/s",
                 axis="Requests finished per second")  # fmt: skip
    yield Metric("offered_requests_per_s", "Requests offered", part, "per_s", "", offered_per_s, "offered/s", "data",
                 axis="Requests that arrived per second")  # fmt: skip
    yield Metric("output_tokens_per_s", "Output tokens", part, "per_s", "high", _rate("output_tokens_per_s"), "out tok/s",
                 axis="Output tokens per second")  # fmt: skip
    yield Metric("goodput_requests_per_s", "Requests per second within the SLO", part, "per_s", "high",
                 lambda report: report.goodput.requests_per_s if report.goodput else None, "good/s", "rare")  # fmt: skip
    yield Metric("goodput", "Requests within the SLO", part, "share", "high",
                 lambda report: report.goodput.requests.value if report.goodput else None, "good", "comparison",
                 axis="Requests within the SLO / all")  # fmt: skip
    yield Metric("within_slo", "Share of requests within the SLO", part, "share", "high", _within_slo, "within", "data",
                 axis="Requests that finished within the SLO / all")  # fmt: skip
    part = "Of prompt tokens"
    yield Metric("reuse.all", "Reused in all", part, "share", "high", _reused("all"), "reused",
                 axis="Prompt tokens reused / admitted")  # fmt: skip
    for tier in TIERS:
        yield Metric(f"reuse.{tier}", SOURCES[tier], part, "share", "", _reused(tier), tier,
                     "table" if tier == "device" else "rare", axis=f"{SOURCES[tier]} / admitted")  # fmt: skip
    yield Metric("pulled", "Pulled from other workers", part, "share", "",
                 lambda report: report.pulls.tokens.value if report.pulls is not None else None, "pulled", "rare",
                 axis="Prompt tokens pulled from other workers / admitted")  # fmt: skip
    for reason, words in REASONS.items():
        yield Metric(f"missed.{reason}", f"Computed: {words.lower()}", part, "share", "", _missed(reason), reason,
                     "comparison")  # fmt: skip
    for level, words in LEVELS.items():
        yield Metric(f"waterfall.{level}", words.capitalize(), "Where the reuse went, of prompt tokens", "share",
                     "high" if level == "delivered" else "", _level(level), level, "comparison")  # fmt: skip
    for level, words in LOSSES.items():
        yield Metric(f"lost.{level}", words.capitalize(), "Prefill lost by, ms in all", "ms", "", _lost(level), level,
                     "comparison")  # fmt: skip
    yield from _sessions()
    part = "Fleet"
    yield Metric("finished", "Requests finished", part, "count", "high", _requests("finished"), "finished", "data")
    yield Metric("rejected", "Requests rejected", part, "count", "low", _requests("rejected"), "rejected", "rare")
    yield Metric(
        "rejected_share", "Requests rejected, of all", part, "share", "low", _rejected_share, "rejected", "data"
    )
    yield Metric("preemptions", "Preemptions", part, "count", "low", lambda report: report.preemptions, "preempted",
                 "rare")  # fmt: skip
    yield Metric("evicted", "Device blocks evicted", part, "count", "",
                 lambda report: report.tiers["device"].evicted_blocks if report.tiers else None, "evicted",
                 "comparison")  # fmt: skip
    yield Metric("moved", "Bytes moved between tiers", part, "bytes", "",
                 lambda report: sum(flow.bytes for flow in report.transfers.values()) if report.tiers else None, "moved",
                 "comparison")  # fmt: skip
    yield Metric("regret", "Router regret", part, "share", "low",
                 lambda report: report.router.regret.value if report.router and report.router.regret.whole else None,
                 "regret", axis="Cached blocks left on the table / seen")  # fmt: skip
    yield Metric("balance", "Prompt tokens, most / mean", part, "ratio", "low",
                 lambda report: report.balance.get("max_over_mean"), "balance",
                 axis="Prompt tokens of the busiest worker / mean")  # fmt: skip


def _sessions() -> Iterator[Metric]:
    part = "Sessions"
    compared = ("mean", "p90", "p99")
    for kind, key, title, unit in (
        ("completion", "session", "Session", "ms"),
        ("service", "session_service", "Session without tools and think time,", "ms"),
        ("slowdown", "session_slowdown", "Session slowdown", "ratio"),
    ):
        for statistic in STATISTICS:
            shown: Shown = "comparison" if statistic in compared else "data"
            if key == "session" and statistic in ("mean", "p90"):
                shown = "rare"
            read, head = _session(kind, statistic), f"{key.replace('_', ' ')} {statistic}"
            yield Metric(f"{key}.{statistic}", f"{title} {statistic}", part, unit, "low", read, head, shown)  # type: ignore[arg-type]
    yield Metric("session_jain", "Jain's index of session slowdowns", part, "ratio", "high",
                 lambda report: report.sessions.jain if report.sessions else None, "jain", "comparison")  # fmt: skip
    yield Metric("session_migrations", "Session requests that changed workers", part, "share", "",
                 lambda report: report.sessions.migrations.value if report.sessions else None, "moved",
                 "comparison")  # fmt: skip
    for kind, words in (("within", "reused within sessions"), ("across", "reused across sessions")):
        yield Metric(f"session_reuse.{kind}", f"Prompt tokens {words}", part, "share", "", _session_reuse(kind), kind,
                     "comparison")  # fmt: skip


METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _all_metrics()}
"""All metrics by name, in the order of tables."""
COST = Metric("cost", "Cost per hour", "Fleet", "price", "low", lambda report: None, "cost")
"""Price of a fleet. It follows from a configuration and not from a report, so whoever knows prices fills it in."""


def read_metrics(report: Report) -> dict[str, float | None]:
    """Return all metrics of ``report`` by name."""
    return {name: metric.read(report) for name, metric in METRICS.items()}
