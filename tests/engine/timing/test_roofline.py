"""The roofline: plans and single passes agree, more work takes longer, and measured passes are near."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.engine.cards import CARDS, Shares, find_card
from kvyard.engine.models.fields import preset
from kvyard.engine.models.split import Parallelism
from kvyard.engine.timing import make_timing
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.kernels import Kernels
from kvyard.engine.timing.operators import make_operators
from kvyard.engine.timing.roofline import RooflineModel, padded
from kvyard.engine.timing.roofline_timing import RooflineTiming, parse_calibration
from kvyard.errors import KvyardError

TRUTH = Path(__file__).resolve().parents[4] / "shared" / "truth"
LLAMA = Deployment(model="llama-3.1-8b", gpu="h100")
NODES = {"a100": 8, "h100": 8, "h200": 8, "h20": 8, "b200": 8, "b300": 8, "gb200": 4, "gb300": 4, "mi300x": 8}
"""Cards that NVLink or its like joins, and how many a node has. Over PCIe more cards are slower, by measured all-reduces."""


def model(name: str = "llama-3.1-8b", card: str = "h100", **split: int) -> RooflineModel:
    return RooflineModel(make_operators(preset(name), Parallelism(**split)), find_card(card))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "qwen3-30b-a3b", "qwen3.5-9b"])
@given(batch=st.integers(0, 300), context=st.integers(0, 200_000), passes=st.integers(0, 40))
def test_a_planned_pass_takes_what_a_single_one_takes(name: str, batch: int, context: int, passes: int) -> None:
    timing = model(name)
    planned = timing.decode_ns(batch, context, passes, 0).tolist()
    assert planned == [timing.pass_ns((), batch, context + at * batch, at) for at in range(passes)]


@given(
    new=st.integers(1, 8192), past=st.integers(0, 60_000), batch=st.integers(0, 256), context=st.integers(0, 100_000)
)
def test_more_work_never_takes_less(new: int, past: int, batch: int, context: int) -> None:
    timing = model()
    one = timing.pass_ns([(new, past)], batch, context if batch else 0, 0)
    assert timing.pass_ns([(new, past), (16, 0)], batch, context if batch else 0, 0) >= one
    assert timing.pass_ns([(new, past + 512)], batch, context if batch else 0, 0) >= one
    assert timing.pass_ns([(new, past)], batch + 8, context + 8, 0) >= one


@pytest.mark.parametrize("card", CARDS)
def test_every_card_has_times_and_two_of_them_are_quicker_than_one(card: str) -> None:
    one, two = model(card=card), model(card=card, tensor_parallel_size=2)
    assert 0 < two.pass_ns((), 1, 1000, 1000) < one.pass_ns((), 1, 1000, 1000) < 1e9


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "qwen3-235b-a22b-fp8", "deepseek-v3", "qwen3.5-9b"])
@pytest.mark.parametrize("card", CARDS)
def test_more_tokens_never_take_less(card: str, name: str) -> None:
    timing = model(name, card, tensor_parallel_size=4)
    sizes = [1, 2, 4, 8, 16, 24, 48, 96, 128, 200, 256, 384, 512, 513, 700, 1024, 2048, 4096, 8192, 16384]
    prompts = [timing.pass_ns([(size, 0)], 0, 0, 0) for size in sizes]
    steps = [timing.pass_ns((), size, size * 1000, 1000) for size in sizes[:-4]]
    assert prompts == sorted(prompts) and steps == sorted(steps)


@given(new=st.integers(1, 4000), past=st.integers(0, 30_000))
def test_cached_tokens_never_cost_more_than_computing_them(new: int, past: int) -> None:
    timing = model("qwen3-14b")
    assert timing.pass_ns([(new, past)], 0, 0, 0) <= timing.pass_ns([(new + past, 0)], 0, 0, 0)


def test_products_measured_in_a_chain_on_an_h200() -> None:
    """Alone, below 256 tokens, the weights' share is right; in a chain of large ones the power limit is."""
    data = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "h200-kernels.jsonl"
    card = find_card("h200")
    kernel = Kernels(card).product("bf16")
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in map(json.loads, data.read_text().splitlines()):
        if row["kind"] == "product":
            tokens, n, k = row["tokens"], row["n"], row["k"]
            moved = 2.0 * tokens * (n + k)
            peaks = (2.0 * n * k / card.bandwidth, 2.0 * tokens * n * k / card.rate("bf16"), moved / card.bandwidth)
            weights, work, activations = (1e6 * seconds for seconds in peaks)
            errors[tokens < 256].append(kernel.us(weights, work, activations) / row["us"] - 1)
    for found in errors.values():
        assert len(found) >= 30 and abs(median(found)) < 0.06 and max(map(abs, found)) < 0.3


