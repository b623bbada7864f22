"""Ratios of prefill to decode workers: what a replay that misses the SLO says of each role."""

from __future__ import annotations

import msgspec
import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.lab.plan.ratios import DECODE, PREFILL, Ratios, slow_roles
from kvyard.lab.plan.search import FleetOption
from kvyard.lab.plan.shape import Shape
from kvyard.replay import replay
from kvyard.replay.report.numbers import Spread
from kvyard.replay.report.slo import Limit

REPORT = replay(CONVERSATION, limit=2, prefill=1, decode=1).report
LIMITS = [Limit("ttft_p99", 1000.0), Limit("itl_p99", 50.0), Limit("e2e_p99", 9000.0)]


def fleet(prefill: int = 3, decode: int = 2, stages: dict[str, float] | None = None, **values: float) -> FleetOption:
    assert REPORT.handovers is not None
    spreads = {name: Spread(count=1, mean=mean) for name, mean in (stages or {}).items()}
    report = msgspec.structs.replace(REPORT, handovers=msgspec.structs.replace(REPORT.handovers, stages=spreads))
    option = FleetOption("a", {}, shape=Shape("h100"), workers=prefill + decode, prefill=prefill, report=report)
    option.values = {"ttft_p99": 900.0, "itl_p99": 40.0, "e2e_p99": 5000.0, **values}
    return option


QUEUED = {"prefill_queue": 15_772.0, "prefill": 3_258.0, "room": 33.0, "transfer": 53.0, "decode_queue": 14.0}
"""Means of 3 prefill and 2 decode workers that wait for prefill, in ms."""
FULL = {"prefill_queue": 46_274.0, "prefill": 2_429.0, "room": 42_760.0, "transfer": 74.0, "decode_queue": 24.0}
"""Of 4 and 1: the one decode worker is full, so that prompts hold their prefill workers and others queue there."""


@pytest.mark.parametrize(
    ("stages", "values", "roles"),
    [
        (QUEUED, {}, set()),
        (QUEUED, {"ttft_p99": 1300.0}, {PREFILL}),
        (FULL, {"ttft_p99": 1300.0}, {DECODE}),
        (QUEUED, {"itl_p99": 60.0}, {DECODE}),
        (QUEUED, {"ttft_p99": 1300.0, "itl_p99": 60.0}, {PREFILL, DECODE}),
        (FULL, {"ttft_p99": 1300.0, "itl_p99": 60.0}, {DECODE}),
        (QUEUED, {"e2e_p99": 9900.0}, {PREFILL}),
        (FULL, {"e2e_p99": 9900.0}, {DECODE}),
    ],
)
def test_a_miss_shows_which_role_has_too_few_workers(
    stages: dict[str, float], values: dict[str, float], roles: set[str]
) -> None:
    assert slow_roles(fleet(stages=stages, **values), LIMITS) == roles


def test_each_miss_narrows_the_range() -> None:
    ratios = Ratios(0.5)
    assert ratios.choose(6) == 3
    assert ratios.learn(fleet(3, 3), {PREFILL})
    assert ratios.choose(6) in (4, 5) and ratios.choose(5) == 4
    assert ratios.learn(fleet(5, 1), {DECODE})
    assert (ratios.choose(6), ratios.fewest) == (4, 6)
    assert ratios.choose(5) is None, "four prefill and two decode workers at least"
    assert not ratios.learn(fleet(4, 2), {PREFILL, DECODE})
    assert not ratios.learn(fleet(4, 2), set())
