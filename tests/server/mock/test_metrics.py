"""Metrics have vLLM's names, labels and buckets, and say what happened."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="needs kvyard[server]")

from tests.server.mock.support import Served

from kvyard.server.mock.measures import COUNTERS, HISTOGRAMS, one_two_five

OF_VLLM = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:lora_requests_info vllm:prompt_tokens_total vllm:generation_tokens_total vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:external_prefix_cache_queries_total vllm:external_prefix_cache_hits_total
vllm:num_preemptions_total vllm:request_success_total vllm:time_to_first_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
vllm:request_inference_time_seconds_bucket vllm:request_prefill_time_seconds_bucket
vllm:request_decode_time_seconds_bucket vllm:iteration_tokens_total_bucket vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket vllm:request_params_n_bucket vllm:request_params_max_tokens_bucket
vllm:request_max_num_generation_tokens_bucket
""".split()  # noqa: SIM905
"""What dashboards and routers made for vLLM 0.32 ask for."""


def test_they_are_all_there_and_right() -> None:
    with Served(loras=(), dp_size=1) as served:
        for _ in range(2):
            served.complete(list(range(100)), max_tokens=10, ignore_eos=True)
        found = served.metrics()
        names = {name.partition("{")[0] for name in found}
        assert set(OF_VLLM) <= names
        one = '{engine="0",model_name="mock"}'
        assert found[f"vllm:prompt_tokens_total{one}"] == 200 and found[f"vllm:generation_tokens_total{one}"] == 20
        assert found[f"vllm:prefix_cache_queries_total{one}"] == 200
        assert found[f"vllm:prefix_cache_hits_total{one}"] == found[f"vllm:prompt_tokens_cached_total{one}"] == 96
        assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="mock"}'] == 2
        assert found[f"vllm:time_to_first_token_seconds_count{one}"] == 2
        assert found[f"vllm:inter_token_latency_seconds_count{one}"] == 18
        # Nominal time: a pass of prompts takes 2 ms and one of decoding 1 ms, whatever this machine did.
        assert found[f"vllm:inter_token_latency_seconds_sum{one}"] == pytest.approx(0.018)
        assert found[f"vllm:e2e_request_latency_seconds_sum{one}"] == pytest.approx(2 * 0.011)
        assert found[f"vllm:iteration_tokens_total_sum{one}"] == 100 + 4 + 18
        assert found[f"vllm:num_requests_running{one}"] == found[f"vllm:kv_cache_usage_perc{one}"] == 0
        assert found["kvyard_mock_lag_seconds_count"] >= 20
        assert any(name.startswith("vllm:cache_config_info{") and 'block_size="16"' in name for name in found)
        text = served.client.get("/metrics").text
    for name in COUNTERS:
        assert f"# TYPE {name}_total counter" in text
    for name in HISTOGRAMS:
        assert f"# TYPE {name} histogram" in text


def test_buckets_of_token_counts() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(2048)[-1] == 2000
