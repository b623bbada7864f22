"""Records what NVIDIA Dynamo's mocker makes of 1,000 requests, and of a few in tight spots, as ``sglang`` and as ``trtllm``.

Run by hand with a Python that has the wheels: ``python record_dynamo.py data``; one point as JSON on stdout with
``python record_dynamo.py - NAME``. Recorded with ``ai-dynamo`` and ``ai-dynamo-runtime`` 1.6.1 (Apache-2.0), only run,
through ``dynamo.replay.run_trace_replay``. The trace is the first 1,000 lines of Mooncake's conversation trace.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import tempfile
from pathlib import Path

TRACE = Path(__file__).parents[3] / "examples" / "data" / "mooncake_conversation.jsonl.xz"
COUNT = 1000

# Engine arguments as both sides know them. A million tokens of cache is the wheel's own default; a quarter of that makes the
# SGLang policy retract, and with an eighth of the requests longest prefix first isn't drowned by its own limit of 128 waiting.
POINTS = {
    "trtllm": {"backend": "trtllm", "block_size": 64, "num_gpu_blocks": 16384},
    "trtllm default block": {"backend": "trtllm", "block_size": 32, "num_gpu_blocks": 32768},
    "trtllm small cache": {"backend": "trtllm", "block_size": 64, "num_gpu_blocks": 4096},
    "sglang": {"backend": "sglang", "block_size": 64, "num_gpu_blocks": 16384},
    "sglang default page": {"backend": "sglang", "block_size": 1, "num_gpu_blocks": 1048576},
    "sglang small cache": {"backend": "sglang", "block_size": 64, "num_gpu_blocks": 4096},
    "sglang careless": {
        "backend": "sglang",
        "block_size": 64,
        "num_gpu_blocks": 4096,
        "sglang": {"schedule_conservativeness": 0.1, "clip_max_new_tokens": 64},
    },
    "sglang lpm": {
        "backend": "sglang",
        "block_size": 64,
        "num_gpu_blocks": 16384,
        "sglang": {"schedule_policy": "lpm"},
    },
    "sglang small chunks": {
        "backend": "sglang",
        "block_size": 64,
        "num_gpu_blocks": 16384,
        "sglang": {"chunked_prefill_size": 2048, "max_prefill_tokens": 4096},
    },
}


SMALL = {"block_size": 64, "num_gpu_blocks": 20}
LARGE = {"block_size": 64, "num_gpu_blocks": 16384}
CARELESS = {"schedule_conservativeness": 0.1}
LPM = {"schedule_policy": "lpm"}

# Requests are (arrival in ms, prompt tokens, output tokens, trace blocks of 512 tokens). No two are of one arrival and length.
SCENARIOS: dict[str, tuple[dict, list[tuple[int, int, int, list[int]]]]] = {
    "one": ({"backend": "sglang", **LARGE}, [(0, 100, 3, [1])]),
    "twins in one pass don't share": (
        {"backend": "sglang", **LARGE},
        [(0, 1024, 3, [1, 2]), (0, 1025, 3, [1, 2, 3])],
    ),
    "the same prompt again": ({"backend": "sglang", **LARGE}, [(0, 1024, 3, [1, 2]), (1000, 1024, 3, [1, 2])]),
    "prompts before decoding": (
        {"backend": "sglang", **LARGE},
        [(0, 100, 30, [1]), (20, 20000, 3, list(range(10, 50)))],
    ),
    "a prompt is cut at what is left": (
        {"backend": "sglang", **LARGE},
        [(0, 6000, 3, list(range(10, 22))), (0, 6001, 3, list(range(30, 42)))],
    ),
    "least output is retracted": (
        {"backend": "sglang", **SMALL, "sglang": CARELESS},
        [(0, 256, 400, [1]), (0, 257, 400, [2]), (0, 258, 400, [3])],
    ),
    "retracted behind all others": (
        {"backend": "sglang", **SMALL, "sglang": CARELESS},
        [(0, 256, 400, [1]), (0, 257, 400, [2]), (0, 258, 400, [3]), (30, 300, 50, [4])],
    ),
    "longest prefix first": (
        {"backend": "sglang", "block_size": 64, "num_gpu_blocks": 40, "sglang": LPM},
        [
            (0, 1024, 2, [1, 2]),
            (500, 1000, 200, [5, 6]),
            (501, 900, 20, [7, 8]),
            (502, 901, 20, [9, 10]),
            (503, 1023, 20, [1, 2]),
        ],
    ),
    "those that begin alike one by one": (
        {"backend": "sglang", **LARGE, "sglang": {**LPM, "chunked_prefill_size": 640, "max_prefill_tokens": 640}},
        [(0, 640, 2, [20, 21]), (1, 600, 2, [7, 8]), (1, 601, 2, [7, 8]), (1, 602, 2, [9, 10])],
    ),
    "reserved to the end": (
        {"backend": "trtllm", **SMALL},
        [(0, 256, 400, [1]), (0, 257, 400, [2]), (30, 100, 50, [3])],
    ),
    "what is shared is not reserved twice": (
        {"backend": "trtllm", **SMALL},
        [(0, 512, 320, [1]), (300, 500, 300, [1])],
    ),
    "no more output than there is room": ({"backend": "trtllm", **SMALL}, [(0, 256, 4000, [1])]),
}


def lines() -> list[str]:
    with lzma.open(TRACE, "rt") as file:
        return [line.rstrip() for _, line in zip(range(COUNT), file, strict=False)]


def run(engine: dict, rows: list[str]):
    os.environ.setdefault("DYN_LOG", "error")
    from dynamo.replay import run_trace_replay

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(rows) + "\n")
        file.flush()
        return run_trace_replay(
            file.name,
            extra_engine_args={"engine": engine},
            num_workers=1,
            router_mode="round_robin",
            trace_block_size=512,
            replay_mode="offline",
            capture_per_request=True,
        )


def measure(name: str) -> dict[str, float]:
    report = run(POINTS[name], lines())
    summary = report.summary
    found = {key: summary[key] for key in ("mean_ttft_ms", "mean_e2e_latency_ms", "duration_ms")}
    found["reuse"] = summary["first_admission_prefix_cache_reused_ratio"]
    found["readmissions"] = sum(request["readmission_count"] for request in report.per_request)
    return {key: round(value, 6) for key, value in found.items()}


def watch(name: str) -> dict[str, object]:
    """Per request: when it was admitted and what was cached of it, each time; its first and its last token. In ns."""
    engine, rows = SCENARIOS[name]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    report = run(engine, [json.dumps(dict(zip(keys, row, strict=False))) for row in rows])
    seen = {(round(record["arrival_time_ms"]), record["input_length"]): record for record in report.per_request}
    peer = []
    for arrival, length, *_ in rows:
        record = seen[arrival, length]
        entries = [[round(e["at_ms"] * 1e6), e["reused_input_tokens"]] for e in record["admission_history"]]
        peer.append([entries, round(record["first_token_ms"] * 1e6), round(record["last_token_ms"] * 1e6)])
    return {"engine": engine, "rows": rows, "peer": peer}


def main(target: str) -> None:
    points = {name: {"engine": engine, "peer": measure(name)} for name, engine in POINTS.items()}
    Path(target, "dynamo.json").write_text(json.dumps(points, indent=1) + "\n")
    scenarios = {name: watch(name) for name in SCENARIOS}
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in scenarios.items())
    Path(target, "scenarios.json").write_text("{\n" + body + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1] == "-":
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1])
