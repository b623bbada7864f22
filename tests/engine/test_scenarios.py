"""The six micro-scenarios of the Dynamo mocker, to the nanosecond (five here; the one with a host tier in test_tiers)."""

from __future__ import annotations

import pytest
from tests.engine.driving import Row, replay

from kvyard.engine.config import EngineConfig


@pytest.fixture(params=[True, False], ids=["plans", "single steps"])
def plans(request):
    return request.param


def times(log, rows):
    """Time to first token and to the end, per request, in ns."""
    first = {}
    for name, _, end in log.of("produced"):
        first.setdefault(name, end)
    last = {name: now for name, now, *_ in log.of("ended")}
    return [(first[f"r{at}"] - row.arrival, last[f"r{at}"] - row.arrival) for at, row in enumerate(rows)]


def test_a_single_request(plans):
    rows = [Row(0, 100, 3, (1,))]
    assert times(replay(EngineConfig(), rows, plans=plans), rows) == [(18_023_974, 29_514_430)]


def test_two_at_once_are_charged_by_whole_means(plans):
    rows = [Row(0, 100, 1, (1,)), Row(0, 201, 1, (2,))]
    assert [first for first, _ in times(replay(EngineConfig(), rows, plans=plans), rows)] == [21_094_342, 21_094_342]


def test_a_long_prompt_in_chunks(plans):
    rows = [Row(0, 20_000, 1, tuple(range(40)))]
    assert times(replay(EngineConfig(), rows, plans=plans), rows)[0][0] == 415_183_328


def test_the_same_prompt_again(plans):
    rows = [Row(0, 1024, 1, (7, 8)), Row(10**9, 1024, 1, (7, 8))]
    log = replay(EngineConfig(), rows, plans=plans)
    assert times(log, rows)[1][0] == 17_474_885
    assert log.of("admitted")[1][2] == 960


def test_a_prefill_joins_a_decoding_request(plans):
    # r0's first token is out at 18.02 ms, its second (context 101) at 23.77; then comes the pass with both.
    rows = [Row(0, 100, 10, (1,)), Row(20_000_000, 200, 1, (2,))]
    log = replay(EngineConfig(), rows, plans=plans)
    start, end, _, decoding = next(entry for entry in log.passes if entry[2] == [("r1", 200, 0)])
    prefill = round((4.209989e-7 * 200 * 200 + 1.518344e-2 * 200 + 16.50142) * 1e6)
    used = 102 / (16384 * 64)
    decode = round((-25.74 * used * used + 54.01 * used + 5.74) * 1e6)
    assert decoding == 1 and end - start == prefill + decode
