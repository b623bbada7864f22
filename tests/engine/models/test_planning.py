"""Plans: known models by hand arithmetic and by what real engines logged, and configs that are refused."""

from __future__ import annotations

import msgspec
import pytest

from kvyard.blocks.geometry import resolve_geometry
from kvyard.blocks.spec import GroupSpec
from kvyard.engine.config import EngineConfig
from kvyard.engine.models import find_config, plan, preset, presets, read_config
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import Precision, _mamba1_bytes, mixers
from kvyard.engine.models.memory import tokens_in_flight
from kvyard.engine.models.planning import requests_that_fit
from kvyard.engine.models.weights import count_weights, weight_bytes
from kvyard.errors import KvyardError

GIB = 2**30
LLAMA = preset("llama-3.1-8b")


def parameters(name: str) -> int:
    return count_weights(Fields(preset(name))).parameters


def bare(config, memory=40 * GIB, **options):
    """A plan of the cache alone."""
    return plan(config, memory, gpu_memory_utilization=1.0, weights=0, reserve=0, **options)


# Weights


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameters_as_published(name, published):
    # The norms of queries and keys, sinks and routing biases are left out: a millionth.
    assert parameters(name) == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma-3-27b", 27.0),
        ("nemotron-h-8b", 8.1),
        ("nemotron-nano-9b-v2", 8.89),
        ("bamba-9b-v2", 9.78),
        ("llama-4-scout", 107.8),
    ],
)
def test_parameters_as_rounded_on_model_cards(name, billions):
    assert parameters(name) / 1e9 == pytest.approx(billions, abs=0.05)


def test_parameters_of_a_small_model_by_hand():
    config = {
        "architectures": ["X"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20
    of = count_weights(Fields(config))
    assert (of.linear, of.plain, of.experts) == (2 * layer, 2 * 100 * 8 + 8 + 2 * 2 * 8, 0)
    assert count_weights(Fields(config | {"tie_word_embeddings": True})).plain == of.plain - 100 * 8
    mixture = {"num_experts": 4, "moe_intermediate_size": 6, "mlp_only_layers": [1]}
    of = count_weights(Fields(config | mixture))
    assert of.experts == 4 * 3 * 8 * 6
    assert of.linear == 2 * layer - 3 * 8 * 20 + 8 * 4


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt-oss-20b", 14.46),
        ("gpt-oss-120b", 69.13),
        ("deepseek-v3", 673.2),
        ("llama-3.1-8b", 16.06),
        ("qwen3-32b", 65.52),
    ],
)
def test_weights_take_what_engines_report(name, gigabytes):
    # MXFP4 experts take 4.25 bits and are padded (vLLM logs 13.47 and 64.38 GiB); FP8 matrices a byte, with embeddings and head
    # in bf16.
    fields = Fields(preset(name))
    assert weight_bytes(fields, count_weights(fields)) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "awq", "bits": 4}, 4.16),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "fp8"}, 8),
        (None, 16),
    ],
)
def test_quantised_matrices(quantisation, bits):
    fields = Fields({**LLAMA, "quantization_config": quantisation})
    of = count_weights(fields)
    assert weight_bytes(fields, of) == of.plain * 2 + round(of.linear * bits / 8)


def test_unknown_quantisation_is_refused():
    with pytest.raises(KvyardError, match=r"quantisation 'secret' is not known.*--weights"):
        plan({**LLAMA, "quantization_config": {"quant_method": "secret"}}, 80 * GIB)


# What real engines logged


def test_blocks_of_a_real_vllm_on_an_rtx_4090():
    # vLLM 0.19.0: 2,588 blocks (LLMServingSim's validation run, meta.json). The estimate of activations is ours.
    options = {"gpu_memory_utilization": 0.9, "max_model_len": 32768, "max_num_batched_tokens": 2048}
    made = plan(LLAMA, 25_250_627_584, vllm_version="0.19", **options)
    assert made.num_blocks == pytest.approx(2588, rel=0.01)
    assert made.bytes_per_block == 2 * 2**20


