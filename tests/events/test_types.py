"""What tiers are called."""

from __future__ import annotations

from kvyard.events import Tier


def test_names_of_tiers() -> None:
    assert [tier.label for tier in Tier] == ["device", "host", "storage", "remote", "object"]
    assert [tier.place for tier in Tier] == ["device memory", "host memory", "storage", "remote storage"]
