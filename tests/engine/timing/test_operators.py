"""Operators: their sizes are the model's, whatever it is split into."""

from __future__ import annotations

import pytest

from kvyard.engine.models.fields import Fields, preset, presets
from kvyard.engine.models.planning import plan
from kvyard.engine.models.split import Parallelism
from kvyard.engine.models.weights import count_weights
from kvyard.engine.timing.operators import Operators, make_operators
from kvyard.errors import KvyardError


def parameters(of: Operators) -> int:
    """Of matrices in layers, on one rank."""
    dense = sum(one.n * one.k * one.count for one in of.products)
    return dense + sum(layer.experts * layer.pair_flops // 2 * layer.count for layer in of.experts)


@pytest.mark.parametrize("name", presets())
def test_matrices_add_up_to_the_models_parameters(name: str) -> None:
    fields = Fields(preset(name))
    weights = count_weights(fields)
    found = parameters(make_operators(preset(name), Parallelism()))
    assert found == pytest.approx(weights.linear + weights.experts, rel=0.04)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "bamba-9b-v2", "qwen3.5-9b"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_matrices(name: str, ranks: int) -> None:
    whole = parameters(make_operators(preset(name), Parallelism()))
    part = parameters(make_operators(preset(name), Parallelism(tensor_parallel_size=ranks)))
    assert part * ranks == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "gemma-3-27b"])
def test_attention_reads_what_the_cache_holds(name: str) -> None:
    of = make_operators(preset(name), Parallelism())
    made = plan(preset(name), 2**40)
    assert sum(one.token_bytes * one.count for one in of.attention if not one.window) == made.bytes_per_token


def test_whole_experts_are_spread_over_tensor_and_data_ranks() -> None:
    split = Parallelism(tensor_parallel_size=2, data_parallel_size=4, enable_expert_parallel=True)
    (layer,) = make_operators(preset("qwen3-30b-a3b"), split).experts
    assert (layer.experts, layer.tokens, layer.per_token) == (16, 4, 8 * 4 / 8)
    (sliced,) = make_operators(preset("qwen3-30b-a3b"), Parallelism(tensor_parallel_size=2)).experts
    assert (sliced.experts, sliced.per_token) == (128, 8)
    assert sliced.expert_bytes * 2 == layer.expert_bytes


def test_collectives_only_where_ranks_share_a_model() -> None:
    assert make_operators(preset("llama-3.1-8b"), Parallelism()).collectives == 0
    assert make_operators(preset("llama-3.1-8b"), Parallelism(tensor_parallel_size=2)).collectives == 64


def test_quantised_weights_take_less_and_multiply_in_their_type() -> None:
    plain = make_operators(preset("llama-3.1-8b"), Parallelism())
    small = make_operators(preset("llama-3.1-8b"), Parallelism(), weight_dtype="fp8")
    assert {one.weight for one in plain.products} == {2.0} and {one.weight for one in small.products} == {1.0}
    assert (plain.dtype, small.dtype) == ("bf16", "fp8")


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (Parallelism(tensor_parallel_size=3), "32 heads with 8 KV heads can't be split over 3 ranks"),
        (Parallelism(pipeline_parallel_size=40), "32 layers can't be cut into 40 pipeline stages"),
        (Parallelism(data_parallel_size=0), "data_parallel_size must be at least 1, got 0"),
    ],
)
def test_impossible_splits_are_refused(split: Parallelism, says: str) -> None:
    with pytest.raises(KvyardError, match=says):
        make_operators(preset("llama-3.1-8b"), split)


def test_an_unknown_weight_type_is_refused() -> None:
    with pytest.raises(
        KvyardError,
        match=r"unknown type of weights 'int3': did you mean int8 or int4\? Choose one of bf16",
    ):
        make_operators(preset("llama-3.1-8b"), Parallelism(), weight_dtype="int3")
