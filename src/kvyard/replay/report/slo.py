"""SLOs: how they are written, which requests are good, and by how much a run misses its limits. The one place for all three.

``ttft=500,itl=20`` limits each request, ``ttft_p99<1s`` the run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.clock import MS
from kvyard.engine.timing.error_range import KNEE
from kvyard.errors import KvyardError
from kvyard.replay.report.metrics import COST, METRICS, SERVED, STATISTICS, Metric, read_metrics
from kvyard.replay.report.numbers import Spread
from kvyard.replay.report.report import LATENCIES, REJECTED, PercentileLimit, Report, Slo, too_many_rejected
from kvyard.replay.report.words import percent
from kvyard.settings import TIMES, number

OF_A_REQUEST = ("ttft", "itl", "e2e")
SESSION = "session"
SESSIONS = (SESSION, "session_service", "session_slowdown")
"""Metrics of each session."""
OF_A_RUN = tuple(
    f"{kind}_{part}" for kind in (*OF_A_REQUEST, "tpot", SESSION) for part in STATISTICS if part.startswith("p")
)
"""Percentiles that a replay's SLO can limit."""
WITHIN = 0.99
"""Share of requests that must be good for a run to keep the limits of single requests."""
RULE = f"Rejected requests count as missed: with more than {REJECTED:.0%} of them no SLO is met."
"""The rule that replays, sweeps, leagues, searches and plans share."""
FORM = "as in ttft=500,itl=20 or ttft_p99<1s"
WANTED: Mapping[str, Metric] = {**METRICS, COST.name: COST}
"""Metrics that can be a goal or a limit."""
_PART = re.compile(r"\s*([\w.]+)\s*(<=|>=|≤|≥|<|>|=)\s*(\S.*?)\s*")
_SIGN = re.compile(r"[<>=≤≥]")
_TIME = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*([a-zµ]*)")


class Limit(msgspec.Struct, frozen=True):
    """Largest allowed value of a metric, or the smallest if more of it is better."""

    name: str
    value: float

    def __str__(self) -> str:
        metric = WANTED[self.name]
        return f"{self.name} {'≥' if metric.better == 'high' else '≤'} {metric.limit_text(self.value)}"

    def violation(self, value: float) -> float:
        """Return by which share of the limit ``value`` misses it; 0 or less if it is kept."""
        missed = self.value - value if WANTED[self.name].better == "high" else value - self.value
        return missed / self.value if self.value else missed


def read_slo(slo: Slo | Mapping[str, float | str] | str | None) -> Slo | None:
    """Return the SLO of a replay from text or a mapping, in milliseconds unless a unit is given. Raises ``KvyardError``."""
    if slo is None or isinstance(slo, Slo):
        return slo
    given = {name: value for name, value in _upper(slo)} if isinstance(slo, str) else dict(slo)
    limits: dict[str, float] = {}
    percentiles: dict[str, float] = {}
    for name, value in given.items():
        limit = milliseconds(value)
        if not 0 < limit < float("inf"):
            raise KvyardError(f"an SLO has times above 0, {FORM}; not {name}={value}")
        if name in OF_A_REQUEST:
            limits[name] = limit
        elif name in OF_A_RUN:
            percentiles[name] = limit
        else:
            raise KvyardError(
                f"an SLO is about {', '.join(OF_A_REQUEST)} of each request, or about percentiles of the run such as "
                f"{', '.join(OF_A_RUN[:4])}, {FORM}; not {name}={value}"
            )
    if not limits and not percentiles:
        raise KvyardError(f"an SLO needs a limit, {FORM}")
    return Slo(**limits, percentiles=percentiles or msgspec.UNSET)


def parse_limits(text: str | None) -> list[Limit]:
    """Return limits of any metrics from text such as ``ttft_p99=1000,reuse>=20%,cost<20``. Raises ``KvyardError``."""
    limits: list[Limit] = []
    for part, name, sign, value in _parts(text) if text is not None else ():
        if name in (*LATENCIES, *SESSIONS):
            choices = ", ".join(f"{name}_{statistic}" for statistic in STATISTICS)
            raise KvyardError(
                f"--slo {part}: of which requests? Write {name}_p99={value}, or one of {choices}; "
                "a time without a unit is in milliseconds"
            )
        metric = wanted_metric(name, "--slo")
        if sign in ("<", "<=", "≤") if metric.better == "high" else sign in (">", ">=", "≥"):
            least = "at least" if metric.better == "high" else "at most"
            raise KvyardError(f"--slo {part}: a limit says what {name} is {least}; turn the sign round")
        limits.append(Limit(name, _value(part, metric, value)))
    return limits


