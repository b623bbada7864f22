"""Groups, pages and blocks as a real vLLM makes them (recorded by record_groups.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvyard.engine.models import plan, preset, presets
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.grouping import bytes_per_block, group_layers
from kvyard.engine.models.layers import CacheLayer, mixers
from kvyard.engine.models.split import Parallelism

RECORDED = json.loads((Path(__file__).parent / "data" / "vllm_groups.json").read_text())
MEMORY = 40 * 2**30
KINDS = {
    "full": "FullAttentionSpec",
    "mla": "MLAAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
    "chunked_local": "ChunkedLocalAttentionSpec",
    "mamba": "MambaSpec",
}


def rows(groups):
    return [[KINDS[g.spec.kind], g.spec.block_size, g.layers, g.page_bytes] for g in groups]


def test_every_preset_was_recorded():
    assert {key.partition("@")[0] for key in RECORDED if "@" in key} == set(presets())


@pytest.mark.parametrize("key", [key for key in RECORDED if "@" in key])
def test_presets(key):
    name, _, ranks = key.partition("@")
    made = plan(
        preset(name),
        MEMORY,
        gpu_memory_utilization=1.0,
        tensor_parallel_size=int(ranks),
        weights=0,
        reserve=0,
        max_model_len=8192,
    )
    assert rows(made.layer_groups) == RECORDED[key]["groups"]
    assert made.num_blocks == RECORDED[key]["num_blocks"]
    assert made.bytes_per_block == max(row[3] for row in RECORDED[key]["groups"])


@pytest.mark.parametrize("key", [key for key in RECORDED if "/" in key])
def test_pipeline_stages(key):
    name, _, count = key.partition("/")
    fields, split = Fields(preset(name)), Parallelism(pipeline_parallel_size=int(count))
    stages = split.stages(len(mixers(fields)))
    recorded = RECORDED[key]["stages"]
    assert [[stage.start, stage.stop] for stage in stages] == [row[:2] for row in recorded]
    made = plan(
        preset(name),
        MEMORY,
        gpu_memory_utilization=1.0,
        pipeline_parallel_size=int(count),
        weights=0,
        reserve=0,
        max_model_len=8192,
    )
    fewest = min(row[2] for row in recorded if row[2] is not None)
    assert made.num_blocks == fewest == recorded[made.stage][2]
    assert [group.layers for group in made.layer_groups] == recorded[made.stage][3]


@pytest.mark.parametrize("key", [key for key in RECORDED if "layers" in RECORDED[key]])
def test_layers_of_different_pages_and_odd_counts(key):
    layers = [
        CacheLayer(kind="full", token_bytes=4 * heads * size)
        if kind == "full"
        else CacheLayer(kind="sliding_window", token_bytes=4 * heads * size, window=512)
        for kind, heads, size in RECORDED[key]["layers"]
    ]
    (groups,) = group_layers(layers, block_size=16, state_mode="align", state_block=16)
    assert rows(groups) == RECORDED[key]["groups"]
    assert MEMORY // bytes_per_block(groups) == RECORDED[key]["num_blocks"]
