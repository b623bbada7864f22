"""Before a decision, only those workers are visited whose caches can have changed: nothing differs from a visit to all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.replay.support import request, sessions
from tests.replay.test_pulls import KINDS as PULLS
from tests.replay.test_pulls import SMALL
from tests.replay.traces.support import CONVERSATION

from kvyard.replay.config import ReplayConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import make_report
from kvyard.replay.run import as_config, limited


def make_fleet(config: ReplayConfig, follows: bool) -> Fleet:
    """A fleet that visits those whose caches may have changed, or everyone."""
    fleet = Fleet(config)
    assert fleet.index_sync.follows
    fleet.index_sync.follows = follows
    return fleet


def check_following(requests: int, **settings: Any) -> None:
    """One report, whether all are visited or not. Caches are small, so that blocks are evicted."""
    config = as_config(None, {"workers": 4, "router": "kv", "block_size": 64, "speedup": 3, **settings})
    reports = []
    for follows in (False, True):
        fleet = make_fleet(config, follows)
        fleet.run(limited(CONVERSATION, requests))
        reports.append(msgspec.json.encode(make_report(fleet)))
    assert reports[0] == reports[1]


def test_ranks_of_an_engine() -> None:
    check_following(60, dp_size=2, num_gpu_blocks=400)


def check_pulls(kind: str, router: str, requests: int) -> None:
    """Check index and pools where workers pull from each other, in the settings of ``test_pulls``."""
    settings = {**SMALL, **PULLS[kind], "router": router}
    config = as_config(None, {name: value for name, value in settings.items() if value is not None})
    trace = list(sessions(requests, seed=3, arrivals="poisson:rate=30"))
    reports = []
    for follows in (False, True):
        fleet = make_fleet(config, follows)
        fleet.run(trace)
        reports.append(msgspec.json.encode(make_report(fleet)))
    assert reports[0] == reports[1]


def test_pulls() -> None:
    check_pulls("slow", "kv", 60)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["kv", "least-time"])
@pytest.mark.parametrize("kind", [kind for kind in PULLS if "roles" not in kind])
def test_pulls_at_length(kind: str, router: str) -> None:
    check_pulls(kind, router, 150)


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 2000])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_and_tiers_at_length(dp_size: int, host_blocks: int, async_scheduling: bool) -> None:
    tiers = {"host_blocks": host_blocks} if host_blocks else {}
    check_following(1500, dp_size=dp_size, num_gpu_blocks=400, async_scheduling=async_scheduling, **tiers)


def test_a_change_that_one_look_came_too_early_for_is_seen_by_the_next() -> None:
    """While one worker evicts what "a" left there, block by block, a request for the other is routed, and then one like "a"."""
    text = list(range(10))
    rows = [
        request("a", 0, ids=text, id_block_size=16, input_length=160, output_length=1),
        request("b", 1, ids=[0, 100], id_block_size=16, input_length=32, output_length=560),
        request("other", 2, ids=[200], id_block_size=16, input_length=16, output_length=1),
        request("again", 13.5, ids=[*text, 300], id_block_size=16, input_length=176, output_length=1),
    ]
    config = as_config(None, {"workers": 2, "router": "kv", "block_size": 16, "num_gpu_blocks": 40})
    overlaps = []
    for follows in (False, True):
        fleet = make_fleet(config, follows)
        fleet.run(rows)
        records = fleet.records
        assert records["a"].worker == records["b"].worker != records["other"].worker
        overlaps.append(records["again"].best_overlap)
    assert overlaps[0] == overlaps[1] and 0 < overlaps[0] < 10
