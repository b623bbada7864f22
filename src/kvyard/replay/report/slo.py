"""How an SLO is written: ``ttft=500,itl=20`` or ``ttft_p99<1s``. The one reader of it, for the command line and for Python."""

import re
from collections.abc import Mapping

import msgspec

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.replay.report.report import Slo
from kvyard.settings import TIMES

PERCENTILES = ("p50", "p90", "p95", "p99")
OF_A_RUN = ("ttft", "itl", "tpot", "e2e")
"""What a percentile can be of, as in the report's table."""
OF_A_REQUEST = ("ttft", "itl", "e2e")
FORM = "as in ttft=500,itl=20 or ttft_p99<1s"
_PART = re.compile(r"\s*([a-z0-9_]+)\s*(?:<=|<|=)\s*(.*?)\s*")
_LIMIT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)\s*([a-zµ]*)")


def read_slo(slo: Slo | Mapping[str, float | str] | str | None) -> Slo | None:
    """An SLO from text or a mapping, in milliseconds unless a unit is given. Raises ``KvyardError``."""
    if slo is None or isinstance(slo, Slo):
        return slo
    given = _parts(slo) if isinstance(slo, str) else dict(slo)
    limits: dict[str, float] = {}
    percentiles: dict[str, float] = {}
    for name, value in given.items():
        kind, _, percentile = name.partition("_")
        limit = milliseconds(value)
        if not 0 < limit < float("inf"):
            raise KvyardError(f"an SLO has times above 0, {FORM}; not {name}={value}")
        if name in OF_A_REQUEST:
            limits[name] = limit
        elif percentile in PERCENTILES and kind in OF_A_RUN:
            percentiles[name] = limit
        else:
            raise KvyardError(
                f"an SLO is about {', '.join(OF_A_REQUEST)} of each request, or about {', '.join(PERCENTILES)} of "
                f"{', '.join(OF_A_RUN)}, {FORM}; not {name}={value}"
            )
    if not limits and not percentiles:
        raise KvyardError(f"an SLO needs a limit, {FORM}")
    return Slo(**limits, percentiles=percentiles or msgspec.UNSET)


def _parts(text: str) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for part in text.split(","):
        matched = _PART.fullmatch(part)
        if matched is None:
            raise KvyardError(f"an SLO has names and times, {FORM}; not {part.strip()!r}")
        if matched[1] in found:
            raise KvyardError(f"{matched[1]} is given twice in the SLO: leave one of the two out")
        found[matched[1]] = matched[2]
    return found


def milliseconds(value: object) -> float:
    """A time from a number, or from text with or without its unit; -1 for what is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    matched = _LIMIT.fullmatch(value) if isinstance(value, str) else None
    if matched is None or (matched[2] and matched[2] not in TIMES):
        return -1.0
    return float(matched[1].replace("_", "")) * (TIMES[matched[2]] / MS if matched[2] else 1.0)