def test_weights_only_in_8_bits_save_memory_and_no_arithmetic() -> None:
    """An A100 has no FP8 tensor cores: steps are quicker than in 16 bits, long prompts are not."""
    wide, narrow = (
        RooflineModel(make_operators(preset("qwen3-32b"), Parallelism(), weight_dtype=dtype), find_card("a100"))
        for dtype in ("bf16", "fp8")
    )
    assert narrow.pass_ns((), 1, 1000, 1000) < 0.7 * wide.pass_ns((), 1, 1000, 1000)
    assert narrow.pass_ns([(8192, 0)], 0, 0, 0) > 0.95 * wide.pass_ns([(8192, 0)], 0, 0, 0)


@pytest.mark.parametrize("card", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_fewer_bits_are_quicker_at_a_batch_of_one(card: str, engine: str) -> None:
    def step(dtype: str | None) -> int:
        operators = make_operators(preset("qwen3-32b"), Parallelism(tensor_parallel_size=2), weight_dtype=dtype)
        return RooflineModel(operators, find_card(card), engine=engine).pass_ns((), 1, 1024, 1024)

    assert step(None) > step("int8") > step("int4")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "qwen3-235b-a22b-fp8", "deepseek-v3"])
def test_more_cards_over_nvlink_never_make_a_large_pass_slower(name: str, engine: str) -> None:
    for card, most in NODES.items():
        times: list[list[int]] = []
        for ranks in (1, 2, 4, 8)[: most.bit_length()]:
            operators = make_operators(preset(name), Parallelism(tensor_parallel_size=ranks))
            timing = RooflineModel(operators, find_card(card), engine=engine)
            prompts = [timing.pass_ns([(new, past)], 0, 0, 0) for new, past in ((2048, 0), (8192, 0), (2048, 30_000))]
            times.append([*prompts, *(timing.pass_ns((), batch, batch * 2000, 2000) for batch in (64, 256))])
        for alone, together in pairwise(times):
            assert all(more <= 1.01 * fewer for fewer, more in zip(alone, together, strict=True)), (card, times)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("card", ["h100", "h200", "h20", "b200", "b300", "gb200", "gb300", "mi300x"])
def test_weights_in_8_bits_are_quicker_where_a_card_multiplies_them(card: str, engine: str) -> None:
    for name in ("qwen3-32b", "llama-3.1-70b"):
        wide, narrow = (
            RooflineModel(
                make_operators(preset(name), Parallelism(), weight_dtype=dtype), find_card(card), engine=engine
            )
            for dtype in ("bf16", "fp8")
        )
        for work in (([(2048, 0)], 0, 0), ([(8192, 0)], 0, 0), ((), 1, 1000), ((), 64, 64_000), ((), 256, 256_000)):
            assert narrow.pass_ns(*work, 1000) < wide.pass_ns(*work, 1000), (name, work)


def test_a_long_prompt_on_an_h20_as_a_measured_stack_has_it() -> None:
    """AIBrix's plain stack (fit): 2.97 s to the first token of 21,073, of which the front end is 35 ms."""
    timing = RooflineTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h20"))
    assert make_timing(timing, 400_000).pass_ns([(21_073, 0)], 0, 0, 0) / 1e9 == pytest.approx(2.935, rel=0.02)


def test_graphs_have_sizes() -> None:
    assert [padded(tokens) for tokens in (1, 2, 3, 5, 9, 512, 513)] == [1, 2, 4, 8, 16, 512, 513]


def test_nothing_computed_takes_no_time() -> None:
    assert model().pass_ns([(0, 100)], 0, 0, 0) == 0