@pytest.mark.parametrize(
    ("name", "options", "gib"),
    [
        # Start logs of llm-d-planner's pull request 205 (vLLM 0.19.0, H100 at 0.95, 1,024 sequences, 8,192 tokens a pass) ...
        ("llama-3.1-8b", {}, 58.11),
        ("llama-3.1-8b", {"tensor_parallel_size": 4}, 67.44),
        ("llama-3.1-8b", {"weight_dtype": "int4"}, 67.71),
        ("llama-3.1-70b", {"tensor_parallel_size": 2, "weight_dtype": "fp8"}, 37.28),
        ("qwen3-30b-a3b", {}, 15.41),
        ("gpt-oss-20b", {"tensor_parallel_size": 2}, 63.28),
        # ... and of its documents: other releases.
        ("qwen3-14b", {"vllm_version": "0.15"}, 41.94),
        ("qwen3-14b", {"vllm_version": "0.17"}, 45.34),
        ("qwen3-32b", {"vllm_version": "0.11", "gpu_memory_utilization": 0.9}, 4.45),
    ],
)
def test_memory_for_the_cache_as_vllm_logged_it(name, options, gib):
    common = {"gpu_memory_utilization": 0.95, "max_num_seqs": 1024, "max_model_len": 8192, "vllm_version": "0.19"}
    made = plan(preset(name), int(79.19 * GIB), **{**common, **options})
    assert made.cache_bytes / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("version", ["newest", "0", "-1.5", ""])
def test_a_release_that_is_none_is_refused(version):
    with pytest.raises(KvyardError, match=r"vllm_version is a release such as 0\.32, not "):
        plan(LLAMA, 80 * GIB, vllm_version=version)


def test_graphs_are_taken_off_the_cache_by_newer_releases():
    older, newer = (
        plan(LLAMA, 80 * GIB, gpu_memory_utilization=0.9, vllm_version=version).cache_bytes
        for version in ("0.19", "0.20")
    )
    assert 0.5 * GIB < older - newer < 1.5 * GIB


def test_the_share_of_a_card_is_the_releases_unless_it_is_given():
    def usable(version, **options):
        made = plan(LLAMA, 80 * GIB, vllm_version=version, reserve=0, **options)
        return (made.cache_bytes + made.weights_bytes) / made.memory

    assert usable("0.19") == pytest.approx(0.9)
    assert usable("0.20") == pytest.approx(0.92)
    assert usable("0.20", gpu_memory_utilization=0.8) == pytest.approx(0.8)


def test_bytes_of_a_long_request_as_vllm_says():
    # vLLM issue 34076: Qwen3-Coder-30B-A3B needs 24.0 GiB for 262,144 tokens.
    assert bare(preset("qwen3-30b-a3b")).bytes_per_token * 262_144 == 24 * GIB


def test_attention_blocks_next_to_states_as_vllm_says():
    # vLLM pull request 37467: 528 tokens, 0.76 % of padding (Qwen3.5).
    made = bare(preset("qwen3.5-9b"))
    state, full = made.layer_groups[0], made.layer_groups[-1]
    assert full.spec == GroupSpec(kind="full", block_size=528)
    assert made.bytes_per_block / state.used_bytes - 1 == pytest.approx(0.0076, abs=5e-5)
    # vLLM issue 24280: 672 tokens for Nemotron Nano 9B v2, whose states were bf16 then; they are float32 by default now.
    nano = preset("nemotron-nano-9b-v2")
    assert bare({**nano, "mamba_ssm_cache_dtype": "bfloat16"}).groups[-1].block_size == 672
    assert bare(nano).groups[-1].block_size == 1312


# Groups and bytes by hand


def test_one_group():
    made = bare(LLAMA, GIB)
    assert made.groups == (GroupSpec(kind="full", block_size=16),)
    assert made.bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert made.num_blocks == GIB // (16 * made.bytes_per_token) == 512
    assert (made.block_size, made.bytes_per_request) == (16, 0)
    # A request of 131,072 tokens takes 8,192 blocks; of 8,176, 511, and a block is the null block.
    assert made.max_concurrency == 512 / 8192
    assert made.max_tokens == 512 * 16
    assert made.longest == 511 * 16


