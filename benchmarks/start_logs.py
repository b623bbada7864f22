"""Compare the cache that ``kvyard model`` computes with what engines logged when they started.

    python benchmarks/start_logs.py [--logs ../shared/published/start_logs.csv]

A row is asked if its engine is vLLM, its model is a preset and its card's memory is known. Constants were chosen on odd rows;
errors are told of even ones. Rows whose engine then failed to start, and those that don't state their limits and whose card
isn't a large one, are shown but not counted.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import median
from typing import Any

from kvyard.engine.models import plan, preset
from kvyard.engine.models.fields import hub_names
from kvyard.errors import KvyardError

GIB = 2**30
LOGS = Path(__file__).resolve().parents[2] / "shared" / "published" / "start_logs.csv"
MEMORY = {
    "H100-80GB": 79.19,
    "H100 (79.18 GiB)": 79.18,
    "RTX 4090": 23.517,
    "RTX 3090": 23.58,
    "80 GB card, 79.22 GiB, not named": 79.22,
}
"""GiB as the logs state them."""
SAME_SHAPE = {
    "redhatai/llama-3.3-70b-instruct-fp8-dynamic": ("llama-3.1-70b", "fp8"),
    "redhatai/llama-3.3-70b-instruct-quantized.w8a8": ("llama-3.1-70b", "int8"),
    "redhatai/qwen2.5-7b-instruct-fp8-dynamic": ("qwen2.5-7b", "fp8"),
    "redhatai/qwen2.5-7b-instruct-quantized.w8a8": ("qwen2.5-7b", "int8"),
    "redhatai/meta-llama-3.1-8b-instruct-quantized.w8a8": ("llama-3.1-8b", "int8"),
    "redhatai/meta-llama-3.1-8b-instruct-quantized.w4a16": ("llama-3.1-8b", "int4"),
    "qwen/qwen3-30b-a3b": ("qwen3-30b-a3b", None),
    "meta-llama/meta-llama-3-8b": ("llama-3.1-8b", None),
}
"""Models that are no preset by name: the preset of their shape, and what weights are stored in."""
FIELDS = {
    "tp": ("tensor_parallel_size", int),
    "pp": ("pipeline_parallel_size", int),
    "max_model_len": ("max_model_len", int),
    "gpu_memory_utilization": ("gpu_memory_utilization", float),
    "max_num_batched_tokens": ("max_num_batched_tokens", int),
    "max_num_seqs": ("max_num_seqs", int),
}
MISSTATED = {67: 0.95}
"""By row: the share of the card that its own parts add up to, where another one is stated."""
OLDEST_KNOWN = "0.11"
"""Rows without a version are of the recipe that names this one."""


def asked(row: dict[str, str]) -> tuple[str, dict[str, Any]] | None:
    """Return the preset and the options of a row, or None if it can't be asked."""
    published = {hub.lower(): name for hub, name in hub_names().items()}
    model = row["model"].lower()
    name, dtype = SAME_SHAPE.get(model, (published.get(model), None))
    if row["engine"] != "vllm" or name is None or row["card"] not in MEMORY or row["dtype"] == "float32":
        return None
    large = MEMORY[row["card"]] > 70
    options: dict[str, Any] = {
        "max_num_batched_tokens": 8192 if large else 2048,
        "max_num_seqs": 1024 if large else 256,
    }
    options |= {name: kind(row[column]) for column, (name, kind) in FIELDS.items() if row[column]}
    if dtype or row["quantization"] == "fp8":
        options["weight_dtype"] = dtype or "fp8"
    if row["kv_dtype"] not in ("", "auto"):
        options["kv_cache_dtype"] = row["kv_dtype"]
    options["vllm_version"] = ".".join((row["version"] or OLDEST_KNOWN).split(".")[:2])
    return name, options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--logs", type=Path, default=LOGS)
    args = parser.parse_args()
    if not args.logs.exists():
        print(f"no start logs at {args.logs}: nothing to compare")
        return
    errors: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    left_out = 0
    for number, row in enumerate(csv.DictReader(args.logs.open()), 1):
        question = asked(row)
        if question is None:
            left_out += 1
            continue
        name, options = question
        if number in MISSTATED:
            options["gpu_memory_utilization"] = MISSTATED[number]
        memory = MEMORY[row["card"]]
        line = (
            f"{number:3} {row['model'][:46]:46} {options['vllm_version']:5} tp{options.get('tensor_parallel_size', 1)}"
        )
        try:
            made = plan(preset(name), int(memory * GIB), **options)
        except KvyardError as refusal:
            print(
                f"{line} logged {row['available_gib'] or '?':>6}, refused: {str(refusal)[:60]} (failed: {row['failed']})"
            )
            continue
        logged = float(row["available_gib"] or 0) or int(row["blocks"] or 0) * made.bytes_per_block / GIB
        if not logged:
            left_out += 1
            continue
        ours = made.cache_bytes / GIB
        counted = row["failed"] == "no"
        print(
            f"{line} logged {logged:6.2f} ours {ours:6.2f} GiB {ours / logged - 1:+7.1%}{'' if counted else ' (failed)'}"
        )
        if counted:
            errors[number % 2 == 0].append((abs(ours / logged - 1), abs(ours - logged) / memory))
    for test, found in errors.items():
        which = "even rows (test)" if test else "odd rows (fit)"
        middle, worst = median(error for error, _ in found), max(share for _, share in found)
        print(f"{which}: {len(found)}, median error {middle:.2%} of the cache, worst {worst:.1%} of the card")
    print(f"{left_out} rows were left out: another engine, no preset, or a card or figure that isn't stated")


if __name__ == "__main__":
    main()