@pytest.mark.skipif(not TRUTH.exists(), reason="measured passes are in ../shared, which isn't here")
def test_decode_steps_measured_on_an_h200_are_within_a_tenth_on_the_mean() -> None:
    timing = RooflineModel(make_operators(preset("llama-3.1-8b"), Parallelism()), find_card("h200"))
    rows = [json.loads(line) for line in (TRUTH / "engine" / "sweep.jsonl").read_text().splitlines()]
    errors = [
        abs(timing.pass_ns((), row["batch"], row["batch"] * row["ctx"], row["ctx"]) / 1e6 / row["ms"] - 1)
        for row in rows
        if row["kind"] == "decode"
    ]
    assert len(errors) > 40 and sum(errors) / len(errors) < 0.10


@pytest.mark.parametrize(
    ("file", "kind", "bound"),
    [
        ("h200.jsonl", "prompts", 0.19),
        ("h200.jsonl", "prompts after cached tokens", 0.38),
        ("h200.jsonl", "decode", 0.06),
        ("h200-graphs.jsonl", "prompts", 0.08),
        ("h200-graphs.jsonl", "prompts after cached tokens", 0.35),
        ("h200-graphs.jsonl", "decode", 0.11),
        ("h200-graphs.jsonl", "mixed", 0.12),
    ],
)
def test_errors_of_the_docs_do_not_grow(file: str, kind: str, bound: float) -> None:
    """The mean errors of benchmarks/RESULTS-accuracy.md, as benchmarks/roofline.py works them out."""
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "roofline.py"
    spec = importlib.util.spec_from_file_location("roofline_benchmark", script)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    errors = bench.errors(file, kind, None)
    assert len(errors) >= 10 and sum(map(abs, errors)) / len(errors) < bound


class TestCalibration:
    def test_both_numbers_come_out_as_they_went_in(self) -> None:
        timing = make_timing(
            RooflineTiming(deployment=LLAMA, calibration=parse_calibration("ttft=150@2048,itl=14@32")), 1
        )
        assert timing.pass_ns([(2048, 0)], 0, 0, 0) == pytest.approx(150e6, abs=2)
        assert timing.pass_ns((), 32, 32 * 1024, 1024) == pytest.approx(14e6, abs=2)

    @pytest.mark.parametrize("text", ["ttft=150", "tpot=3@4", "ttft=0@12", "ttft=5@0", ""])
    def test_a_malformed_calibration_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(KvyardError, match="write ttft=MS@TOKENS, itl=MS@BATCH or both"):
            parse_calibration(text)

    def test_a_time_below_the_hosts_is_refused(self) -> None:
        config = RooflineTiming(deployment=LLAMA, calibration=parse_calibration("itl=0.2@1"))
        with pytest.raises(KvyardError, match=r"itl of 0.2 ms is less than the 1.084 ms the host takes"):
            make_timing(config, 1)


def test_speed_ups_divide() -> None:
    plain = make_timing(RooflineTiming(deployment=LLAMA), 1)
    quick = make_timing(RooflineTiming(deployment=LLAMA, speedup_ratio=2.0, decode_speedup_ratio=5.0), 1)
    assert quick.pass_ns([(512, 0)], 0, 0, 0) == round(plain.pass_ns([(512, 0)], 0, 0, 0) / 2)
    assert quick.decode_ns(8, 800, 3, 100).tolist() == [
        round(ns / 10) for ns in plain.decode_ns(8, 800, 3, 100).tolist()
    ]


def test_published_runs_give_ranges_for_default_timing_only() -> None:
    plain = RooflineTiming(deployment=LLAMA)
    found = plain.run_class("sglang")
    assert found is not None and (found.engine, found.model_class) == ("sglang", "dense")
    for change in (
        {"calibration": parse_calibration("itl=20@1")},
        {"speedup_ratio": 2.0},
        {"shares": Shares(mem=0.5)},
        {"deployment": msgspec.structs.replace(LLAMA, pipeline_parallel_size=2)},
    ):
        assert msgspec.structs.replace(plain, **change).run_class("vllm") is None


@pytest.mark.parametrize(("name", "words"), [("deepseek-v3", "latent attention"), ("nemotron-h-8b", "states")])
def test_models_that_no_measured_run_had_are_named(name: str, words: str) -> None:
    timing = RooflineTiming(deployment=Deployment(model=name, gpu="h100"))
    assert timing.describe().endswith(f"not checked on models with {words}")
