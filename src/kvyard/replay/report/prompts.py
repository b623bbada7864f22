"""Where each prompt token of a request came from, or why it had to be computed. Every token has one answer."""

from __future__ import annotations

from kvyard.replay.record import Record
from kvyard.replay.report.report import TIERS

_WHOLE = frozenset({"none", "partial_block", "unknown"})
"""Reasons that hold for all that is left of a prompt."""


def sources(record: Record) -> dict[str, int]:
    """Prompt tokens of an admitted request by tier (``TIERS``) or by a name of ``MISSES``; together they are the prompt.

    A prefix that another worker had may be short, and what follows it new: it counts as what it is, whatever ended the prefix.
    """
    found = dict(zip(TIERS, (record.cached, *record.loaded)))
    rest = record.input - sum(found.values())
    if record.miss in _WHOLE:
        return {**found, record.miss: rest}
    lost, elsewhere = record.lost, record.elsewhere
    return {
        **found,
        "evicted": lost,
        "other_worker": elsewhere,
        "never_seen": rest - lost - elsewhere,
    }
