"""The list of tiers: entries don't collide, and what must be written beside it is there for every tier."""

from __future__ import annotations

from collections import Counter

import pytest

from kvyard.events.tier import LOWER_TIERS, TIERS, Tier
from kvyard.events.types import Removed
from kvyard.events.wire.media import tier_of
from kvyard.lab.study.cost import Prices
from kvyard.replay.report.report import MOVES
from kvyard.replay.settings import SETTINGS
from kvyard.router import RouterConfig
from kvyard.server.mock.measures import CATALOG


def test_every_tier_has_an_entry_and_no_two_share_a_name() -> None:
    assert len(TIERS) == len(Tier) and [tier.value for tier in Tier] == list(range(1, len(Tier) + 1))
    for names in (
        [entry.label for entry in TIERS],
        [medium for entry in TIERS for medium in entry.media],
        [entry.service_name for entry in TIERS],
        [entry.color for entry in TIERS],
        [name for tier in LOWER_TIERS for name in (tier.entry.stores, tier.entry.loads)],
    ):
        assert all(names) and max(Counter(names).values()) == 1
    assert len(MOVES) == 2 * len(LOWER_TIERS) + 1


@pytest.mark.parametrize("tier", Tier)
def test_a_medium_that_we_write_is_read_as_its_tier(tier: Tier) -> None:
    entry = tier.entry
    assert tier_of(entry.medium) is tier and tier_of(tier.name) is tier and tier_of(entry.label) is tier
    assert Removed(hashes=[b"a"], tier=tier).tier.entry.metric_source in CATALOG["split"][CACHED]["values"]


CACHED = "vllm:prompt_tokens_cached_by_source"


@pytest.mark.parametrize("tier", LOWER_TIERS)
def test_every_lower_tier_has_its_settings(tier: Tier) -> None:
    label, entry = tier.label, tier.entry
    assert getattr(RouterConfig(), f"{label}_credit") == entry.credit
    assert RouterConfig().lower_credits[tier - 2] == entry.credit
    assert getattr(Prices(), label) == entry.price > 0
    names = ("blocks", "bytes", "bandwidth", "latency", "scope", "eviction", "eviction_options")
    assert {f"{label}_{name}" for name in names} <= set(SETTINGS)
    assert SETTINGS[f"{label}_scope"].default == entry.scope and entry.gb_s > 0
    # Routing by candidates needs credits whose sums aren't rounded.
    assert 0 <= entry.credit <= 1 and entry.credit * 1024 % 1 == 0


@pytest.mark.parametrize("medium", ["OBJ", "obj", "OBJECT_STORE", "object-store", "G5"])
def test_words_of_engines_for_object_stores(medium: str) -> None:
    """vLLM's (pull request 47923) and llm-d's. vLLM 0.32 says STORAGE of files and objects alike."""
    assert tier_of(medium) is Tier.G5 and tier_of("STORAGE") is Tier.G3