def test_windows():
    made = bare(preset("gemma-3-27b"))
    assert made.groups == (GroupSpec(kind="sliding_window", block_size=16, window=1024),) * 6 + (
        GroupSpec(block_size=16),
    )
    assert [group.layers for group in made.layer_groups] == [9, 9, 9, 9, 8, 8, 10]
    page = 16 * 2 * 16 * 128 * 2
    assert made.bytes_per_block == 10 * page
    assert made.bytes_per_token == 10 * page // 16
    # Of each window group: 1,023 tokens seen and two passes of 8,192 in flight, in blocks, and one for the edge.
    assert made.bytes_per_request == 6 * (1088 + 1) * made.bytes_per_block
    assert made.max_concurrency == pytest.approx(made.num_blocks / (6 * 1089 + 131072 // 16))
    # Before release 0.26 one pass, whatever is in flight.
    before = bare(preset("gemma-3-27b"), vllm_version="0.25")
    assert before.bytes_per_request == 6 * (576 + 1) * made.bytes_per_block


@pytest.mark.parametrize(("version", "gib"), [("0.25", 45.79), ("0.26", 70.79)])
def test_windows_keep_all_passes_in_flight_since_release_0_26(version: str, gib: float) -> None:
    """Memory of one request of 131,072 tokens that vLLM asked for (its issue 49878: Gemma 4, ten layers a group of 256 KiB)."""
    specs = [GroupSpec(block_size=16)] + [GroupSpec(kind="sliding_window", block_size=16, window=1024)] * 5
    in_flight = tokens_in_flight(32768, version=version)
    blocks = 1 / requests_that_fit(specs, 131072, in_flight, 1)
    assert blocks * 10 * (256 << 10) / GIB == pytest.approx(gib, abs=0.005)


def test_states():
    made = bare(preset("nemotron-h-8b"), max_model_len=8192)
    state = 4 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4)
    assert [group.layers for group in made.layer_groups] == [4] * 7
    assert made.layer_groups[0].used_bytes == state
    assert made.groups[0] == GroupSpec(kind="mamba", block_size=1040, mode="align")
    assert made.groups[6] == GroupSpec(kind="full", block_size=1040)
    assert made.bytes_per_request == 6 * 2 * made.bytes_per_block
    assert made.max_concurrency == made.num_blocks / (6 * 2 + 8)
    without = bare(preset("nemotron-h-8b"), max_model_len=8192, enable_prefix_caching=False)
    assert without.groups[0] == GroupSpec(kind="mamba", block_size=8192, mode="none")
    assert without.max_concurrency == without.num_blocks / (6 + 8)


def test_latents_are_whole_on_every_rank():
    one, eight = (bare(preset("deepseek-v3"), tensor_parallel_size=ranks) for ranks in (1, 8))
    assert one.groups == eight.groups == (GroupSpec(kind="mla", block_size=64),)
    assert one.bytes_per_token == eight.bytes_per_token == 61 * (512 + 64) * 2
    assert bare(preset("deepseek-v3"), kv_cache_dtype="fp8").bytes_per_token == 61 * 576


def test_chunks():
    made = bare(preset("llama-4-scout"), max_model_len=65536)
    assert [spec.kind for spec in made.groups] == ["chunked_local"] * 3 + ["full"]
    assert made.groups[0].chunk == 8192
    assert made.bytes_per_request == 3 * (8192 + 2 * 8192) // 16 * made.bytes_per_block


def test_heads_are_split_and_then_repeated():
    sizes = {ranks: bare(LLAMA, tensor_parallel_size=ranks).bytes_per_token for ranks in (1, 2, 8, 16)}
    assert sizes == {1: 131072, 2: 65536, 8: 16384, 16: 16384}


def test_dtypes_and_block_sizes():
    assert bare(LLAMA, kv_cache_dtype="fp8").bytes_per_token == 65536
    assert bare({**LLAMA, "torch_dtype": "float32"}).bytes_per_token == 262144
    assert bare(LLAMA, block_size=64).groups == (GroupSpec(block_size=64),)


def test_weights_are_shared_by_ranks():
    one, four = (plan(LLAMA, 80 * GIB, tensor_parallel_size=ranks) for ranks in (1, 4))
    norms = 65 * 4096 * 2
    assert four.weights_bytes == (one.weights_bytes - norms) // 4 + norms
    assert four.num_blocks > 4 * one.num_blocks
    assert one.cache_bytes == int(80 * GIB * 0.92) - one.weights_bytes - one.reserve_bytes


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("caching", [True, False])
def test_every_preset_makes_an_engine(name, caching):
    made = plan(preset(name), 2**42, enable_prefix_caching=caching)
    geometry = resolve_geometry(made.groups, caching=caching)
    assert geometry.scheduler_block_size == made.block_size
    config = msgspec.convert(made.engine_options(), EngineConfig)
    config.check()
    assert config.num_gpu_blocks == made.num_blocks - 1
    assert config.specs == made.groups
    assert made.longest == made.max_model_len
    assert preset(name)["source"]


# How configs say what their layers are

ATTENTION = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 10}
STATE = {"mamba_d_state": 8, "mamba_d_conv": 4}
LATENT = {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2}
DELTA = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "full*6"),
        ({"sliding_window": None}, "full*6"),
        ({"sliding_window": 9}, "window*6"),
        ({"sliding_window": 9, "use_sliding_window": False}, "full*6"),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 4}, "full*4 window*2"),
        ({"sliding_window": 9, "sliding_window_pattern": 3}, "window*2 full window*2 full"),
        ({"sliding_window": 9, "model_type": "gemma2"}, "window full window full window full"),
        ({"sliding_window": 9, "model_type": "gemma3_text"}, "window*5 full"),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 9},
            "window full window full window full",
        ),
        ({"layer_types": ["linear_attention", "full_attention"] * 3} | DELTA, "delta full delta full delta full"),
        ({"layers_block_type": ["mamba", "attention"] * 3} | STATE, "mamba full mamba full mamba full"),
        ({"layers_block_type": ["mamba", "hybrid"] * 3} | STATE, "mamba both mamba both mamba both"),
        ({"full_attention_interval": 3} | DELTA, "delta*2 full delta*2 full"),
        ({"attention_chunk_size": 8}, "chunk*3 full chunk*2"),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0, 1, 0]}, "chunk full chunk full chunk full"),
        ({"attn_layer_indices": [1]} | STATE, "mamba full mamba*4"),
        ({"attn_layer_period": 3, "attn_layer_offset": 1} | STATE, "mamba1 full mamba1*2 full mamba1"),
        ({"model_type": "falcon_h1"} | STATE, "both*6"),
        (LATENT, "mla*6"),
        ({"num_kv_shared_layers": 2}, "full*4 none*2"),
        ({"hybrid_override_pattern": "M-*E"} | STATE, "mamba none full none"),
    ],
)
def test_layers(config, expected):
    wanted = []
    for word in expected.split():
        kind, _, times = word.partition("*")
        wanted += [kind] * int(times or 1)
    assert mixers(Fields(ATTENTION | config)) == wanted