def wanted_metric(name: str, flag: str) -> Metric:
    """Return the metric that ``flag`` names as a goal or a limit. Raises ``KvyardError``."""
    from difflib import get_close_matches

    if name in WANTED and WANTED[name].better:
        return WANTED[name]
    known = [metric.name for metric in WANTED.values() if metric.better]
    turned = "_".join(reversed(name.split("_")))
    near = [turned] if turned in known else get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    spread = (*LATENCIES, *SESSIONS)
    plain = [metric for metric in known if metric.rpartition("_")[0] not in spread]
    raise KvyardError(
        f"{flag}: there is no metric {name!r} with a better direction: {hint}There are {', '.join(plain)}, and of "
        f"{', '.join(spread)} each of {', '.join(STATISTICS)}, as in ttft_p99"
    )


def good_requests(
    slo: Slo, ttft: npt.NDArray[np.int64], e2e: npt.NDArray[np.int64], tpot: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return which finished requests are good, from their times in nanoseconds; ``tpot`` is NaN for answers of one token."""
    good = np.ones(len(ttft), dtype=np.bool_)
    for name, times in (("ttft", ttft), ("e2e", e2e), ("itl", tpot)):
        limit = slo.limit(name)
        if limit is not None:
            good &= ~(times > limit * MS)
    return good


def judged_percentiles(
    slo: Slo, latency: Mapping[str, Spread], finished: int, rejected_share: float, sessions: Spread | None = None
) -> dict[str, PercentileLimit]:
    """Return each percentile that ``slo`` limits beside its limit; ``sessions`` are completion times. A run that finished no
    request or rejected too many meets none, and one without a finished session none of sessions.
    """
    served = bool(finished) and not too_many_rejected(rejected_share)
    judged = {}
    for name, limit in (slo.percentiles or {}).items():
        kind, _, percentile = name.partition("_")
        spread = sessions if kind == SESSION else latency[kind]
        value = float(getattr(spread, percentile)) if spread is not None else 0.0
        known = kind != SESSION or (spread is not None and spread.count > 0)
        judged[name] = PercentileLimit(limit_ms=limit, value_ms=value, met=served and known and value <= limit)
    return judged


def limits_of(slo: Slo) -> list[Limit]:
    """Return what a run must keep to keep ``slo``."""
    each = [Limit("within_slo", WITHIN)] if any(getattr(slo, name) is not None for name in OF_A_REQUEST) else []
    return each + [Limit(name, ms) for name, ms in (slo.percentiles or {}).items()]


def violation(values: Mapping[str, float | None], limits: Sequence[Limit]) -> float:
    """Return by how much a run with these metrics misses ``limits``, as shares of them added up; 0 if it keeps all.
    Too many rejected requests count as a miss.

    A metric that the run lacks, as ITL where answers have one token, misses nothing; one of sessions is missed, since a run
    without a finished session can't keep it.
    """
    missed = 0.0
    for limit in limits:
        value = values.get(limit.name)
        if value is not None:
            missed += max(0.0, limit.violation(value))
        elif _is_of_sessions(limit):
            missed += 1.0
    rejected = values.get("rejected_share") or 0.0
    return missed + (rejected / REJECTED if too_many_rejected(rejected) else 0.0)


def rejections_alone(values: Mapping[str, float | None], limits: Sequence[Limit]) -> bool:
    """Return true if too many rejected requests are all that keeps a run from its limits."""
    return violation(values, limits) > 0 >= violation({**values, "rejected_share": 0.0}, limits)


def without_value(values: Mapping[str, float | None], limits: Sequence[Limit]) -> str:
    """Return the first limited metric that a run doesn't have, which would be kept by every run; empty if there is none. Times
    between tokens are no such metric: answers of one token have none.
    """
    for limit in limits:
        if values.get(limit.name) is None and not limit.name.startswith(("itl_", "tpot_")):
            return limit.name
    return ""


def _is_of_sessions(limit: Limit) -> bool:
    return limit.name.startswith(f"{SESSION}_")


def missed(values: Mapping[str, float | None], limits: Sequence[Limit]) -> str:
    """Return the limits that ``values`` miss, with what is there instead, and overload; empty if all are kept."""
    misses = []
    for limit in limits:
        value, metric = values.get(limit.name), WANTED[limit.name]
        if value is not None and limit.violation(value) > 0:
            misses.append(f"{metric.title} is {metric.text(value, unit=True)} (limit {metric.limit_text(limit.value)})")
        elif value is None and _is_of_sessions(limit):
            why = "no session finished" if values.get("session_mean") is None else "its sessions weren't replayed alone"
            misses.append(f"{metric.title} isn't known: {why} (limit {metric.limit_text(limit.value)})")
    rejected = values.get("rejected_share") or 0.0
    if too_many_rejected(rejected):
        misses.append(f"{percent(rejected)} of the requests are rejected (limit {REJECTED:.0%})")
    if misses and (overload := overload_text(values)):
        misses.append(overload)
    return ", ".join(misses)


def kept(values: Mapping[str, float | None], limits: Sequence[Limit]) -> str:
    """Return each metric of ``limits`` beside its limit."""
    parts = []
    for limit in limits:
        metric = WANTED[limit.name]
        value = metric.text(values.get(limit.name), unit=True)
        parts.append(f"{metric.title} is {value} (limit {metric.limit_text(limit.value)})")
    return ", ".join(parts)


class Verdict(NamedTuple):
    """Verdict of a run's SLO."""

    met: bool
    why: str
    """Figures beside their limits: those that miss, or all if none does."""


def judge(report: Report, limits: Sequence[Limit] = ()) -> Verdict | None:
    """Return the verdict on ``report`` by ``limits``, or by its own SLO; ``None`` without either."""
    if not limits:
        if report.goodput is None:
            return None
        limits = limits_of(report.goodput.slo_ms)
    values = read_metrics(report)
    if not report.requests.get("finished"):
        return Verdict(False, "no request finished")
    if violation(values, limits) > 0:
        return Verdict(False, missed(values, limits))
    return Verdict(True, kept(values, limits))


def overload_text(values: Mapping[str, float | None]) -> str:
    """Say that a fleet serves clearly fewer requests than arrive and lets them queue; else empty."""
    served, offered = values.get("requests_per_s"), values.get("offered_requests_per_s")
    queue, first = values.get("queue_mean"), values.get("ttft_mean")
    if served is None or offered is None or queue is None or not first:
        return ""
    if served > SERVED * offered or queue < KNEE * first:
        return ""
    return f"overloaded, {served:,.2f} of {offered:,.2f} requests a second served"


def milliseconds(value: object) -> float:
    """Return a time from a number, or from text with or without its unit; -1 for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    matched = _TIME.fullmatch(value) if isinstance(value, str) else None
    if matched is None or (matched[2] and matched[2] not in TIMES):
        return -1.0
    return float(matched[1].replace("_", "")) * (TIMES[matched[2]] / MS if matched[2] else 1.0)


def _parts(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield each limit of ``text`` as it is written, its name, its sign and its value."""
    names: set[str] = set()
    for part in text.split(","):
        matched = _PART.fullmatch(part)
        if matched is None:
            raise KvyardError(f"an SLO has names and limits, {FORM}; not {part.strip()!r}")
        if _SIGN.search(matched[3]):
            raise KvyardError(f"an SLO has commas between its limits, {FORM}; not {part.strip()!r}")
        name = matched[1].lower()
        if name in names:
            raise KvyardError(f"{name} is named twice in the SLO: leave one of the two out")
        names.add(name)
        yield part.strip(), name, matched[2], matched[3]


def _upper(text: str) -> Iterator[tuple[str, str]]:
    for part, name, sign, value in _parts(text):
        if sign in (">", ">=", "≥"):
            raise KvyardError(f"an SLO of a replay has largest times, {FORM}; not {part}")
        yield name, value


def _value(part: str, metric: Metric, value: str) -> float:
    try:
        if metric.unit == "ms":
            limit = milliseconds(value)
        elif metric.unit == "share" and value.endswith("%"):
            limit = number("", value[:-1]) / 100
        else:
            limit = number("", value)
    except KvyardError:
        limit = -1.0
    if not 0 < limit < float("inf"):
        unit = "milliseconds, or a time with its unit such as 1s" if metric.unit == "ms" else "a number"
        raise KvyardError(f"--slo {part}: a limit is {unit}, above 0")
    if metric.unit == "share" and limit > 1:
        raise KvyardError(f"--slo {part}: {metric.name} is a share, at most 1 or 100%")
    return limit
