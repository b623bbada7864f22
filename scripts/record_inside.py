#!/usr/bin/env python3
"""Serve requests from a real vLLM on CPU, recorded by kvyard.vllm, and say how much of the prompts it found cached.

Run it with the Python of an environment that has vLLM 0.32, kvyard on its path. Models and requests are those of
``inside_vllm.py``.

    PYTHONPATH=src build/peers/vllm/bin/python scripts/record_inside.py OUT --blocks 97
    PYTHONPATH=src build/peers/vllm/bin/python scripts/record_inside.py OUT --blocks 97 --scheduler kvyard.vllm.Scheduler
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from inside_vllm import BLOCK_SIZE, LONGEST, MODELS, set_environment, workload, write_model


def serve(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All requests, one step after the other, and what came of them."""
    from vllm import LLM, SamplingParams

    write_model(folder / args.model, MODELS[args.model])
    engine = LLM(
        model=str(folder / args.model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
        max_num_seqs=16,
        max_num_batched_tokens=192,
        num_gpu_blocks_override=args.blocks,
        enable_prefix_caching=True,
        disable_log_stats=False,
        scheduler_cls=args.scheduler,
        additional_config={"kvyard_record": {"folder": str(args.out)}} if args.out else {},
    ).llm_engine
    asked = workload(args.requests, args.seed)
    waiting = list(reversed(asked))
    step = cached = 0
    began = time.thread_time_ns()
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[-1].step <= step or not engine.has_unfinished_requests()):
            request = waiting.pop()
            how = SamplingParams(temperature=0.0, max_tokens=request.output, min_tokens=request.output, ignore_eos=True)
            engine.add_request(request.name, {"prompt_token_ids": request.prompt}, how)
            if args.give_up and len(asked) - len(waiting) > 5 and request.output > 60:
                engine.abort_request([asked[len(asked) - len(waiting) - 5].name])
        for answer in engine.step():
            if answer.finished:
                cached += answer.num_cached_tokens or 0
        step += 1
        if step == args.give_up_all_after:
            engine.abort_request([request.name for request in asked])
            break
    spent = time.thread_time_ns() - began
    engine.engine_core.shutdown()
    return {
        "requests": len(asked),
        "steps": step,
        "prompt tokens": sum(len(request.prompt) for request in asked),
        "cached tokens": cached,
        "us per step": spent // step // 1000,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path, nargs="?", help="the folder for recordings [default: none is made]")
    parser.add_argument("--model", choices=list(MODELS), default="dense")
    parser.add_argument("--blocks", type=int, default=97, help="of the engine's pool, one of them the null block")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--scheduler", default="kvyard.vllm.RecordingScheduler")
    parser.add_argument("--give-up", action="store_true", help="have clients give up on some")
    parser.add_argument("--give-up-all-after", type=int, metavar="STEPS", help="have all clients give up then, and end")
    args = parser.parse_args()
    set_environment()
    os.environ.pop("KVYARD_RECORD", None)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(serve(args, Path(folder))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