def test_a_nested_language_model_is_found():
    nested = {
        "architectures": ["V"],
        "torch_dtype": "bfloat16",
        "text_config": {k: v for k, v in LLAMA.items() if k != "torch_dtype"},
    }
    assert bare(nested).bytes_per_token == bare(LLAMA).bytes_per_token


# Refusals


def without(*names):
    return {key: value for key, value in LLAMA.items() if key not in names}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {},
            "unknown: the config lacks num_hidden_layers or n_layer or num_layers or n_layers, hidden_size or n_embd",
        ),
        (
            without("num_attention_heads", "vocab_size"),
            "LlamaForCausalLM: the config lacks num_attention_heads or n_head or num_heads, vocab_size;",
        ),
        (without("max_position_embeddings"), "lacks max_position_embeddings"),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers must be a whole number, got 'many'"),
        (
            {**LLAMA, "layer_types": ["full_attention", "psychic_attention"] * 16},
            "unknown layer types psychic_attention",
        ),
        ({**LLAMA, "layer_types": ["full_attention"]}, "1 layer types for 32 layers"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "lacks sliding_window"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "lacks linear_num_key_heads, linear_num_value_heads,"),
        ({**LLAMA, "attn_layer_indices": [3]}, "lacks mamba_state or ssm_state_size or mamba_d_state"),
        ({**LLAMA, "hybrid_override_pattern": "MX"}, "unknown letters 'X'"),
        ({**LLAMA, "index_topk": 2048}, "the config lacks kv_lora_rank, index_head_dim, index_n_heads"),
        ({**LLAMA, "compress_ratios": [4]}, "compressed attention, and indexes that layers share, are not supported"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder models are not supported"),
        ({**LLAMA, "torch_dtype": "int3"}, "unknown data type 'int3'"),
    ],
)
def test_configs_that_say_too_little(config, words):
    with pytest.raises(KvyardError) as refused:
        plan(config, 80 * GIB)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 0}, "gpu_memory must be above 0"),
        ({"gpu_memory_utilization": 1.2}, "a share above 0 and at most 1, got 1.2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"tensor_parallel_size": 3}, "32 heads with 8 KV heads can't be split over 3 ranks"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"kv_cache_dtype": "fp3"}, "unknown data type 'fp3' of the cache; choose auto or one of float32, bfloat16"),
        (
            {"weight_dtype": "fp3"},
            "unknown type of weights 'fp3': did you mean fp8 or fp4? Choose one of bf16",
        ),
        ({"weight_dtype": "mxfp4"}, "LlamaForCausalLM has no experts, and mxfp4 is for those alone"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size may be 1, 2, 4, 8, 16, 32"),
        (
            {"pipeline_parallel_size": 33},
            "32 layers can't be cut into 33 pipeline stages; pipeline_parallel_size may be 1 to 32",
        ),
        ({"enable_expert_parallel": True}, "LlamaForCausalLM has no experts: leave enable_expert_parallel out"),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1, got 0"),
        ({"memory": 16 * GIB, "weights": 16 * GIB}, "use a larger card or smaller weights"),
        ({"memory": 16 * GIB}, "; tensor_parallel_size 2 would do"),
    ],
)
def test_options_that_cant_work(options, words):
    with pytest.raises(KvyardError) as refused:
        plan(LLAMA, **({"memory": 80 * GIB} | options))
    assert words in str(refused.value)


