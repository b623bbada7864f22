"""Memory of a fleet below its devices, by hand; a sweep's order and a search's price depend on it."""

from __future__ import annotations

from kvyard.lab.study.cost import GIB, Prices, cost, fleet_size, lower_bytes
from kvyard.replay.settings import make_config

SETTINGS: dict[str, object] = {"workers": 3, "dp_size": 2, "host_bytes": "4GiB", "num_gpu_blocks": 100}


def test_private_tiers_are_of_each_rank_and_shared_ones_of_all() -> None:
    config = make_config(SETTINGS)
    assert lower_bytes(config, [3]) == [3 * 2 * 4 * GIB, 0, 0, 0]
    assert lower_bytes(config, [1.5]) == [1.5 * 2 * 4 * GIB, 0, 0, 0]
    shared = make_config({**SETTINGS, "host_scope": "shared"})
    assert lower_bytes(shared, [3]) == lower_bytes(shared, [9]) == [4 * GIB, 0, 0, 0]


def test_order_and_price_go_by_the_same_bytes() -> None:
    for more in ({}, {"host_scope": "shared"}):
        settings = {**SETTINGS, **more}
        config = make_config(settings)
        assert list(fleet_size(config).lower) == lower_bytes(config, [3])
        price = cost(settings, config, Prices(card=0.0, host=1.0))
        assert price * GIB == sum(lower_bytes(config, [3]))
