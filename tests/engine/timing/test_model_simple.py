"""The fixed and polynomial models: the peer's figures to the nanosecond, and plans that equal single passes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.engine.config import EngineConfig, read_engine_config
from kvyard.engine.timing import (
    FixedTiming,
    PolynomialTiming,
    ProfileTiming,
    make_timing,
    read_timing,
)
from kvyard.engine.timing.model import SHORT
from kvyard.errors import KvyardError

CAPACITY = 16384 * 64
POLYNOMIAL = make_timing(PolynomialTiming(), CAPACITY)


# Dynamo's 1.6.1 wheel gave these times, in ms, to six places (the reference's micro-scenarios).


def test_a_single_request():
    first = POLYNOMIAL.pass_ns([(100, 0)], 0, 0, 0)
    assert first == 18_023_974
    assert first + POLYNOMIAL.pass_ns((), 1, 101, 0) + POLYNOMIAL.pass_ns((), 1, 102, 0) == 29_514_430


def test_two_requests_are_charged_by_whole_means():
    assert POLYNOMIAL.pass_ns([(100, 0), (201, 0)], 0, 0, 0) == 21_094_342
    assert POLYNOMIAL.pass_ns([(300, 0)], 0, 0, 0) == 21_094_342


def test_a_long_prompt_in_chunks():
    chunks = [(8192, 0), (8192, 8192), (3616, 16384)]
    assert sum(POLYNOMIAL.pass_ns([chunk], 0, 0, 0) for chunk in chunks) == 415_183_328


def test_a_repeated_prompt_pays_for_its_last_block():
    assert POLYNOMIAL.pass_ns([(64, 960)], 0, 0, 0) == 17_474_885


def test_a_mixed_pass_adds_two_rounded_parts():
    # Recorded from the wheel: 376 tokens join a request at context 234. The rounded sum would be 28,021,964.
    assert POLYNOMIAL.pass_ns([(376, 0)], 1, 234, 0) == 28_021_965
    assert POLYNOMIAL.pass_ns([(376, 0)], 0, 0, 0) == 22_269_913
    assert POLYNOMIAL.pass_ns((), 1, 234, 0) == 5_752_052


def test_the_speedups_divide_rounded_parts():
    # Recorded from the wheel with speedup_ratio 0.37 and decode_speedup_ratio 2.3, context 234: dividing first gives ...168.
    model = make_timing(PolynomialTiming(speedup_ratio=0.37, decode_speedup_ratio=2.3), CAPACITY)
    assert model.pass_ns((), 1, 234, 0) == round(5_752_052 / (0.37 * 2.3))
    assert model.pass_ns([(376, 0)], 0, 0, 0) == round(22_269_913 / 0.37)


@pytest.mark.parametrize(
    ("prefills", "charged", "ns"),
    [
        ([(378, 64), (45, 384), (4, 0)], 426, 23_045_967),  # 427 tokens are computed
        ([(612, 0), (212, 192), (53, 320)], 879, 30_172_945),  # 877
        ([(476, 128), (33, 896), (57, 64)], 567, 25_245_777),  # 566
    ],
)
def test_means_are_cut_before_they_are_subtracted(prefills, charged, ns):
    # Recorded from the wheel, with prompts whose first blocks were cached.
    assert POLYNOMIAL.pass_ns(prefills, 0, 0, 0) == ns == POLYNOMIAL.pass_ns([(charged, 0)], 0, 0, 0)


RECORDED = json.loads((Path(__file__).parent / "data" / "dynamo.json").read_text())


def test_recorded_passes_of_the_wheel():
    # By record_dynamo.py: batches with cached prefixes and decode steps, in large and small caches, with and without speed-ups.
    assert len(RECORDED) > 200
    models = {}
    for capacity, speedup, decode, prefills, batch, context, ns in RECORDED:
        key = capacity, speedup, decode
        if key not in models:
            config = PolynomialTiming(speedup_ratio=speedup, decode_speedup_ratio=decode)
            models[key] = make_timing(config, capacity)
        assert models[key].pass_ns([tuple(one) for one in prefills], batch, context, 0) == ns
    assert len(models) == 4


def test_nothing_new_costs_nothing():
    assert POLYNOMIAL.pass_ns((), 0, 0, 0) == 0
    assert POLYNOMIAL.pass_ns([(0, 500)], 0, 0, 0) == 0
    assert POLYNOMIAL.pass_ns([(0, 500), (100, 0)], 0, 0, 0) == POLYNOMIAL.pass_ns([(100, 0)], 0, 0, 0)


def test_decoding_slows_down_as_the_cache_fills_and_no_further():
    full = POLYNOMIAL.pass_ns((), 8, CAPACITY, 0)
    assert full == round((-25.74 + 54.01 + 5.74) * 1e6)
    assert POLYNOMIAL.pass_ns((), 8, 3 * CAPACITY, 0) == full
    assert POLYNOMIAL.pass_ns((), 8, CAPACITY // 2, 0) < full


def test_fixed():
    model = make_timing({"kind": "fixed", "prefill_ms": 20, "decode_ms": 5.5}, 1)
    assert model.pass_ns([(100, 0), (7, 7)], 0, 0, 0) == 20_000_000
    assert model.pass_ns([(100, 0)], 3, 900, 0) == 25_500_000
    assert model.pass_ns([(0, 100)], 3, 900, 0) == 5_500_000
    assert model.pass_ns((), 0, 0, 0) == 0
    assert model.decode_ns(3, 900, 4, 0).tolist() == [5_500_000] * 4
    fast = make_timing(
        {"kind": "fixed", "prefill_ms": 20, "decode_ms": 5.5, "speedup_ratio": 2, "decode_speedup_ratio": 5}, 1
    )
    assert fast.pass_ns([(100, 0)], 3, 900, 0) == 10_000_000 + 550_000


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["polynomial", "fixed"]),
    batch=st.integers(0, 512),
    context=st.integers(0, 3 * CAPACITY),
    passes=st.sampled_from([0, 1, 2, SHORT, SHORT + 1, 100, 700]),
    ratios=st.tuples(st.sampled_from([1.0, 0.37, 3.0]), st.sampled_from([1.0, 1.7])),
)
def test_plans_equal_single_passes(kind, batch, context, passes, ratios):
    config = {"kind": kind, "speedup_ratio": ratios[0], "decode_speedup_ratio": ratios[1]}
    if kind == "fixed":
        config |= {"prefill_ms": 3.3, "decode_ms": 1.1}
    model = make_timing(config, CAPACITY)
    plan = model.decode_ns(batch, context, passes, 0)
    assert plan.dtype == "int64"
    assert plan.tolist() == [model.pass_ns((), batch, context + i * batch, 0) for i in range(passes)]


def test_configs_are_read_by_their_kind():
    assert read_timing({"kind": "polynomial"}) == PolynomialTiming()
    config = FixedTiming(prefill_ms=1, decode_ms=2)
    assert read_timing(msgspec.to_builtins(config)) == config
    assert read_engine_config(msgspec.to_builtins(EngineConfig(timing=config))).timing == config
    assert read_timing({"kind": "profile", "name": "x"}) == ProfileTiming(name="x")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "cubic"}, "unknown timing kind 'cubic': choose one of fixed, polynomial, profile"),
        ({}, "kind must be one of fixed, polynomial, profile, roofline, tables, got None"),
        ({"kind": ["fixed"]}, "kind must be one of fixed, polynomial, profile, roofline, tables, got ['fixed']"),
        ({"kind": "fixed", "prefill_ms": 1}, "missing required field `decode_ms`"),
        ({"kind": "fixed", "prefill_ms": -1, "decode_ms": 1}, "prefill_ms must be a number of milliseconds"),
        ({"kind": "fixed", "prefill_ms": 1, "decode_ms": float("nan")}, "decode_ms must be"),
        ({"kind": "polynomial", "speed": 2}, "unknown field `speed`"),
        ({"kind": "polynomial", "speedup_ratio": 0}, "speedup_ratio must be a number above 0"),
        ({"kind": "polynomial", "decode_speedup_ratio": float("inf")}, "decode_speedup_ratio must be a number above 0"),
        ({"kind": "profile"}, "either a name"),
        ({"kind": "profile", "name": "a", "path": "b"}, "not both"),
    ],
)
def test_refusals(config, words):
    with pytest.raises(KvyardError, match="timing") as refused:
        make_timing(config, CAPACITY)
    assert words in str(refused.value)


def test_polynomial_needs_a_capacity():
    with pytest.raises(KvyardError, match="capacity"):
        make_timing({"kind": "polynomial"}, 0)


@pytest.mark.parametrize("passes", [1, 2, SHORT, SHORT + 1, 300])
@pytest.mark.parametrize("over", [0, 1, 5])
def test_plans_that_fill_the_cache_equal_single_passes(passes, over):
    """From where it is full on, nothing gets slower: also where only the last passes, or the very last, come to that."""
    start = CAPACITY - 8 * (passes - 1) + 8 * over
    plan = POLYNOMIAL.decode_ns(8, start, passes, 0).tolist()
    assert plan == [POLYNOMIAL.pass_ns((), 8, start + 8 * step, 0) for step in range(passes)]
    assert plan[-1] == POLYNOMIAL.pass_ns((), 8, CAPACITY, 0)
