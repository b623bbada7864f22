"""Made-up traces: deterministic, as ordered as recorded ones, and by the laws that were asked for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest
from tests.replay.traces.support import SAMPLES, jsonl, mooncake
from tests.replay.traces.test_formats import check_contract

from kvyard.errors import KvyardError
from kvyard.replay.traces.generate import Workload, generate
from kvyard.replay.traces.info import describe
from kvyard.replay.traces.laws import arrival_law, arrival_times, number_law

FULL = {"turns": "geometric:3", "tree": "1x700/5x300/3x100", "arrivals": "gamma:rate=5,cv=3", "block_size": 64}


def test_the_same_seed_makes_the_same_trace() -> None:
    trace = generate(Workload(requests=300, **FULL))
    found = list(trace)
    check_contract(found)
    assert len(found) == 300
    assert found == list(trace) == list(generate(Workload(requests=300, **FULL)))
    assert found != list(generate(Workload(requests=300, seed=1, **FULL)))
    assert found[:100] == list(generate(Workload(requests=100, **FULL)))


def test_generated_traces_are_the_same_on_every_machine() -> None:
    """Numbers that must never change: a trace is named by its workload and seed."""
    found = list(generate(Workload(requests=3, turns="geometric:2", tree="2x1000", seed=7)))
    assert [(one.arrival, one.input_length, one.output_length, one.delay, one.ids) for one in found] == [
        (0, 6179, 130, None, list(range(13))),
        (530778088, 1827, 779, None, [13, 14, 15, 16]),
        (0, 3493, 372, 3763364073, [13, 14, 15, 17, 18, 19, 20]),
    ]


def test_one_law_leaves_the_others_alone() -> None:
    before = list(generate(Workload(requests=200)))
    after = list(generate(Workload(requests=200, output="fixed:5", tree="3x512")))
    assert [one.arrival for one in before] == [one.arrival for one in after]
    assert [one.input_length + 512 for one in before] == [one.input_length for one in after]


def test_turns_begin_with_the_whole_conversation() -> None:
    found = list(generate(Workload(requests=200, turns="fixed:4", input="fixed:100", output="fixed:28", block_size=32)))
    for before, after in pairwise(found):
        if before.session != after.session:
            continue
        assert after.input_length == before.input_length + 28 + 100
        whole = before.input_length // 32
        assert before.ids is not None and after.ids is not None
        assert after.ids[:whole] == before.ids[:whole]
        assert not set(after.ids[whole:]) & set(before.ids)
    assert [one.input_length for one in found[:5]] == [100, 228, 356, 484, 100]


def test_sessions_share_their_path_through_the_tree_only() -> None:
    workload = Workload(requests=500, tree="1x64/4x64", input="fixed:64", output="fixed:1", block_size=32, zipf=0)
    found = list(generate(workload))
    assert all(one.ids is not None and one.ids[:2] == [0, 1] for one in found)
    applications = {tuple(one.ids[2:4]) for one in found if one.ids is not None}
    assert len(applications) == 4
    own = [block for one in found for block in (one.ids or ())[4:]]
    assert len(own) == len(set(own)) == 1000
    reuse = describe(generate(workload)).reuse
    assert reuse is not None
    assert round(reuse.infinite_blocks * reuse.blocks) == reuse.blocks - (2 + 4 * 2 + 1000)


def test_blocks_across_the_end_of_a_shared_prefix_are_not_shared() -> None:
    found = list(generate(Workload(requests=50, tree="1x100", input="fixed:20", block_size=64)))
    assert len({tuple(one.ids or ())[:1] for one in found}) == 1
    assert len({tuple(one.ids or ())[1:] for one in found}) == 50


def test_zipf_makes_siblings_unequal() -> None:
    def top_share(zipf: float) -> float:
        found = list(generate(Workload(requests=2000, tree="50x64", block_size=64, zipf=zipf)))
        first = [(one.ids or (0,))[0] for one in found]
        return max(map(first.count, set(first))) / len(first)

    assert top_share(0) < 0.05
    assert 0.2 < top_share(1) < top_share(2)


@pytest.mark.parametrize(
    ("law", "mean", "variation"),
    [
        ("poisson:4", 0.25, 1.0),
        ("poisson:rate=0.5", 2.0, 1.0),
        ("gamma:4,3", 0.25, 3.0),
        ("gamma:rate=4,cv=0.5", 0.25, 0.5),
        ("constant:8", 0.125, 0.0),
    ],
)
def test_arrivals(law: str, mean: float, variation: float) -> None:
    gaps = gaps_of(law, 20_000)
    assert fmean(gaps) == pytest.approx(mean, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-6)


def gaps_of(law: str, count: int) -> list[float]:
    times = arrival_times(arrival_law(law), Random(3))
    found = [next(times) for _ in range(count + 1)]
    assert found[0] == 0
    return [(after - before) / 1e9 for before, after in pairwise(found)]


def test_on_and_off() -> None:
    gaps = gaps_of("onoff:rate=10,on=5,off=20", 20_000)
    assert 1 / fmean(gaps) == pytest.approx(10 * 5 / 25, rel=0.15)
    assert fmean(gap for gap in gaps if gap < 1) == pytest.approx(0.1, rel=0.1)
    assert max(gaps) > 20


@pytest.mark.parametrize(
    ("law", "low", "mean", "high"),
    [
        ("fixed:7", 7, 7, 7),
        ("uniform:10,30", 10, 20, 30),
        ("lognormal:median=100,sigma=0", 100, 100, 100),
        ("lognormal:100,1,150", 0, 94, 150),
        ("exponential:mean=5", 0, 5, 100),
        ("geometric:4", 1, 4, 100),
        ("geometric:1", 1, 1, 1),
    ],
)
def test_numbers(law: str, low: float, mean: float, high: float) -> None:
    random, draw = Random(5), number_law(law, "here")
    found = [draw(random) for _ in range(20_000)]
    assert low - 1e-6 <= min(found) and max(found) <= high + 1e-6
    assert fmean(found) == pytest.approx(mean, rel=0.05)


def test_lengths_of_another_trace(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", mooncake(0, 11, 3), mooncake(1, 22, 4))
    found = list(generate(Workload(requests=100, input=f"empirical:{path}", output=f"empirical:{path}")))
    assert {one.input_length for one in found} == {11, 22}
    assert {one.output_length for one in found} == {3, 4}


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("requests", 0, "requests must be at least 1"),
        ("block_size", 0, "block_size must be at least 1"),
        ("arrivals", "weekly:3", "unknown law 'weekly': choose one of poisson"),
        ("arrivals", "poisson", "poisson needs rate, as in poisson:rate=..."),
        ("arrivals", "poisson:0", "needs rate above 0"),
        ("arrivals", "poisson:inf", "can't be inf"),
        ("arrivals", "poisson:1,2", "one too many"),
        ("arrivals", "gamma:1,cv=0", "needs cv above 0"),
        ("arrivals", "onoff:1", "onoff needs on"),
        ("input", "normal:5", "input: unknown law 'normal'"),
        ("input", "fixed:many", "must be a number, not 'many'"),
        ("input", "fixed:-4", "can't be -4"),
        ("input", "fixed:nan", "can't be nan"),
        ("input", "uniform:9,3", "needs min at most max"),
        ("input", "uniform:low=3", "uniform has no 'low'; it takes min, max"),
        ("input", "lognormal:0", "needs median above 0"),
        ("input", "empirical:", "empirical:FILE names a trace"),
        ("input", "empirical:/no/such/file", "no such file"),
        ("turns", f"empirical:{SAMPLES / 'plain.csv'}", "is for lengths only"),
        ("turns", "geometric:0.5", "needs mean of at least 1"),
        ("tree", "5", "'5' is no level; write CHILDRENxTOKENS"),
        ("tree", "0x10", "'0x10' is no level"),
        ("tree", "2x10/", "'' is no level"),
    ],
)
def test_workloads_that_make_no_sense(field: str, value: object, why: str) -> None:
    with pytest.raises(KvyardError) as caught:
        generate(Workload(**{"requests": 5, field: value}))
    assert why in str(caught.value)


def test_prompts_that_never_end_are_refused() -> None:
    with pytest.raises(KvyardError, match="choose shorter inputs"):
        list(generate(Workload(requests=50, turns="fixed:50", input="fixed:1000000")))
