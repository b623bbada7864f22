"""Settings of an engine: everything that can't be honoured is refused in one sentence."""

from __future__ import annotations

import pytest

from kvyard.blocks import GroupSpec
from kvyard.blocks.spec import ConfigError
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.timing import FixedTiming
from kvyard.errors import KvyardError
from kvyard.tiers import OffloadConfig, TierConfig

HICACHE = {"tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),)), "bytes_per_block": 1, "backend": "sglang"}


STORAGE = {**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),) * 2)}


def test_sglang_has_host_memory_and_files_behind_it():
    EngineConfig(**HICACHE).check()
    EngineConfig(**STORAGE).check()


STATES = {
    "backend": "sglang",
    "async_scheduling": False,
    "groups": (GroupSpec(block_size=1), GroupSpec(kind="mamba", block_size=1)),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_gpu_blocks": 0}, "num_gpu_blocks"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "max_num_batched_tokens"),
        ({"block_size": 16, "groups": (GroupSpec(),)}, "block_size"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 5}, "enable_chunked_prefill"),
        ({"speculative": SpeculativeConfig(num_speculative_tokens=9)}, "acceptance_rates"),
        ({"scheduling_policy": "priority", "preemption_mode": "oldest"}, "preemption_mode"),
        ({"bytes_per_block": 0}, "bytes_per_block"),
        ({"tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),))}, "bytes_per_block"),
        (
            {
                "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),)),
                "bytes_per_block": 1,
                "enable_prefix_caching": False,
                "backend": "trtllm",
            },
            "enable_prefix_caching",
        ),
        (
            {**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),), policy="write_through_generated")},
            "offload_policy",
        ),
        (
            {
                **HICACHE,
                "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),), policy="on_eviction", on_unclean="drop"),
            },
            "leave out offload_ahead and on_unclean",
        ),
        ({**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),) * 3)}, "files behind it"),
        ({**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5, scope="shared"),))}, "files behind it"),
        ({**HICACHE, "sglang": SglangSettings(prefetch_threshold=64)}, "storage behind host memory"),
        ({**STORAGE, "sglang": SglangSettings(prefetch_threshold=0)}, "prefetch_threshold must be at least 1"),
        ({**STORAGE, "sglang": SglangSettings(prefetch_timeout_base=-1.0)}, "prefetch_timeout_base must be finite"),
        (
            {**STORAGE, "sglang": SglangSettings(hicache_storage_prefetch_retry_poll_interval=-1)},
            "retry_poll_interval must not be negative",
        ),
        (
            {**STORAGE, "groups": (GroupSpec(), GroupSpec(kind="sliding_window", window=64))},
            "storage behind the host beside sliding windows",
        ),
        (
            {**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),), blocks_per_chunk=2)},
            "leave out blocks_per_chunk",
        ),
        (
            {**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),), policy="after_hits", min_uses=3)},
            "leave out min_uses 3",
        ),
        (
            {**HICACHE, "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5, eviction="priority"),))},
            "leave out eviction",
        ),
        ({**HICACHE, "sglang": SglangSettings(books_sampled=True)}, "HiCache's"),
        ({**STATES, "groups": (GroupSpec(), GroupSpec(kind="mamba"))}, "pages of one token only"),
        ({**STATES, "sglang": SglangSettings(mamba_track_interval=128), "groups": ()}, "models with states"),
        ({**STATES, "async_scheduling": True}, "without overlap only"),
        ({**STATES, "sglang": SglangSettings(mamba_radix_cache_strategy="extra_buffer_lazy")}, "requires the overlap"),
        (
            {
                **STATES,
                "sglang": SglangSettings(mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=4),
                "speculative": SpeculativeConfig(num_speculative_tokens=4, acceptance_rates=(0.5,) * 4),
            },
            "at least the 5 tokens that a request verifies",
        ),
        ({**STATES, "tiers": HICACHE["tiers"], "bytes_per_block": 1}, "states in host memory"),
        ({**STATES, "max_num_seqs": 4, "sglang": SglangSettings(max_mamba_cache_size=11)}, "too few for 4 requests"),
        ({"backend": "sglang", "sglang": SglangSettings(max_mamba_cache_size=11)}, "models with states"),
        ({**HICACHE, "heed_hints": True}, "HiCache's"),
        (
            {
                **HICACHE,
                "groups": (GroupSpec(), GroupSpec(kind="sliding_window", window=64)),
                "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),), policy="on_eviction"),
            },
            "modelled with write_through and after_hits",
        ),
        (
            {"tiers": OffloadConfig(tiers=(TierConfig(num_blocks=5),)), "bytes_per_block": 1, "backend": "trtllm"},
            "trtllm",
        ),
    ],
)
def test_unsupported_combinations_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**changes).check()


def test_a_timing_that_makes_no_sense_is_refused():
    with pytest.raises(KvyardError, match=r"^timing: prefill_ms must be"):
        EngineConfig(timing=FixedTiming(prefill_ms=-1, decode_ms=1)).check()
