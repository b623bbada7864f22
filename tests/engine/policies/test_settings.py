"""Settings that a backend can't honour are refused by name, never ignored."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvyard.blocks import GroupSpec
from kvyard.blocks.spec import ConfigError
from kvyard.engine.build import make_core
from kvyard.engine.config import BACKENDS, EngineConfig, SpeculativeConfig
from kvyard.engine.policies.mixed import MixedPasses
from kvyard.engine.policies.settings import SglangSettings, TrtllmSettings
from kvyard.engine.policies.sglang_passes import SglangPasses
from kvyard.engine.policies.trtllm import TrtllmPasses
from kvyard.errors import KvyardError


@pytest.mark.parametrize(
    ("backend", "policy", "size"),
    [("vllm", MixedPasses, 64), ("sglang", SglangPasses, 1), ("trtllm", TrtllmPasses, 32)],
)
def test_each_backend_has_its_policy_and_block_size(backend, policy, size):
    core = make_core(EngineConfig(backend=backend))
    assert type(core.scheduler.policy) is policy
    assert core.scheduler.manager.groups[0].block_size == size


def test_the_backends_are_those_of_the_registry():
    assert BACKENDS.names() == ["vllm", "sglang", "trtllm"]
    with pytest.raises(
        KvyardError, match=r"unknown backend 'vlm': did you mean vllm\? Choose one of sglang, trtllm, vllm"
    ):
        EngineConfig(backend="vlm").check()


HYBRID = (GroupSpec(), GroupSpec(kind="sliding_window", window=64))
DRAFTS = SpeculativeConfig(num_speculative_tokens=2)
NGRAM = SpeculativeConfig(num_speculative_tokens=2, eagle=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sglang": SglangSettings()}, "sglang settings are for backend sglang, not for vllm"),
        ({"backend": "trtllm", "sglang": SglangSettings()}, "sglang settings are for backend sglang, not for trtllm"),
        ({"backend": "sglang", "trtllm": TrtllmSettings()}, "trtllm settings are for backend trtllm, not for sglang"),
        (
            {"backend": "sglang", "max_num_batched_tokens": 4096},
            "max_num_batched_tokens is not a setting of backend sglang",
        ),
        ({"backend": "sglang", "scheduling_policy": "priority"}, "sglang.schedule_policy"),
        ({"backend": "sglang", "enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"backend": "sglang", "preemption_mode": "oldest"}, "least output"),
        ({"backend": "sglang", "watermark": 0.1}, "watermark"),
        ({"backend": "trtllm", "preemption_mode": "oldest"}, "it pauses the latest arrival, or none"),
        ({"backend": "trtllm", "scheduler_reserve_full_isl": False}, "capacity_scheduler_policy"),
        ({"backend": "trtllm", "enable_chunked_prefill": False}, "it has trtllm.enable_chunked_prefill"),
        ({"backend": "trtllm", "scheduling_policy": "priority"}, "first come, first served"),
        ({"backend": "trtllm", "trtllm": TrtllmSettings(chunk_unit_size=33)}, "multiple of the block size"),
        ({"backend": "trtllm", "trtllm": TrtllmSettings(batch_wait_timeout_iters=-1)}, "must not be negative"),
        ({"backend": "trtllm", "trtllm": TrtllmSettings(batch_wait_max_tokens_ratio=2)}, "a share from 0 to 1"),
        ({"backend": "trtllm", "groups": (GroupSpec(), GroupSpec(kind="sliding_window", window=64))}, "full attention"),
        ({"backend": "sglang", "groups": (GroupSpec(kind="sliding_window", window=64),)}, "full attention"),
        (
            {
                "backend": "sglang",
                "groups": (GroupSpec(), *(GroupSpec(kind="sliding_window", window=window) for window in (64, 128))),
            },
            "windows of one size",
        ),
        (
            {"backend": "sglang", "groups": HYBRID, "num_gpu_blocks": 20},
            "128 window tokens, too few for two windows of 64",
        ),
        ({"backend": "sglang", "groups": HYBRID, "eviction": "lfu"}, "sglang.radix_eviction_policy"),
        ({"backend": "sglang", "groups": HYBRID, "role": "decode"}, "one group of full attention"),
        ({"backend": "sglang", "sglang": SglangSettings(swa_full_tokens_ratio=0)}, "above 0 and at most 1"),
        ({"backend": "trtllm", "speculative": DRAFTS}, "speculative tokens are modelled for backend"),
        (
            {"backend": "sglang", "speculative": DRAFTS, "role": "decode"},
            "roles and books_sampled are modelled without",
        ),
        ({"backend": "sglang", "speculative": DRAFTS, "eviction": "lfu"}, "need its radix tree"),
        (
            {"backend": "sglang", "speculative": NGRAM, "sglang": SglangSettings(enable_mixed_chunk=True)},
            "SGLang turns enable_mixed_chunk off with drafters other than EAGLE",
        ),
        (
            {"backend": "sglang", "speculative": DRAFTS, "sglang": SglangSettings(speculative_num_draft_tokens=5)},
            "SGLang verifies 3 tokens with 2 drafts in a row, not 5",
        ),
        (
            {"backend": "sglang", "speculative": DRAFTS, "sglang": SglangSettings(speculative_eagle_topk=0)},
            "speculative_eagle_topk must be at least 1",
        ),
        (
            {"backend": "sglang", "sglang": SglangSettings(speculative_eagle_topk=2)},
            "speculative_eagle_topk is for draft tokens: give num_speculative_tokens, too",
        ),
        ({"backend": "sglang", "sglang": SglangSettings(chunked_prefill_size=0)}, "at least 1"),
        (
            {"backend": "sglang", "block_size": 64, "sglang": SglangSettings(chunked_prefill_size=100)},
            "multiple of the page",
        ),
        ({"backend": "sglang", "sglang": SglangSettings(max_prefill_tokens=100)}, "at least chunked_prefill_size"),
        ({"backend": "sglang", "sglang": SglangSettings(schedule_conservativeness=-1)}, "not be negative"),
    ],
)
def test_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options).check()


def test_read_from_json():
    config = msgspec.json.decode(
        b'{"backend": "sglang", "sglang": {"schedule_policy": "lpm", "clip_max_new_tokens": 64}}', type=EngineConfig
    )
    assert config.sglang == SglangSettings(schedule_policy="lpm", clip_max_new_tokens=64)
    with pytest.raises(msgspec.ValidationError, match="schedule_polici"):
        msgspec.json.decode(b'{"backend": "sglang", "sglang": {"schedule_polici": "lpm"}}', type=EngineConfig)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefill_max_requests": 0}, "sglang.prefill_max_requests must be at least 1, got 0"),
        ({"schedule_conservativeness": float("nan")}, "sglang.schedule_conservativeness must be finite"),
        (
            {"books_sampled": True, "enable_mixed_chunk": True},
            "sglang.enable_mixed_chunk is True, which workers with roles",
        ),
        (
            {"books_sampled": True, "schedule_policy": "lof"},
            "sglang.schedule_policy is 'lof', which workers with roles",
        ),
        (
            {"books_sampled": True, "chunked_prefill_size": -1},
            "sglang.chunked_prefill_size is -1, which workers with roles",
        ),
    ],
)
def test_settings_of_sglang_that_would_be_ignored_or_never_end_are_refused(settings, words):
    config = EngineConfig(backend="sglang", sglang=SglangSettings(**settings))
    with pytest.raises(ConfigError, match=re.escape(words)):
        config.check()


def test_an_eviction_policy_of_the_radix_tree_needs_one():
    config = EngineConfig(backend="sglang", eviction="lfu", sglang=SglangSettings(radix_eviction_policy="mru"))
    with pytest.raises(ConfigError, match="radix_eviction_policy is for a cache with eviction lru"):
        config.check()
