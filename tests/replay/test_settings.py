"""Flat settings: units, presets, conflicts, and the sentences that refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import FixedTiming, PolynomialTiming, ProfileTiming, make_timing
from kvyard.engine.timing.roofline_timing import RooflineTiming
from kvyard.errors import KvyardError
from kvyard.replay.config import LEFT_OUT, HandoverConfig, ReplayConfig
from kvyard.replay.run import replay
from kvyard.replay.settings import OF_AN_ENGINE, OF_TIERS, SETTINGS, make_config
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig
from kvyard.tiers.config import OffloadConfig


def engine(**settings: object) -> EngineConfig:
    return make_config(settings).workers[0].engine


def tiers(**settings: object) -> OffloadConfig:
    found = engine(**settings).tiers
    assert found is not None
    return found


def test_without_any_it_is_eight_workers_routed_by_cache() -> None:
    config = make_config({})
    assert config == make_config({"workers": 8, "router": "least-time", "block_size": 64, "num_gpu_blocks": "16384"})
    assert config.workers[0].count == 8 and config.workers[0].engine.tiers is None
    assert make_config({"seed": None}) == config


def test_every_field_of_a_config_has_a_setting() -> None:
    """Or a line here that says why not."""
    fleet = set(ReplayConfig.__struct_fields__) - set(SETTINGS)
    assert fleet == {"handover"}  # its own fields are settings
    assert not set(HandoverConfig.__struct_fields__) - set(SETTINGS)
    router = set(RouterConfig.__struct_fields__) - set(SETTINGS)
    assert router == {"policy", "load", "options"}  # router, router_load and router_options
    own = set(EngineConfig.__struct_fields__) - set(OF_AN_ENGINE)
    assert own == {
        "tiers",  # settings of their own
        "speculative",  # num_speculative_tokens
        "seed",  # the replay's
        "scheduler_reserve_full_isl",  # a rule of the engine, for comparisons with others
    }
    below = set(OffloadConfig.__struct_fields__) - set(OF_TIERS)
    assert below == {"tiers", "policy", "events"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("20k", 20_000), ("1.5m", 1_500_000), ("500", 500), (500, 500), (20_000.0, 20_000), ("1_000", 1000), ("2K", 2000)],
)
def test_counts(text: object, value: int) -> None:
    assert tiers(host_blocks=text).tiers[0].num_blocks == value


def test_sizes_times_and_speeds() -> None:
    assert tiers(host_bytes="2GiB").tiers[0].bytes == 2**31
    assert tiers(host_bytes=2**31).tiers[0].bytes == 2**31
    assert make_config({"event_lag": "50ms"}).event_lag == 50_000_000
    assert make_config({"event_lag": "1.5s"}).event_lag == 1_500_000_000
    assert make_config({"event_lag": 0}).event_lag == 0
    link = tiers(host_blocks=9, host_bandwidth="32/24.5", host_latency="10us").tiers[0].link
    assert (link.outward.bandwidth, link.inward.bandwidth) == (32 * 10**9, 24_500_000_000)
    assert link.outward.first_byte_ns == link.inward.first_byte_ns == 10_000
    assert tiers(host_blocks=9).tiers[0].link.inward.bandwidth == 32 * 10**9
    assert tiers(host_blocks=9, host_bandwidth="unlimited").tiers[0].link.outward.bandwidth is None
    assert tiers(host_blocks=9, host_bandwidth=16).tiers[0].link.outward.bandwidth == 16 * 10**9
    assert tiers(host_blocks=9, link="h200").tiers[0].link.duplex_bandwidth == 70 * 10**9


def test_a_block_takes_what_its_tokens_take() -> None:
    assert engine(block_size=16).bytes_per_block == 16 * 131_072
    assert engine(block_size=16, bytes_per_token="64KiB").bytes_per_block == 2**20
    assert engine(bytes_per_block=12345).bytes_per_block == 12345


def test_a_model_brings_groups_bytes_and_blocks() -> None:
    plain = engine(model="llama-3.1-8b", gpu="h100")
    assert plain.bytes_per_block == 16 * 131_072 and 20_000 < plain.num_gpu_blocks < 40_000
    hybrid = engine(model="gpt-oss-20b", gpu="b200", num_gpu_blocks=777, host_bytes="1GiB")
    assert [spec.kind for spec in hybrid.specs] == ["sliding_window", "full"] and hybrid.num_gpu_blocks == 777
    assert engine(model="llama-3.1-8b", gpu="h100", gpu_memory="40GiB", block_size=64).specs[0].block_size == 64


class TestTimingOfAModelOnACard:
    """The best timing there is, chosen by what is known of model and card."""

    CARD: ClassVar = {"model": "llama-3.1-8b", "gpu": "h100"}

    def test_by_default_a_roofline(self) -> None:
        timing = engine(**self.CARD, tensor_parallel_size=2, kv_cache_dtype="fp8").timing
        assert isinstance(timing, RooflineTiming)
        assert (timing.deployment.tensor_parallel_size, timing.deployment.kv_cache_dtype) == (2, "fp8")
        assert timing.describe() == "roofline of llama-3.1-8b on h100 TP2 fp8 cache, no measurement"
        assert timing.error() is None, "published runs of its class say, not the timing"

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"weight_dtype": "AWQ"}, "int4 weights, no measurement"),
            ({"quantization": "fp8"}, "fp8 weights, no measurement"),
            ({"dtype": "fp8"}, "fp8 weights, no measurement"),
            ({"dtype": "bfloat16"}, "llama-3.1-8b on h100, no measurement"),
            ({"gpu": "a100", "weight_dtype": "fp8"}, "computed in bf16 (a100 has no fp8)"),
            ({"pipeline_parallel_size": 2}, "PP2, no measurement, pipeline stages one after the other"),
            ({"tp": 4}, "llama-3.1-8b on h100 TP4, no measurement"),
            ({"dp": 4}, "llama-3.1-8b on h100, no measurement"),
            ({"data_parallel_size": 4}, "llama-3.1-8b on h100, no measurement"),  # ranks of a dense model share nothing
            ({"model": "qwen3-30b-a3b", "dp_size": 4}, "qwen3-30b-a3b on h100 DP4, no measurement"),
            (
                {"model": "qwen3-30b-a3b", "dp_size": 4, "enable_expert_parallel": True},
                "on h100 DP4 EP, no measurement",
            ),
        ],
    )
    def test_the_whole_deployment_counts(self, given: dict[str, Any], says: str) -> None:
        made = engine(**{**self.CARD, "timing": "roofline", **given})
        assert made.timing.describe().endswith(says)

    def test_memory_and_time_follow_from_each(self) -> None:
        def found(**given: object) -> tuple[int, int, int]:
            made = engine(**{**self.CARD, "timing": "roofline", **given})
            model = make_timing(made.timing, 1)
            return made.num_gpu_blocks, model.pass_ns((), 8, 32_000, 4000), model.pass_ns([(4000, 0)], 0, 0, 0)

        plain = found()
        for given, blocks, step, prompt in (
            ({"tensor_parallel_size": 2}, 1, -1, -1),
            ({"pipeline_parallel_size": 2}, 1, 1, 1),
            ({"weight_dtype": "fp8"}, 1, -1, -1),
            ({"weight_dtype": "int4"}, 1, -1, 1),
            ({"kv_cache_dtype": "fp8"}, 1, -1, 0),
            ({"host_us": 2900}, 0, 1, 1),
            ({"data_parallel_size": 2}, 0, 0, 0),
        ):
            signs = [(now > before) - (now < before) for now, before in zip(found(**given), plain, strict=False)]
            assert signs == [blocks, step, prompt], given

    def test_data_ranks_share_experts(self) -> None:
        given = {"model": "qwen3-30b-a3b", "gpu": "h100", "timing": "roofline"}
        alone, shared = engine(**given), engine(**given, dp_size=4, enable_expert_parallel=True)
        assert shared.num_gpu_blocks > 1.5 * alone.num_gpu_blocks

    def test_kernels_and_host_are_those_of_the_engine(self) -> None:
        timing = engine(**self.CARD, backend="sglang").timing
        assert isinstance(timing, RooflineTiming) and timing.engine == "sglang"
        assert timing.host(timing.deployment.operators()).exposed_us == 200

    def test_two_measured_numbers_tighten_a_roofline(self) -> None:
        timing = engine(**self.CARD, calibrate="ttft=120@2048,itl=14@32").timing
        assert isinstance(timing, RooflineTiming) and timing.calibration is not None
        assert timing.calibration.ttft_ms == 120 and timing.calibration.batch == 32

    def test_settings_reach_the_config(self) -> None:
        assert engine(**self.CARD, timing="fixed:50,8").timing.describe().startswith("fixed")
        assert isinstance(engine(**self.CARD, timing="polynomial").timing, PolynomialTiming)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"model": "llama-3.1-8b", "gpu_memory": "80GiB"}, "but not on which card: add gpu, one of a100, h100"),
            ({"gpu": "h100"}, "gpu is for a model"),
            ({**CARD, "gpu": "h1000"}, "unknown card 'h1000': did you mean h100 or h200 or a100? Choose one of a100"),
            ({**CARD, "model": "llama-3.1-70b"}, "doesn't fit: a card needs 135.31 GiB"),
            ({**CARD, "model": "llama-3.1-70b"}, "and has 72.85 GiB (79.19 GiB at gpu_memory_utilization 0.92)"),
            ({**CARD, "model": "llama-3.1-70b"}, "; tensor_parallel_size 2 would do"),
            (
                {**CARD, "model": "llama-3.1-80b"},
                "unknown preset 'llama-3.1-80b': did you mean llama-3.1-8b or llama-3.1-70b",
            ),
            (
                {**CARD, "model": "meta-llama/Llama-3.1-9B"},
                "no model hub is asked. Give a model's config.json or folder, or a preset: did you mean meta-llama/Llama",
            ),
            ({**CARD, "pipeline_parallel_size": 33}, "pipeline_parallel_size may be 1 to 32"),
            ({**CARD, "enable_expert_parallel": "yes"}, "LlamaForCausalLM has no experts"),
            (
                {**CARD, "weight_dtype": "int3"},
                "unknown type of weights 'int3': did you mean int8 or int4? Choose one of bf16",
            ),
            ({**CARD, "dtype": "fp3"}, "unknown type of weights 'fp3'"),
            ({**CARD, "dtype": "fp8", "weight_dtype": "int4"}, "dtype fp8 and weight_dtype int4 contradict each other"),
            ({**CARD, "kv_cache_dtype": "int3"}, "unknown data type 'int3' of the cache; choose auto or one of"),
            ({"weight_dtype": "fp8"}, "weight_dtype is for a model"),
            (
                {"timing": "fixed:1,2", "host_us": 3},
                "host_us is for timing roofline and tables: fixed:1,2 has host work",
            ),
            ({**CARD, "host_us": -3}, "host_us is the host's part of a pass in microseconds, got -3"),
            ({**CARD, "tensor_parallel_size": 3}, "can't be split over 3 ranks"),
            (
                {**CARD, "timing": "fixed:1,2", "calibrate": "itl=14@32"},
                "calibrate tightens timing roofline, not fixed",
            ),
            ({"timing": "roofline"}, "say gpu and model"),
            ({"timing": "tables"}, "say gpu and model"),
            ({**CARD, "timing": "tables:/nowhere"}, "no dense.csv, per_sequence.csv, attention.csv"),
        ],
    )
    def test_contradictions_are_refused_in_one_sentence(self, given: dict[str, Any], words: str) -> None:
        with pytest.raises(KvyardError, match=re.escape(words)):
            make_timing(engine(**given).timing, 1)


def test_tiers_below() -> None:
    shared = {"storage_blocks": "1k", "storage_scope": "shared", "shared_bandwidth": "40"}
    both = tiers(host_blocks=100, min_uses=3, offload_policy="after_hits", **shared)
    _, storage = both.tiers
    assert storage.scope == "shared" and both.min_uses == 3
    lane = storage.link.inward
    assert (lane.client_bandwidth, lane.bandwidth, lane.first_byte_ns) == (10 * 10**9, 40 * 10**9, 100_000)
    *_, remote = tiers(host_blocks=100, storage_blocks=200, remote_blocks="3k", remote_latency="2ms").tiers
    assert remote.num_blocks == 3000 and remote.link.inward.first_byte_ns == 2_000_000
    with pytest.raises(KvyardError, match="remote stands behind storage: say storage_blocks or storage_bytes"):
        engine(host_blocks=100, remote_blocks=5)
    assert engine(host_blocks=0).tiers is None
    assert engine(host_blocks=0, host_bandwidth=3).tiers is None, "as a point of a sweep"


def test_timing() -> None:
    assert engine(timing="polynomial").timing == PolynomialTiming()
    assert engine(timing="fixed:50,8").timing == FixedTiming(prefill_ms=50, decode_ms=8)
    assert engine(timing="profile:h200-llama3-8b").timing == ProfileTiming(name="h200-llama3-8b")
    assert engine(seed=7).seed == 7
    assert engine(timing_speedup=2).timing == PolynomialTiming(speedup_ratio=2.0)


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_fields_without_a_setting_are_refused_by_name(name: str) -> None:
    with pytest.raises(KvyardError, match=f"^{name}: say (prefill and decode|autoscale)"):
        make_config({name: 2})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"host_block": 3}, "did you mean host_blocks"),
        ({"num-gpu-blocks": 3}, "did you mean num_gpu_blocks"),
        ({"xyzzy": 3}, "unknown setting 'xyzzy': --list-settings lists them"),
        ({"workers": 0}, "at least one worker"),
        ({"workers": -2}, "at least one worker"),
        ({"workers": "many"}, "whole number"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks must be at least 1"),
        ({"num_gpu_blocks": True}, "whole number"),
        ({"num_gpu_blocks": 1.5}, "whole number"),
        ({"router": "kvv"}, "unknown routing policy 'kvv': did you mean kv\\? Choose one of affinity"),
        ({"router": ""}, "must be a name"),
        ({"speedup": 0}, "speedup must be .*above 0"),
        ({"speedup": "fast"}, "a number"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"event_lag": "50"}, "with its unit"),
        ({"event_lag": 50}, "with its unit"),
        ({"dp_size": 0}, "dp_size must be at least 1"),
        ({"host_blocks": 1, "host_bytes": 1}, "say the same"),
        ({"host_blocks": -1}, "can't be negative"),
        ({"host_bytes": "lots"}, "size in bytes"),
        ({"host_bytes": "1KiB"}, "single block"),
        ({"host_bandwidth": 32}, "say host_blocks or host_bytes"),
        ({"link": "h200"}, "say host_blocks or host_bytes"),
        ({"storage_blocks": 5}, "say host_blocks or host_bytes"),
        ({"host_blocks": 0, "storage_blocks": 5}, "behind host memory"),
        ({"host_blocks": 5, "link": "h200", "host_bandwidth": 3}, "give one of the two"),
        ({"host_blocks": 5, "link": "nvlink"}, "unknown link preset"),
        ({"host_blocks": 5, "host_bandwidth": "0"}, "GB/s above 0"),
        ({"host_blocks": 5, "host_bandwidth": "1/2/3"}, "GB/s above 0"),
        ({"host_blocks": 5, "host_scope": "public"}, "private, shared"),
        ({"host_blocks": 5, "offload_policy": "never"}, "unknown offload policy"),
        ({"host_blocks": 5, "enable_prefix_caching": "no", "backend": "trtllm"}, "enable_prefix_caching must be on"),
        ({"gpu_memory": "80GiB"}, "is for a model"),
        ({"model": "llama-3.1-8b"}, "how many blocks"),
        ({"model": "llama-3.1-8b", "gpu_memory": "80GiB", "num_gpu_blocks": 5}, "give one of the two"),
        ({"model": "llama-9", "gpu_memory": "80GiB"}, "unknown preset"),
        ({"model": "llama-3.1-8b", "gpu_memory": "8GiB"}, "tensor_parallel_size 4 would do"),
        ({"model": "llama-3.1-8b", "gpu_memory": "80GiB", "bytes_per_token": 5}, "follows from the model"),
        ({"groups": [{"kind": "full"}], "block_size": 16}, "each of groups has its own"),
        ({"groups": [{"kind": "full"}], "host_blocks": 16}, "what a block takes"),
        ({"groups": 7}, "groups must be a list, and is a whole number"),
        ({"timing": "guess"}, "choose polynomial"),
        ({"timing": "fixed:5"}, "fixed:PREFILL_MS,DECODE_MS"),
        ({"timing": "profile:tpu"}, "unknown profile 'tpu'"),
        ({"scheduling_policy": "lifo"}, "fcfs, priority"),
        ({"backend": "hf"}, "unknown backend 'hf': choose one of sglang, trtllm, vllm"),
        ({"enable_chunked_prefill": "perhaps"}, "true or false"),
        ({"workers": [{"block_size": 16}, {"block_size": 32}]}, "least-time routing needs one"),
    ],
)  # fmt: skip
def test_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(KvyardError, match=match):
        config = make_config(settings)
        from kvyard.replay.fleet import Fleet

        Fleet(config)


def test_split_is_prefill_and_decode_in_one() -> None:
    apart = make_config({"prefill": 2, "decode": 6})
    assert make_config({"split": "2+6"}) == make_config({"split": "2+6", "workers": 8}) == apart
    assert make_config({"split": "none", "workers": 4}) == make_config({"workers": 4})
    for settings, match in (
        ({"split": "2+6", "workers": 7}, "has 8 workers, and workers is 7"),
        ({"split": "2+6", "prefill": 2}, "leave one of the two out"),
        ({"split": "half"}, "write none, or prefill and decode workers such as 2"),
    ):
        with pytest.raises(KvyardError, match=match):
            make_config(settings)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="can't read"):
        SETTINGS.read(tmp_path / "no.toml")
    file = tmp_path / "a.toml"
    file.write_text("workers = ")
    with pytest.raises(KvyardError, match="is not TOML"):
        SETTINGS.read(file)
    file.write_text("hostblocks = 3")
    with pytest.raises(KvyardError, match=r"a.toml: .*did you mean host_blocks"):
        SETTINGS.read(file)


def test_other_backends_keep_window_layers_as_full_ones() -> None:
    asked = {"model": "gpt-oss-120b", "gpu": "h200"}
    windows, full = engine(**asked), engine(**asked, backend="trtllm")
    assert engine(**asked, backend="sglang").specs == windows.specs
    assert engine(**asked, backend="sglang", eviction="lfu").specs == full.specs
    assert len(windows.specs) == 2 and [spec.is_full for spec in full.specs] == [True]
    assert full.bytes_per_block == 2 * (windows.bytes_per_block or 0)
    assert full.num_gpu_blocks < windows.num_gpu_blocks
    with pytest.raises(KvyardError, match="one group of full attention"):
        engine(model="qwen3.5-9b", gpu="h200", backend="trtllm")


def test_windows_beside_a_connector_are_kept_since_vllm_0_23() -> None:
    asked = {"model": "gpt-oss-120b", "gpu": "h200", "vllm_version": "0.22.0"}
    beside = {**asked, "host_bytes": 2**37}
    assert len(engine(**asked).specs) == 2 and len(engine(**asked, host_bytes=0).specs) == 2
    assert [spec.is_full for spec in engine(**beside).specs] == [True]
    apart = make_config(asked | {"prefill": 1, "decode": 1})
    assert [len(kind.engine.specs) for kind in apart.workers] == [1, 1]
    assert len(engine(**beside | {"vllm_version": "0.23"}).specs) == 2
    assert len(engine(model="gpt-oss-120b", gpu="h200", host_bytes=2**37).specs) == 2


def test_store_is_an_offload_policy_or_no_lower_tier() -> None:
    host = {"host_blocks": 100, "host_bandwidth": 20, "load_policy": "threshold"}
    assert make_config({**host, "store": "lazy"}) == make_config({**host, "offload_policy": "lazy"})
    assert make_config({**host, "store": "none"}) == make_config({})
    for settings, message in (
        ({**host, "store": "eager"}, "unknown store 'eager': choose one of none, write_through"),
        ({**host, "store": "lazy", "offload_policy": "lazy"}, "leave one of the two out"),
        ({"store": "lazy"}, "offload_policy"),
    ):
        with pytest.raises(KvyardError, match=message):
            make_config(settings)


def test_releases_before_vllm_0_14_decide_on_a_pass_when_it_starts() -> None:
    given = {"model": "llama-3.1-8b", "gpu": "h100"}
    for version, ahead in (("0.13", False), ("0.14", True), ("0.32", True)):
        engine = make_config(given | {"vllm_version": version}).workers[0].engine
        assert (engine.decides_ahead, engine.overlaps_host) == (ahead, ahead)
    told = make_config(given | {"vllm_version": "0.11", "async_scheduling": True}).workers[0].engine
    assert told.decides_ahead


def engine_on(gpu: str, backend: str, model: str = "llama-3.1-8b", **settings: object) -> EngineConfig:
    return engine(gpu=gpu, backend=backend, model=model, **settings)


def test_limits_of_a_pass_are_those_of_the_engine_on_the_card() -> None:
    chunks = {gpu: engine_on(gpu, "sglang").tokens_per_pass for gpu in ("rtx4090", "l40s", "h100", "h200", "b200")}
    assert chunks == {"rtx4090": 2048, "l40s": 4096, "h100": 8192, "h200": 8192, "b200": 16384}
    assert engine_on("b200", "sglang", **{"sglang.chunked_prefill_size": 4096}).tokens_per_pass == 4096
    assert engine_on("b200", "sglang", **{"sglang.schedule_policy": "lpm"}).tokens_per_pass == 16384
    assert [engine_on("h100", backend).max_num_seqs for backend in ("vllm", "sglang", "trtllm")] == [1024, 2048, 2048]
    assert engine_on("h100", "trtllm", max_num_seqs=64).max_num_seqs == 64


def test_tensorrt_llm_takes_nine_tenths_of_what_weights_leave() -> None:
    whole = engine_on("h100", "trtllm", gpu_memory_utilization=1.0).num_gpu_blocks
    assert engine_on("h100", "trtllm").num_gpu_blocks == int(0.9 * whole)
    assert engine_on("h100", "trtllm", num_gpu_blocks=100).num_gpu_blocks == 100


def test_sglang_has_two_pools_for_a_model_with_states() -> None:
    plain = engine_on("h100", "sglang", "qwen3.5-9b")
    assert [(spec.kind, spec.block_size) for spec in plain.specs] == [("full", 1), ("mamba", 1)]
    assert plain.sglang is not None and plain.sglang.max_mamba_cache_size is not None
    assert plain.max_num_seqs == plain.sglang.max_mamba_cache_size // 3
    state_bytes = 0.9 * plain.num_gpu_blocks * (plain.bytes_per_block or 0) / plain.sglang.max_mamba_cache_size
    assert state_bytes == pytest.approx(24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192), rel=0.01), "24 layers of states"
    assert not plain.decides_ahead
    tracked = engine_on("h100", "sglang", "qwen3.5-9b", **{"sglang.mamba_radix_cache_strategy": "extra_buffer"})
    assert tracked.decides_ahead and tracked.max_num_seqs < plain.max_num_seqs


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_models_with_states_run_without_caching(backend: str) -> None:
    config = {"model": "qwen3.5-9b", "gpu": "h100", "backend": backend, "enable_prefix_caching": False, "workers": 1}
    report = replay([TraceRequest(str(number), 0, 300, 5) for number in range(4)], config=config)
    assert [record.status for record in report.records] == ["finished"] * 4
