"""``vllm serve`` lines of plans, read by vLLM's own parser of arguments."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from kvyard.lab.plan.search import FleetOption
from kvyard.lab.plan.serve import serve_commands
from kvyard.lab.plan.shape import Shape

PARSE = """
import json, shlex, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for line in filter(str.strip, sys.stdin):
    words = shlex.split(line)
    assert words[:2] == ["vllm", "serve"]
    print(json.dumps(vars(parser.parse_args(words[2:])), default=lambda value: getattr(value, "__dict__", str(value))))
"""


def parsed(*options: tuple[FleetOption, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what vLLM makes of the lines of several fleets with their settings; it refuses flags that it doesn't have."""
    lines = [
        line
        for option, more in options
        for line in serve_commands({"model": "Qwen/Qwen3-32B", **more, **option.settings()}, option)
    ]
    argv = [os.environ["KVYARD_VLLM_PYTHON"], "-c", PARSE]
    done = subprocess.run(argv, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def fleet(prefill: int = 0, **more: Any) -> FleetOption:
    return FleetOption("", {}, shape=Shape("h100", 2, **more), workers=3, prefill=prefill)


def test_vllm_takes_every_flag_of_a_plan() -> None:
    everything = {
        "max_num_seqs": "1k",
        "max_num_batched_tokens": "8k",
        "max_model_len": 30000,
        "gpu_memory_utilization": 0.85,
        "block_size": 32,
        "scheduling_policy": "priority",
        "weight_dtype": "fp8",
        "dp_size": 2,
        "pipeline_parallel_size": 2,
    }
    whole, prefill, decode = parsed((fleet(kv_cache_dtype="fp8", host_gib=8), everything), (fleet(1, host_gib=8), {}))
    assert whole["model_tag"] == "Qwen/Qwen3-32B" and whole["quantization"] == "fp8"
    assert (whole["max_num_seqs"], whole["max_num_batched_tokens"], whole["max_model_len"]) == (1000, 8000, 30000)
    assert (whole["data_parallel_size"], whole["pipeline_parallel_size"], whole["tensor_parallel_size"]) == (2, 2, 2)
    assert (whole["kv_cache_dtype"], whole["kv_offloading_size"]) == ("fp8", 16)
    assert whole["kv_events_config"]["replay_endpoint"] == "tcp://*:5558"
    for line, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        assert line["kv_offloading_size"] is None
        connector = line["kv_transfer_config"]
        assert (connector["kv_connector"], connector["kv_role"]) == ("MultiConnector", role)
