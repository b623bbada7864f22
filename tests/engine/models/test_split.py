"""Models over several cards: what each has, by hand from public model cards; every preset on every card makes sense."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import pairwise

import pytest

from kvyard.engine.cards import CARDS
from kvyard.engine.models import ModelPlan, plan, preset, presets
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.split import Parallelism
from kvyard.engine.models.weights import WEIGHT_BITS, count_weights, find_weight_dtype, weight_bits, weight_bytes
from kvyard.engine.timing.operators import make_operators
from kvyard.engine.timing.roofline import RooflineModel
from kvyard.errors import KvyardError

GIB = 2**30
SMALL = {"reserve": 0, "gpu_memory_utilization": 1.0, "max_model_len": 8192}


def weights(name: str, dtype: str | None = None, **split: int) -> list[int]:
    """Bytes on a card of each pipeline stage."""
    fields, of = Fields(preset(name)), Parallelism(**split)
    stages = range(of.pipeline_parallel_size)
    return [weight_bytes(fields, count_weights(fields, of, stage), dtype) for stage in stages]


# By hand


def test_llama_70b_over_four_cards() -> None:
    # 70,553,706,496 parameters of 2 bytes; the 161 norms of 8,192 are on every card.
    norms = 161 * 8192
    assert weights("llama-3.1-70b", tensor_parallel_size=4) == [2 * ((70_553_706_496 - norms) // 4 + norms)]
    assert weights("llama-3.1-70b", tensor_parallel_size=4)[0] / 1e9 == pytest.approx(141.107 / 4, rel=1e-4)


def test_llama_70b_over_pipeline_stages() -> None:
    vocabulary, hidden, inner = 128256, 8192, 28672
    layer = hidden * (8192 + 2 * 1024) + 8192 * hidden + 3 * hidden * inner + 2 * hidden
    first, middle, last = weights("llama-3.1-70b", pipeline_parallel_size=3)
    assert Parallelism(pipeline_parallel_size=3).stages(80) == [range(27), range(27, 54), range(54, 80)]
    assert (first, middle) == (2 * (27 * layer + vocabulary * hidden), 2 * 27 * layer)
    assert last == 2 * (26 * layer + vocabulary * hidden + hidden)
    assert first + middle + last == 2 * 70_553_706_496


def test_tied_embeddings_are_on_the_first_and_the_last_stage() -> None:
    fields = Fields({**preset("llama-3.1-8b"), "tie_word_embeddings": True})
    table = 128256 * 4096
    both = [count_weights(fields, Parallelism(pipeline_parallel_size=2), stage) for stage in (0, 1)]
    assert sum(one.parameters for one in both) == count_weights(fields).parameters + table
    assert count_weights(fields).parameters == 8_030_261_248 - table


def test_deepseek_v3_with_experts_over_eight_cards() -> None:
    hidden, width = 7168, 2048
    latent = hidden * 1536 + hidden * 576  # projections down are on every card
    heads = 16 * (1536 * 192 + 512 * 256 + 128 * hidden)  # 16 of 128 heads
    experts = 58 * 32 * 3 * hidden * width  # 32 of 256 experts
    shared = 58 * (3 * hidden * width // 8 + 256 * hidden)  # and the router
    dense = 3 * 3 * hidden * 18432 // 8
    plain = 2 * 129280 * hidden // 8 + (2 * 61 + 1) * hidden
    wanted = experts + 61 * (latent + heads) + shared + dense + 2 * plain
    assert weights("deepseek-v3", tensor_parallel_size=8, enable_expert_parallel=True) == [wanted]
    assert wanted / GIB == pytest.approx(79.2, abs=0.1)
    # With data parallelism attention is whole on every card, and there are as few experts on it.
    ((alone,), (split,)) = (
        weights("deepseek-v3", enable_expert_parallel=True, **ways)
        for ways in ({"data_parallel_size": 8}, {"tensor_parallel_size": 8})
    )
    assert (
        alone - split == 61 * 7 * heads + 7 * (58 * 3 * hidden * width // 8 + dense) + 2 * 7 * 2 * 129280 * hidden // 8
    )


def test_qwen3_235b_over_eight_cards() -> None:
    # 4 KV heads: over 8 cards each is there twice.
    layer = 4096 * 128 * (8 + 2 * 1) + 8 * 128 * 4096 + 4096 * 128 + 128 * 3 * 4096 * 1536 // 8
    plain = 2 * 151936 * 4096 // 8 + (2 * 94 + 1) * 4096
    assert weights("qwen3-235b-a22b", tensor_parallel_size=8) == [2 * (94 * layer + plain)]
    assert count_weights(Fields(preset("qwen3-235b-a22b"))).parameters == pytest.approx(235_093_634_560, rel=1e-5)
    # Whole experts or slices of all: a card has as much of them.
    whole = weights("qwen3-235b-a22b", tensor_parallel_size=8, enable_expert_parallel=True)
    assert whole == weights("qwen3-235b-a22b", tensor_parallel_size=8)
    # Without expert parallelism too, data ranks share the experts (vLLM flattens tensor over data ranks).
    flat = Fields(preset("qwen3-235b-a22b"))
    assert count_weights(flat, Parallelism(data_parallel_size=8)).experts == count_weights(flat).experts // 8


@pytest.mark.parametrize(
    ("dtype", "gigabytes"), [("bf16", 141.1), ("fp8", 72.7), ("int8", 72.7), ("int4", 39.8), ("fp4", 42.7)]
)
def test_llama_70b_in_other_types(dtype: str, gigabytes: float) -> None:
    # Embeddings and output layer, 2.1 B parameters, stay in bf16.
    assert weights("llama-3.1-70b", dtype)[0] / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_experts_alone_in_mxfp4() -> None:
    assert weights("gpt-oss-120b", "mxfp4") == weights("gpt-oss-120b")
    assert weights("gpt-oss-120b", "bf16")[0] == pytest.approx(2 * 116.83e9, rel=0.001)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [("AWQ", "int4"), ("gptq_marlin", "int4"), ("NVFP4", "fp4"), ("torch.float16", "bf16"), ("fp8-e4m3", "fp8")],
)
def test_types_as_engines_spell_them(spelled: str, name: str) -> None:
    assert find_weight_dtype(spelled) == name


def test_stages_share_the_cache() -> None:
    one, four = (plan(preset("llama-3.1-70b"), 200 * GIB, pipeline_parallel_size=ways, **SMALL) for ways in (1, 4))
    assert (one.bytes_per_token, four.bytes_per_token) == (80 * 4096, 20 * 4096)
    assert four.stage == 0  # twenty layers each; the first and the last have a table of the vocabulary more
    assert four.num_blocks == (200 * GIB - four.weights_bytes) // (16 * 20 * 4096)


def test_the_smallest_number_of_cards_that_would_do_is_named() -> None:
    for name, card, ranks in (("llama-3.1-70b", "h100", 2), ("deepseek-v3", "h100", 16), ("deepseek-v3", "h200", 8)):
        memory = CARDS[card].memory
        with pytest.raises(KvyardError, match=f"doesn't fit: a card needs .*; tensor_parallel_size {ranks} would do"):
            plan(preset(name), memory)
        plan(preset(name), memory, tensor_parallel_size=ranks)
        with pytest.raises(KvyardError, match="doesn't fit"):
            plan(preset(name), memory, tensor_parallel_size=ranks // 2)
    with pytest.raises(KvyardError, match="use a larger card or smaller weights"):
        plan(preset("deepseek-v3"), GIB)


# Every preset on every card


def fitting(name: str, memory: int) -> dict[int, ModelPlan]:
    """Tensor ranks, powers of two, on which a preset fits, and how."""
    found = {}
    for ranks in (1, 2, 4, 8, 16):
        with suppress(KvyardError):
            found[ranks] = plan(preset(name), memory, tensor_parallel_size=ranks)
    return found


@pytest.mark.parametrize("name", presets())
def test_every_preset_on_every_card(name: str) -> None:
    whole = plan(preset(name), 2**50).weights_bytes
    operators = cache(lambda tensor: make_operators(preset(name), Parallelism(tensor_parallel_size=tensor)))
    for card in CARDS.values():
        blocks, steps = [], []
        ranks = fitting(name, card.memory)
        assert ranks or card.memory < 50 * GIB or whole > 6 * card.memory, card.name
        for tensor, made in ranks.items():
            assert 0 < made.weights_bytes < card.memory and made.bytes_per_token > 0
            blocks.append(made.num_blocks * made.block_size)
            model = RooflineModel(operators(tensor), card)
            one, many = (model.pass_ns((), batch, 1000 * batch, 1000) for batch in (1, 64))
            prompts = [model.pass_ns([(new, 0)], 0, 0, 0) for new in (512, 4096)]
            assert 0 < one < many < 64 * one and prompts[0] < prompts[1], (card.name, tensor)
            assert 1e6 < one < 500e6 and prompts[1] < 60e9, (card.name, tensor)
            steps.append(prompts[1])
        assert blocks == sorted(blocks), card.name
        if card.peer_latency_us < 10:  # over PCIe more cards may not pay
            node = steps[: sum(tensor <= 8 for tensor in ranks)]  # nor do those of a second node, for small models
            assert all(more <= fewer * 1.1 for fewer, more in pairwise(node)), card.name


@pytest.mark.parametrize("name", presets())
def test_blocks_fall_as_weights_grow_and_times_too(name: str) -> None:
    card, found, steps = CARDS["h200"], [], {}
    ranks = min(fitting(name, card.memory))
    split = Parallelism(tensor_parallel_size=ranks)
    types = sorted((dtype for dtype in WEIGHT_BITS if dtype != "mxfp4"), key=lambda dtype: WEIGHT_BITS[dtype])
    for dtype in types:
        try:
            made = plan(preset(name), card.memory, tensor_parallel_size=ranks, weight_dtype=dtype)
        except KvyardError:
            assert WEIGHT_BITS[dtype] > weight_bits(Fields(preset(name)))[1]  # of a checkpoint that is quantised
            continue
        found.append(made.num_blocks)
        model = RooflineModel(make_operators(preset(name), split, weight_dtype=dtype), card)
        steps[dtype] = model.pass_ns((), 1, 1000, 1000)
    assert found == sorted(found, reverse=True) and found[0] > found[-1]
    # A small product is mostly launch and quantised ones launch more, so only large weights must gain by fewer bits.
    dense = not Fields(preset(name)).integer("num_experts", 0)
    if dense and "bf16" in steps and plan(preset(name), 2**50).weights_bytes / ranks > 10e9:
        assert min(steps["fp8"], steps["int4"]) < steps["bf16"], name
    half, whole = (plan(preset(name), 2**42, kv_cache_dtype=kind) for kind in ("fp8", "bfloat16"))
    if half.groups == whole.groups:  # next to states a block has more tokens instead
        assert half.bytes_per_token < whole.bytes_per_token and half.num_blocks > whole.num_blocks
