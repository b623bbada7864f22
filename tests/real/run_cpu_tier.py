"""Runs requests through a real vLLM with a CPU tier and writes down what each found. Run it with vLLM's Python.

    run_cpu_tier.py JOBS.json

``JOBS.json`` is a list of runs: ``model`` (a folder with a config.json, where weights are put), ``requests`` (a file of JSON
lines with ``prompt``, ``output`` and ``retention``), ``blocks`` on the device with the null block, ``wave`` requests at a time,
``extra`` settings of the connector (null: no tier), and ``out``, the file that is written. Each run is a process of its own,
forked once vLLM is imported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}.items():
    os.environ.setdefault(name, value)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import vllm  # noqa: E402
from inside_vllm import write_model  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

BLOCK = 32
LONGEST = 1500
CONTROLS = 40


def engine(job: dict[str, Any]) -> Any:
    connector = None
    if job["extra"] is not None:
        connector = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=job["extra"]
        )
    return LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
        block_size=BLOCK,
        num_gpu_blocks_override=job["blocks"],
        max_model_len=LONGEST,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=connector,
        disable_hybrid_kv_cache_manager=False,
    )


def run(job: dict[str, Any]) -> None:
    llm = engine(job)
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    loaded: dict[str, int] = {}
    if scheduler.connector is not None:
        of_connector = scheduler.connector.update_state_after_alloc

        def observed(request: Any, blocks: Any, external: int) -> Any:
            if external:
                loaded[request.request_id] = loaded.get(request.request_id, 0) + external
            return of_connector(request, blocks, external)

        scheduler.connector.update_state_after_alloc = observed
    requests = [json.loads(line) for line in Path(job["requests"]).read_text().splitlines()]
    rows = []
    for at in range(0, len(requests), job["wave"]):
        wave = requests[at : at + job["wave"]]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request["output"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"retention": request["retention"]}}
                if request["retention"]
                else None,
            )
            for request in wave
        ]
        before = set(loaded)
        prompts = [{"prompt_token_ids": request["prompt"]} for request in wave]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        while scheduler.has_requests():
            core.step()  # as the loop of a server does: copies end, and the tier is told of those that have finished
        new = {name: count for name, count in loaded.items() if name not in before}
        for output in outputs:
            external = [count for name, count in new.items() if name.split("-")[0] == output.request_id]
            rows.append(
                {
                    "cached": output.num_cached_tokens,
                    "loaded": sum(external),
                    "tokens": list(output.outputs[0].token_ids),
                }
            )
    result: dict[str, Any] = {"vllm": vllm.__version__, "rows": rows, "chunks": None, "copies": None}
    if scheduler.connector is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker.worker
        result["copies"] = {"stored": worker.stored, "loaded": worker.loaded, "verified": worker.verified}
        result["chunks"] = scheduler.connector.connector_scheduler.manager._num_chunks
        result["telling"] = None
    else:
        result["telling"] = telling(llm, requests[:: max(1, len(requests) // CONTROLS)])
    Path(job["out"]).write_text(json.dumps(result))


def telling(llm: Any, requests: list[dict[str, Any]]) -> tuple[int, int]:
    """Of how many requests the answer changes when the fifth token of the prompt does, and of how many it was tried: where it
    doesn't, equal answers say nothing about blocks.
    """
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompts = [request["prompt"] for request in requests]
    others = [[*prompt[:4], prompt[4] - 1, *prompt[5:]] for prompt in prompts]
    answers = []
    for asked in (prompts, others):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    return sum(one != two for one, two in zip(*answers, strict=False)), len(requests)


def apart(task: Any, *args: Any) -> bool:
    """Do ``task`` in a process of its own, which has what was imported here; returns whether it went well."""
    child = os.fork()
    if not child:
        try:
            task(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def make_weights(model: Path) -> None:
    """Weights with which answers depend on all of the prompt."""
    made = model / "made"
    write_model(made, json.loads((model / "config.json").read_text()))
    for path in made.glob("*.safetensors"):
        path.rename(model / path.name)


def main() -> int:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        model = Path(job["model"])
        if not any(model.glob("*.safetensors")) and not apart(make_weights, model):
            return 1
        if not apart(run, job):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
