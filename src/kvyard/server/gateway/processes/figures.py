"""Metrics of several processes merged for Prometheus, as one server would have them.

Counters and histograms add up, those of processes that have ended included: a sum that fell would look like a restart. Every
process follows the same event streams and looks at the same engines: of these metrics the maximum counts, not the sum,
and where the maximum falls because a process ended, it is raised by the difference from then on.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvyard.server.gateway.traffic import P
from kvyard.server.health import HealthReason

Sampled = tuple[str, dict[str, str], float]
Family = tuple[str, str, str, list[Sampled]]
"""A metric's name, type, text, and samples."""
Figures = list[Family]

COMMON = ("kvyard_index_", "kvcache_", P + "stream_")
"""Prefixes of metrics of which every process has the whole."""
MOST = frozenset(
    P + name
    for name in (
        *("degraded", "engine_draining", "engine_downs", "reloads", "share_connected", "share_peers"),
        *("processes", "garbage_longest_seconds"),
    )
)
LEAST = frozenset({P + "engine_up", P + "recording"})
ENGINE = "engine"


class HubState(msgspec.Struct, kw_only=True):
    """Parent's own state."""

    processes: list[int]
    """Their numbers, ready or not."""
    reasons: list[HealthReason]
    samples: dict[str, float]
    """By metric, without the prefix."""


def gathered_figures(registry: Any) -> Figures:
    """Return all that a process has."""
    return [
        (
            family.name,
            family.type,
            family.documentation,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples],
        )
        for family in registry.collect()
    ]


def ended_figures(ended: Figures, last: Figures, others: Sequence[Figures]) -> Figures:
    """Return the addition to the figures of ``others``, which go on, now that one more process ended that had ``last``."""
    most = {
        (sample, tuple(labels.items())): value
        for _, _, _, samples in _merged(others)
        for sample, labels, value in samples
    }
    lasting: Figures = []
    for name, kind, text, samples in last:
        if kind not in ("counter", "histogram"):
            continue
        if not _adds_up(name):
            samples = [
                (sample, labels, value - most.get((sample, tuple(labels.items())), 0))
                for sample, labels, value in samples
                if value > most.get((sample, tuple(labels.items())), 0) and not sample.endswith("_created")
            ]
        lasting.append((name, kind, text, samples))
    return _merged([ended, lasting], added=True)


def merged_figures(ended: Figures, parts: Sequence[Figures]) -> Figures:
    """Return all processes together. Engines that none of them has any more are left out."""
    engines = {labels[ENGINE] for _, _, _, samples in _all(parts) for _, labels, _ in samples if ENGINE in labels}
    there = {(sample, tuple(labels.items())) for _, _, _, samples in _all(parts) for sample, labels, _ in samples}
    lasting = [
        (
            name,
            kind,
            text,
            [
                sample
                for sample in samples
                if sample[1].get(ENGINE) in (None, *engines)
                and (_adds_up(name) or (sample[0], tuple(sample[1].items())) in there)
            ],
        )
        for name, kind, text, samples in ended
    ]
    return _merged([_merged(parts), lasting], added=True)


def figures_text(figures: Figures) -> tuple[bytes, str]:
    """Return the metrics in Prometheus' text format, and its media type."""
    from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest

    class Collected:
        def collect(self) -> Iterable[Any]:
            for name, kind, text, samples in figures:
                family = Metric(name, text, kind)
                for sample, labels, value in samples:
                    family.add_sample(sample, labels, value)
                yield family

    return generate_latest(Collected()), CONTENT_TYPE_LATEST


def _all(parts: Sequence[Figures]) -> Iterable[Family]:
    return (family for figures in parts for family in figures)


def _adds_up(name: str) -> bool:
    return name not in MOST and name not in LEAST and not name.startswith(COMMON)


def _merged(parts: Sequence[Figures], *, added: bool = False) -> Figures:
    """Put together; ``added``: all that is in several adds up."""
    families: dict[str, tuple[str, str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for name, kind, text, samples in _all(parts):
        values = families.setdefault(name, (kind, text, {}))[2]
        for sample, labels, value in samples:
            key = (sample, tuple(labels.items()))
            known = values.get(key)
            if known is None:
                values[key] = value
            elif sample.endswith("_created") or name in LEAST:
                values[key] = min(known, value)
            elif added or _adds_up(name):
                values[key] = known + value
            else:
                values[key] = max(known, value)
    return [
        (name, kind, text, [(sample, dict(labels), value) for (sample, labels), value in values.items()])
        for name, (kind, text, values) in families.items()
    ]
