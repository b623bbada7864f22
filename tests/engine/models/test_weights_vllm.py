"""Parameters of one rank as a real vLLM has them (recorded by record_weights.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvyard.engine.models import preset
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.split import Parallelism
from kvyard.engine.models.weights import count_weights

RECORDED = json.loads((Path(__file__).parent / "data" / "vllm_weights.json").read_text())
NAMES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


@pytest.mark.parametrize("key", RECORDED)
def test_parameters_of_each_stage(key: str) -> None:
    name, *ways = key.split()
    sizes = {way: int(size) for way, _, size in (one.partition("=") for one in ways)}
    expert = bool(sizes.pop("ep", 0))
    split = Parallelism(**{NAMES[way]: size for way, size in sizes.items()}, enable_expert_parallel=expert)
    fields = Fields(preset(name))
    for stage, (parameters, experts) in enumerate(RECORDED[key]):
        found = count_weights(fields, split, stage)
        # Norms of queries and keys, sinks and biases of routers are left out.
        assert found.parameters == pytest.approx(parameters, rel=2e-4)
        assert found.experts == pytest.approx(
            experts, rel=1e-3
        )  # those of gpt-oss have biases, which we count elsewhere
