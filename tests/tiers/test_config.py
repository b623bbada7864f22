"""Configurations that can't work are refused in one sentence that names the key."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiers.support import tiers

from kvyard.blocks import BlockManager, GroupSpec
from kvyard.blocks.spec import ConfigError
from kvyard.tiers import Offload, OffloadConfig, TierConfig, Timeline, parse_offload_config
from kvyard.tiers.links import PRESETS


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "num_blocks or bytes: give one"),
        ({"num_blocks": 1, "bytes": 1}, "num_blocks or bytes: give one"),
        ({"num_blocks": 0}, "num_blocks of a tier must be"),
        ({"bytes": 1.5}, "bytes of a tier must be"),
        ({"num_blocks": 1, "scope": "public"}, "unknown scope 'public': choose one of private, shared"),
        ({"num_blocks": 1, "eviction": "fifo"}, "unknown eviction policy 'fifo'"),
    ],
)
def test_tiers(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": "sometimes"}, "unknown offload policy 'sometimes': choose one of write_through"),
        ({"events": "none"}, "unknown events 'none'"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk must be"),
        ({"offload_batch_size": 0}, "offload_batch_size must be"),
        ({"offload_batch_size": 6, "blocks_per_chunk": 4}, "offload_batch_size 6 must be a multiple"),
        ({"min_uses": 2}, "min_uses is for the policy after_hits"),
        ({"policy": "after_hits", "min_uses": 1}, "min_uses must be 2 or more"),
        ({"offload_ahead": 8}, "offload_ahead is for the policy on_eviction"),
        ({"on_unclean": "drop"}, "on_unclean is for the policy on_eviction"),
        ({"policy": "on_eviction", "on_unclean": "panic"}, "unknown on_unclean 'panic'"),
        ({"policy": "on_eviction", "offload_ahead": 0}, "offload_ahead must be"),
        ({"policy": "on_eviction", "blocks_per_chunk": 2}, "on_eviction copies single blocks"),
        ({"policy": "lazy", "blocks_per_chunk": 2}, "lazy copies single blocks"),
        ({"spill": "on_eviction"}, "spill on_eviction is for a tier with another below it"),
        ({"spill": "never"}, "unknown spill 'never'"),
        (
            {"policy": "exclusive", "host_keys": {"scope": "shared"}},
            "exclusive takes what is loaded out of the host, which others share",
        ),
        ({"storage": 10, "host_keys": {"scope": "shared"}}, "private storage tier can't stand behind a shared host"),
    ],
)
def test_contradictions(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiers(**keys)


def test_from_a_file() -> None:
    config = parse_offload_config(
        {"tiers": [{"bytes": 10_000, "link": "h200"}, {"num_blocks": 5, "link": {"discipline": "fifo"}}]}
    )
    host, storage = config.tiers
    assert host.link == PRESETS["h200"] and storage.link.discipline == "fifo"
    assert host.capacity(3000) == 3


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"tiers": [{"num_blocks": 1}], "polizy": "x"}, "unknown field `polizy`"),
        ({"tiers": [{"num_blocks": 1, "speed": 3}]}, "unknown field `speed`"),
        ({"tiers": [{"num_blocks": "many"}]}, "Expected `int"),
        ({"tiers": [{"num_blocks": 1, "link": "string"}]}, "unknown link preset 'string'"),
        ({"tiers": [{"num_blocks": 1}], "policy": "never"}, "unknown offload policy 'never'"),
        ({}, "missing required field `tiers`"),
        ({"tiers": []}, "tiers must be 1 to 4"),
        ({"tiers": [{"num_blocks": 1}] * 5}, "tiers must be 1 to 4"),
        ({"tiers": 3}, "Expected `array`"),
    ],
)
def test_bad_files(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_offload_config(raw)


def build(config: OffloadConfig, manager: BlockManager | None = None, **keys: Any) -> Offload:
    return Offload(manager or BlockManager(10), config, **{"block_bytes": 100, **keys})


def test_tiers_that_a_manager_cannot_have() -> None:
    with pytest.raises(ConfigError, match="switch caching on"):
        build(tiers(), BlockManager(10, caching=False))
    with pytest.raises(ConfigError, match="block_bytes must be"):
        build(tiers(), block_bytes=0)
    with pytest.raises(ConfigError, match="doesn't hold a single block of 100 bytes"):
        build(OffloadConfig(tiers=(TierConfig(bytes=99),)))
    with pytest.raises(ConfigError, match="shared tiers need a Timeline"):
        build(tiers(host_keys={"scope": "shared"}))
    with pytest.raises(ConfigError, match="a Timeline is for shared tiers"):
        build(tiers(), timeline=Timeline())


def test_capacity_in_bytes() -> None:
    assert build(OffloadConfig(tiers=(TierConfig(bytes=999),))).tiers[0].store.num_pages == 9


def test_every_policy_is_known_by_its_name() -> None:
    groups = [GroupSpec(block_size=4)]
    for policy in ("write_through", "write_through_generated", "after_hits", "on_eviction"):
        build(tiers(policy=policy), BlockManager(10, groups)).check_integrity()