def test_states_that_cant_be_split():
    with pytest.raises(KvyardError, match="linear attention can't be split over 3 ranks"):
        config = preset("qwen3.5-9b")
        config["text_config"] |= {"num_attention_heads": 12, "num_key_value_heads": 3}
        bare(config, tensor_parallel_size=3)


@pytest.mark.parametrize("spelling", ["Qwen/Qwen3-32B", "qwen/qwen3-32b", "Qwen3-32B"])
def test_a_model_is_found_by_its_published_name(spelling: str) -> None:
    assert find_config(spelling) == preset("qwen3-32b")


def test_published_names_are_unique() -> None:
    names = [hub.lower() for name in presets() for hub in preset(name)["hub"]]
    assert len(names) == len(set(names)) and not set(names) & set(presets())


def test_a_near_published_name_is_suggested() -> None:
    with pytest.raises(KvyardError, match="did you mean Qwen/Qwen3-32B"):
        find_config("Qwen/Qwen3-32")


def test_config_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(LLAMA))
    assert read_config(path) == LLAMA
    for text, words in (("{", "not JSON"), ("[]", "not a JSON object")):
        path.write_text(text)
        with pytest.raises(KvyardError, match=words):
            read_config(path)
    with pytest.raises(KvyardError, match="can't be read: No such file"):
        read_config(tmp_path / "none.json")
    with pytest.raises(KvyardError, match="unknown preset 'gpt-9': choose one of bamba"):
        preset("gpt-9")


def test_a_state_of_mamba_1() -> None:
    """Per channel the inputs that the convolution looks back on, and the recurrent state."""
    fields = Fields({"hidden_size": 8, "expand": 2, "conv_kernel": 4, "ssm_state_size": 16})
    assert _mamba1_bytes(fields, Precision(cache=2, state=2, ssm=4), 1) == 16 * (3 * 2 + 16 * 4)
    assert _mamba1_bytes(fields, Precision(cache=2, state=2, ssm=4), 2) == 8 * (3 * 2 + 16 * 4)


def test_sparse_attention_keeps_an_index_too() -> None:
    # Of each layer: 512 + 64 latent elements, and a key of 128 bytes with a scale of 4; in 8 bits four scales beside 512 bytes.
    assert plan(preset("deepseek-v3.2"), 2**45).bytes_per_token == 61 * (2 * 576 + 132)
    assert plan(preset("deepseek-v3.2"), 2**45, kv_cache_dtype="fp8").bytes_per_token == 61 * (512 + 16 + 128 + 132)
    assert plan(preset("glm-5"), 2**45).bytes_per_token == 78 * (2 * 576 + 132)
    indexers = 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    assert parameters("deepseek-v3.2") - parameters("deepseek-v3") == indexers


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("glm-5", 744),
        ("glm-5.1-fp8", 744),
        ("nemotron-3-ultra-550b-a55b", 550),
        ("kimi-k2.6-nvfp4", 1026),
    ],
)
def test_parameters_are_what_the_name_says(name: str, billions: float) -> None:
    assert parameters(name) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_experts_in_a_narrower_space() -> None:
    config = preset("nemotron-3-ultra-550b-a55b")
    wide = {**config, "moe_latent_size": None}
    layers = config["layers_block_type"].count("moe")
    saved = 2 * 512 * 5120 * (8192 - 2048) - 2 * 8192 * 2048
    assert plan(wide, 2**45).parameters - plan(config, 2**45).parameters == layers * saved


def test_a_checkpoint_with_an_8_bit_cache_has_one_by_default() -> None:
    own = plan(preset("kimi-k2.5-nvfp4"), 2**45)
    assert own.bytes_per_token == 61 * 576
    assert plan(preset("kimi-k2.5-nvfp4"), 2**45, kv_cache_dtype="bfloat16").bytes_per_token == 2 * 61 * 576
    # Experts have 4 bits and a byte for each 16 of them; attention and shared experts stay as they were.
    experts = 60 * 384 * 3 * 7168 * 2048
    assert own.weights_bytes == pytest.approx(experts * 4.5 / 8 + 2 * (own.parameters - experts), rel=1e-6)


def test_there_are_sixty_presets() -> None:
    assert len(presets()) >= 60
