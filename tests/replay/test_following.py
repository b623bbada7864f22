"""Before a decision, only those workers are visited whose caches can have changed: nothing differs from a visit to all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.replay.fleet import Fleet
from kvyard.replay.report import make_report
from kvyard.replay.run import as_config, limited

pytestmark = pytest.mark.source  # it derives from a compiled class


class VisitingFleet(Fleet):
    """One that visits everyone."""

    def _can_follow(self) -> bool:
        return False


def check_following(requests: int, **settings: Any) -> None:
    """One report, whether all are visited or not. Caches are small, so that blocks are evicted."""
    config = as_config(None, {"workers": 4, "router": "kv", "block_size": 64, "speedup": 3, **settings})
    reports = []
    for kind in (VisitingFleet, Fleet):
        fleet = kind(config)
        fleet.run(limited(CONVERSATION, requests))
        reports.append(msgspec.json.encode(make_report(fleet)))
    assert fleet._follows, "it visited everyone"
    assert reports[0] == reports[1]


def test_ranks_of_an_engine() -> None:
    check_following(60, dp_size=2, num_gpu_blocks=400)


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 2000])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_and_tiers_at_length(dp_size: int, host_blocks: int, async_scheduling: bool) -> None:
    tiers = {"host_blocks": host_blocks} if host_blocks else {}
    check_following(1500, dp_size=dp_size, num_gpu_blocks=400, async_scheduling=async_scheduling, **tiers)
