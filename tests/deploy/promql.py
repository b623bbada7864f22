"""Which metrics and labels a query asks for. As much of PromQL as our dashboard has; anything else is an error."""

from __future__ import annotations

import re
from typing import NamedTuple

FUNCTIONS = {"rate", "increase", "sum", "max", "min", "avg", "histogram_quantile", "label_values"}
_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<range>\[[^\]]+\])|(?P<matchers>\{[^}]*\})|(?P<by>by\s*\((?P<labels>[^)]*)\))
      |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<number>\d+(\.\d+)?)|(?P<sign>[()/*+,-])""",
    re.VERBOSE,
)
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')


class Asked(NamedTuple):
    """One query's."""

    metrics: dict[str, set[str]]
    """Metrics, and the labels that are matched."""
    by: set[str]
    """Labels that results are grouped by."""


def asked(query: str) -> Asked:
    """Raises ``AssertionError`` for what isn't understood."""
    metrics: dict[str, set[str]] = {}
    by: set[str] = set()
    at = depth = 0
    last = ""
    while at < len(query):
        found = _TOKEN.match(query, at)
        assert found is not None, f"{query}: can't read {query[at:]!r}"
        at = found.end()
        if found["by"]:
            by |= {label.strip() for label in found["labels"].split(",")}
        elif found["name"]:
            if query[at:].lstrip()[:1] == "(" or re.match(r"\s*by\b", query[at:]):
                assert found["name"] in FUNCTIONS, f"{query}: {found['name']} is no function that is known here"
            else:
                last = found["name"]
                metrics.setdefault(last, set())
        elif found["matchers"]:
            text = found["matchers"][1:-1]
            assert last and _MATCHER.sub("", text) == "", f"{query}: can't read {{{text}}}"
            metrics[last] |= {label for label, _, _ in _MATCHER.findall(text)}
        elif found["sign"]:
            depth += {"(": 1, ")": -1}.get(found["sign"], 0)
            assert depth >= 0, query
    assert depth == 0, query
    return Asked(metrics, by)
