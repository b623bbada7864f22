"""Metrics have vLLM's names, labels and buckets, and say what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("httptools", reason="needs kvyard[server]")

from prometheus_client.parser import text_string_to_metric_families
from tests.server.mock.support import PATIENCE, Served

from kvyard.engine.models import find_config
from kvyard.engine.models.planning import plan
from kvyard.server.mock.measures import CATALOG, one_two_five
from kvyard.tiers import OffloadConfig, TierConfig

VECTOR = json.loads((Path(__file__).parent / "vectors" / "vllm_metrics.json").read_text())
"""Metrics that vLLM 0.32 itself registers for a model of 2048 tokens; ``make_vllm_metrics.py`` beside it wrote them."""


def families(text: str) -> dict[str, dict[str, Any]]:
    """The metrics of an exposition in the vector's form."""
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("vllm:") or family.name.endswith("_created"):
            continue  # the library adds when a counter began, to vLLM's as to ours
        values: dict[str, set[str]] = {}
        buckets: list[str] = []
        for sample in family.samples:
            for name, value in sample.labels.items():
                if name != "le":
                    values.setdefault(name, set()).add(value)
            if sample.name.endswith("_bucket"):
                buckets.append(sample.labels["le"])
        found[family.name] = {"type": family.type, "labels": sorted(values)}
        if buckets:
            found[family.name]["buckets"] = buckets
        if several := {name: sorted(some) for name, some in values.items() if len(some) > 1}:
            found[family.name]["values"] = several
    return found


def test_vllm_has_the_same() -> None:
    """All of vLLM's, none beside, with the same types, labels, values of labels, and buckets. From the first scrape on."""
    with Served() as served:
        assert families(served.client.get("/metrics").text) == VECTOR["metrics"]


def test_ranks_are_engines() -> None:
    with Served(dp_size=2) as served:
        found = families(served.client.get("/metrics").text)
    for name, entry in VECTOR["metrics"].items():
        if "engine" in entry["labels"]:
            assert found[name]["values"]["engine"] == ["0", "1"]


def test_they_are_all_there_and_right() -> None:
    with Served(loras=(), dp_size=1) as served:
        for _ in range(2):
            served.complete(list(range(100)), max_tokens=10, ignore_eos=True)
        found = served.metrics()
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
        # Prompts count in the pass that has their first token, less what was cached; and each token in its own.
        assert found[f"vllm:iteration_tokens_total_sum{one}"] == 100 + 4 + 20
        assert found[f"vllm:iteration_tokens_total_count{one}"] == 20
        assert found[f"vllm:num_requests_running{one}"] == found[f"vllm:kv_cache_usage_perc{one}"] == 0
        assert found["kvyard_mock_lag_seconds_count"] >= 20
        assert any(name.startswith("vllm:cache_config_info{") and 'block_size="16"' in name for name in found)
        text = served.client.get("/metrics").text
    for name in CATALOG["counters"]:
        assert f"# TYPE {name}_total counter" in text
    for name in CATALOG["histograms"]:
        assert f"# TYPE {name} histogram" in text


@pytest.mark.parametrize(
    ("model", "blocks", "concurrency"),
    [("gemma-3-12b", 48_867, 15.88), ("gemma-3-27b", 15_997, 4.46), ("llama-3.1-8b", 513, 1.0)],
)
def test_the_size_of_the_cache_is_what_vllm_reports(model: str, blocks: int, concurrency: float) -> None:
    """Blocks and maximum concurrency of models with windows as vLLM logged them (shared/published/start_logs.csv)."""
    planned = plan(find_config(model), 80 << 30, max_model_len=8192, max_num_batched_tokens=8192)
    engine = {**planned.engine_options(), "num_gpu_blocks": blocks - 1, "groups": planned.groups, "block_size": None}
    with Served(engine=engine) as served:
        text = served.client.get("/metrics").text
    labels = next(
        sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    )
    assert labels["num_gpu_blocks"] == str(blocks), "vLLM counts the null block"
    reported = float(labels["kv_cache_max_concurrency"])
    assert reported == pytest.approx(concurrency, abs=0.005)
    assert int(labels["kv_cache_size_tokens"]) == int(reported * 8192)


def test_buckets_of_token_counts() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(2048)[-1] == 2000


def test_prompts_by_where_they_came_from() -> None:
    engine = {
        "num_gpu_blocks": 64,
        "tiers": OffloadConfig(tiers=(TierConfig(num_blocks=256),)),
        "bytes_per_block": 1 << 16,
    }
    with Served(engine=engine) as served:
        for number in range(8):
            served.complete([number] * 320)
        from_host = served.cached([0] * 320)
        found = served.metrics()
    one = '{engine="0",model_name="mock"}'

    def split(name: str, value: str) -> float:
        return found[f'vllm:{name}_total{{engine="0",model_name="mock",source="{value}"}}']

    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert sum(split("prompt_tokens_by_source", name) for name in sources) == 9 * 320
    assert split("prompt_tokens_by_source", "external_kv_transfer") == from_host > 300
    assert (
        split("prompt_tokens_cached_by_source", "host")
        == found[f"vllm:external_prefix_cache_hits_total{one}"]
        == from_host
    )
    assert found[f"vllm:external_prefix_cache_queries_total{one}"] == 9 * 320


def test_choices_and_limits() -> None:
    """As vLLM has it: one request of three choices, when all three are through; those who hang up aren't measured."""
    with Served(max_waiting=1) as served:
        served.complete(list(range(50)), n=3, max_tokens=7, ignore_eos=True)
        served.complete([1, 2, 3], max_tokens=1)
        found = served.metrics()
        one = '{engine="0",model_name="mock"}'
        assert found[f"vllm:request_params_n_count{one}"] == 2 and found[f"vllm:request_params_n_sum{one}"] == 4
        assert found[f"vllm:request_max_num_generation_tokens_sum{one}"] == 8
        assert found[f"vllm:request_params_max_tokens_sum{one}"] == 22
        assert found[f"vllm:request_time_per_output_token_seconds_count{one}"] == 4
        assert found[f"vllm:external_prefix_cache_queries_total{one}"] == 0
        served.post("/admin/stall", seconds=30)
        driver = served.fleet.workers[0].driver
        with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
            body = {"prompt": "x", "max_tokens": 1, "stream": True}
            with client.stream("POST", f"{served.url}/v1/completions", json=body):
                eventually(lambda: served.get("/admin/workers")[0]["waiting"] == 1)
                served.complete("y", status=503)
        served.inside(driver.thaw)
        rejected = 'vllm:admission_rejections_total{model_name="mock",reason="max_num_queued_reqs"}'
        assert served.metrics()[rejected] == 1
