#!/usr/bin/env python3
"""Peer numbers: offline (virtual-time) trace replay in NVIDIA Dynamo's PyPI wheel.

Drives only the published packages ``ai-dynamo`` + ``ai-dynamo-runtime``
(public entry point ``dynamo.replay.run_trace_replay``; the simulation core
inside that wheel is ``aisimulate-core``).  No Dynamo source is needed.

Every configuration runs in a fresh child process, so peak RSS belongs to that
configuration alone.  One JSON object per line goes to stdout; logs go to
stderr.

    python dynamo_replay.py --conversation conversation_trace.jsonl \
                            --synthetic synthetic_trace.jsonl --suite standard

Suites: ``smoke`` (seconds), ``standard`` (about 3 minutes on 2 cores),
``growth`` (1k/4k/all requests), ``full`` (standard + growth).
A single ad-hoc point: ``--one '{"trace":"conversation","workers":4,...}'``.

Fields of the emitted line
  wall_s          outer call, including trace parsing and result conversion
  cpu_s           user+system CPU of the same call (steadier on a busy host)
  native_wall_s   the wheel's own timer (simulator construction + run)
  req_per_s       completed requests / wall_s
  sim_tok_per_s   (input + output tokens) / wall_s
  speed_ratio     virtual seconds simulated per wall second
  peak_rss_mb     ru_maxrss of the child
  report          the subset of the replay report we compare against
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

# Llama-3.1-8B-like footprint: 32 layers * 2 * 8 KV heads * 128 dim * 2 bytes.
KV_BYTES_PER_TOKEN = 131072
# G1 capacity of the wheel's default engine: 16384 blocks * 64 tokens.
G1_TOKENS = 16384 * 64

REPORT_KEYS = (
    "num_requests",
    "completed_requests",
    "duration_ms",
    "total_input_tokens",
    "total_output_tokens",
    "committed_prefill_tokens",
    "request_throughput_rps",
    "output_throughput_tok_s",
    "prefix_cache_reused_ratio",
    "first_admission_prefix_cache_reused_ratio",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "kv_eviction_policy",
)


def point(
    trace,
    workers,
    router,
    block_size=64,
    gpu_tokens=G1_TOKENS,
    host_ratio=0.0,
    host_scope=None,
    g3_ratio=0.0,
    requests=None,
    backend="vllm",
    tag=None,
    repeat=1,
    split=None,
    speedup=1.0,
):
    """One benchmark configuration, described in engine-neutral terms. ``split``, if any, is {"prefill": workers, "decode":
    workers, "sends": options of the hand-over, "prefill_engine": options of the prefill workers' engine}; ``workers`` is
    without meaning then.
    """
    return dict(
        trace=trace,
        workers=workers,
        router=router,
        block_size=block_size,
        gpu_tokens=gpu_tokens,
        host_ratio=host_ratio,
        host_scope=host_scope,
        g3_ratio=g3_ratio,
        requests=requests,
        backend=backend,
        tag=tag,
        repeat=repeat,
        split=split,
        speedup=speedup,
    )


def suite(name):
    smoke = [
        point("conversation", 1, "round_robin", requests=200),
        point("conversation", 2, "kv_router", requests=200, host_ratio=4.0),
    ]
    standard = [
        # default engine arguments (block 64, 16384 blocks per worker)
        point("conversation", 1, "round_robin"),
        point("conversation", 4, "round_robin"),
        point("conversation", 4, "kv_router"),
        point("conversation", 8, "round_robin"),
        point("conversation", 8, "kv_router"),
        # same token capacity at other block sizes
        point("conversation", 8, "kv_router", block_size=512),
        point("conversation", 8, "kv_router", block_size=16),
        # host tier (G2) holding 4x the GPU tokens, 32 GB/s each way
        point("conversation", 1, "round_robin", host_ratio=4.0),
        point("conversation", 4, "kv_router", host_ratio=4.0),
        point("conversation", 8, "kv_router", host_ratio=4.0),
        point("conversation", 4, "round_robin", host_ratio=4.0, host_scope="cluster_shared"),
        point("synthetic", 1, "round_robin"),
        point("synthetic", 4, "kv_router"),
        point("synthetic", 8, "kv_router"),
        point("synthetic", 4, "kv_router", host_ratio=4.0),
    ]
    growth = [
        point("conversation", w, r, requests=n, host_ratio=h)
        for w, r, h in ((1, "round_robin", 0.0), (8, "kv_router", 0.0), (4, "kv_router", 4.0))
        for n in (1000, 4000, None)
    ]
    return {"smoke": smoke, "standard": standard, "growth": growth, "full": standard + growth}[name]


def engine_args(cfg):
    bs = cfg["block_size"]
    blocks = cfg["gpu_tokens"] // bs
    engine = {"backend": cfg["backend"], "block_size": bs, "num_gpu_blocks": blocks}
    if cfg["host_ratio"]:
        engine["kv_cache_bytes_per_token"] = KV_BYTES_PER_TOKEN
        host = {"num_host_blocks": int(blocks * cfg["host_ratio"])}
        if cfg["host_scope"] == "cluster_shared":
            # one pool for the deployment; keep the aggregate capacity equal
            host["num_host_blocks"] *= cfg["workers"]
            host.update(scope="cluster_shared", kv_layout_id="peer")
        engine["native_host_offload"] = host
    if cfg["g3_ratio"]:
        engine["g3_offload"] = {"scope": "cluster_shared", "num_g3_blocks": int(blocks * cfg["g3_ratio"])}
    return {"engine": engine}


def fleet_args(cfg):
    """The workers, with or without roles, as ``run_trace_replay`` wants them."""
    split = cfg["split"]
    if not split:
        return {"extra_engine_args": engine_args(cfg), "num_workers": cfg["workers"]}
    plain = engine_args(cfg)["engine"]
    extra = {**split.get("sends", {}), **split.get("prefill_engine", {})}
    return {
        "prefill_engine_args": {"engine": {"worker_type": "prefill", **plain, **extra}},
        "decode_engine_args": {"engine": {"worker_type": "decode", **plain}},
        "num_prefill_workers": split["prefill"],
        "num_decode_workers": split["decode"],
    }


def child(cfg, trace_path):
    os.environ.setdefault("DYN_LOG", "error")
    from importlib.metadata import version

    from dynamo.replay import run_trace_replay

    best = None
    walls, cpus = [], []
    for _ in range(cfg["repeat"]):
        start, cpu0 = time.perf_counter(), time.process_time()
        rep = run_trace_replay(
            trace_path,
            **fleet_args(cfg),
            router_mode=cfg["router"],
            trace_block_size=512,
            replay_mode="offline",
            arrival_speedup_ratio=cfg["speedup"],
        )
        wall = time.perf_counter() - start
        walls.append(wall)
        cpus.append(time.process_time() - cpu0)
        if best is None or wall <= min(walls):
            best = rep
    s = best.summary
    n_in, n_out = s["total_input_tokens"], s["total_output_tokens"]
    wall = min(walls)
    print(
        json.dumps(
            {
                "peer": "dynamo-replay",
                "versions": {p: version(p) for p in ("ai-dynamo", "ai-dynamo-runtime")},
                "api": "dynamo.replay.run_trace_replay(replay_mode=offline)",
                "config": {k: v for k, v in cfg.items() if v not in (None, 0.0)},
                "engine_args": engine_args(cfg)["engine"],
                "wall_s": round(wall, 4),
                "cpu_s": round(min(cpus), 4),
                "all_wall_s": [round(w, 4) for w in walls],
                "native_wall_s": round(s["wall_time_ms"] / 1e3, 4),
                "req_per_s": round(s["completed_requests"] / wall, 1),
                "sim_tok_per_s": round((n_in + n_out) / wall),
                "sim_out_tok_per_s": round(n_out / wall),
                "speed_ratio": round(s["duration_ms"] / 1e3 / wall, 1),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                "report": {k: (round(s[k], 4) if isinstance(s.get(k), float) else s.get(k)) for k in REPORT_KEYS},
                "g2_domains": s.get("g2_domains"),
                "g3": s.get("g3_offload"),
            }
        ),
        flush=True,
    )


def head(path, count, tmp):
    """First ``count`` lines of a trace as a temporary file (whole file if None)."""
    if count is None:
        return path
    out = os.path.join(tmp, f"{hashlib.sha1(path.encode()).hexdigest()[:8]}_{count}.jsonl")
    if not os.path.exists(out):
        with open(path) as src, open(out, "w") as dst:
            for i, line in enumerate(src):
                if i >= count:
                    break
                dst.write(line)
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--conversation", help="Mooncake conversation_trace.jsonl")
    ap.add_argument("--synthetic", help="Mooncake synthetic_trace.jsonl")
    ap.add_argument("--suite", default="standard", choices=("smoke", "standard", "growth", "full"))
    ap.add_argument("--repeat", type=int, default=1, help="best-of-N wall time")
    ap.add_argument("--timeout", type=int, default=540)
    ap.add_argument("--one", help="JSON object of point() arguments")
    ap.add_argument("--child", help=argparse.SUPPRESS)
    ap.add_argument("--child-trace", help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.child:
        return child(json.loads(args.child), args.child_trace)
    traces = {"conversation": args.conversation, "synthetic": args.synthetic}
    points = [point(**json.loads(args.one))] if args.one else suite(args.suite)
    with tempfile.TemporaryDirectory(prefix="dynamo_replay_") as tmp:
        for cfg in points:
            path = traces.get(cfg["trace"])
            if not path:
                print(f"skip {cfg['trace']}: no path given", file=sys.stderr)
                continue
            cfg["repeat"] = max(cfg["repeat"], args.repeat)
            proc = subprocess.run(
                [
                    sys.executable,
                    os.path.abspath(__file__),
                    "--child",
                    json.dumps(cfg),
                    "--child-trace",
                    head(path, cfg["requests"], tmp),
                ],
                capture_output=True,
                check=False,
                text=True,
                timeout=args.timeout,
            )
            if proc.returncode:
                print(
                    json.dumps({"peer": "dynamo-replay", "config": cfg, "error": proc.stderr.strip()[-400:]}),
                    flush=True,
                )
            else:
                sys.stdout.write(proc.stdout)
                sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
