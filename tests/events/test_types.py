"""Names of tiers."""

from __future__ import annotations

from kvyard.events import Tier


def test_tiers_are_named_once() -> None:
    labels, places = [tier.label for tier in Tier], [tier.place for tier in Tier]
    assert len(set(labels)) == len(labels) and len(set(places)) == len(places)
