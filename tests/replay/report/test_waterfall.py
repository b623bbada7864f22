"""Where the reuse went: a trace for each step, and steps that add up."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest
from tests.replay.report.test_bounds import fleet_of, prompt
from tests.replay.traces.support import CONVERSATION

from kvyard.replay import replay
from kvyard.replay.report import Report, make_report
from kvyard.replay.report.bounds import make_bounds
from kvyard.replay.report.table import report_text
from kvyard.replay.report.waterfall import LEVELS, WaterfallStep, waterfall
from kvyard.replay.traces import TraceRequest


def steps_of(rows: list[TraceRequest], blocks: int = 1000, workers: int = 1) -> dict[str, WaterfallStep]:
    fleet = fleet_of(rows, blocks, workers)
    return {step.level: step for step in waterfall(make_report(fleet, bounds=make_bounds(fleet, rows)))}


A, B, C = [1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]


def test_too_little_room_even_with_foresight() -> None:
    found = steps_of([prompt(0, A), prompt(1, B), prompt(2, A), prompt(3, B)], blocks=6)
    assert found["infinite"].tokens == 8 * 16
    assert found["belady"].change == -2 * 16


def test_eviction_without_foresight() -> None:
    # C never comes back: who knows that keeps A, LRU doesn't.
    found = steps_of([prompt(0, A), prompt(1, B), prompt(2, C), prompt(3, A)], blocks=8)
    assert found["belady"].tokens == 4 * 16 and found["belady"].change == 0
    assert found["pooled"].change == -4 * 16


def test_routed_elsewhere() -> None:
    # By turns: the second A goes to the other worker, which never saw it.
    found = steps_of([prompt(0, A), prompt(1, A)], workers=2)
    assert found["pooled"].tokens == 4 * 16
    assert found["routed"].change == -4 * 16
    assert found["delivered"].tokens == 0


def test_the_router_s_knowledge_and_what_was_there() -> None:
    report = told(lag="20s")
    found = {step.level: step for step in waterfall(report)}
    assert report.router is not None
    assert found["believed"].tokens == report.router.belief.whole < found["delivered"].tokens
    assert found["delivered"].change == report.reuse["all"].part - report.router.belief.whole > 0
    prompt_known = {step.level: step for step in waterfall(told(lag=0))}
    assert prompt_known["believed"].tokens > found["believed"].tokens


def told(lag: object) -> Report:
    fleet = {"workers": 2, "num_gpu_blocks": 4000, "router": "kv", "limit": 250, "event_lag": lag}
    return replay(CONVERSATION, bounds=True, predicted_ttl_s=0, **fleet).report


def test_steps_add_up_in_tokens_and_in_time() -> None:
    report = told(lag=0)
    steps = waterfall(report)
    assert [step.level for step in steps] == [level for level in LEVELS if level in {step.level for step in steps}]
    assert steps[0].change == 0
    assert steps[0].tokens + sum(step.change for step in steps) == steps[-1].tokens == report.reuse["all"].part
    assert report.prefill_ms_per_token is not None
    lost = (steps[0].tokens - steps[-1].tokens) * report.prefill_ms_per_token
    assert sum(step.ms for step in steps if step.ms is not None) == pytest.approx(lost)
    text = report_text(report)
    assert "Where the reuse went" in text and "One cache as large as all together" in text


def test_without_bounds_there_is_none() -> None:
    fleet = fleet_of([prompt(0, A)])
    assert waterfall(make_report(fleet)) == [] and "Where the reuse went" not in report_text(make_report(fleet))


def test_the_pooled_cache_is_a_plain_lru() -> None:
    """Against a cache of single blocks that is written out: touch front to back, evict the oldest."""
    rng = Random(2)
    roots = [[at * 100 + depth for depth in range(6)] for at in range(12)]
    rows = []
    for number in range(150):
        root = rng.choice(roots)
        rows.append(prompt(number, root[: rng.randrange(1, 7)]))
    for blocks in (5, 9, 20, 40):
        kept: OrderedDict[int, None] = OrderedDict()
        hit = 0
        for row in rows:
            assert row.ids is not None
            hits = 0
            while hits < len(row.ids) and row.ids[hits] in kept:
                hits += 1
            hit += hits * 16
            for one in row.ids:
                kept.pop(one, None)
                kept[one] = None
            while len(kept) > blocks:
                kept.popitem(last=False)
        fleet = fleet_of(rows, blocks=max(blocks, 8))
        bound = make_bounds(fleet, rows)["pooled"]
        if blocks >= 8:
            assert bound.part == hit
