"""Check that a change leaves every simulated value as it was.

Replays the settings below with two versions of the package, this checkout and a commit (unpacked into a temporary folder) or
another folder that holds it, and compares each value of the reports and of all request rows. Texts that were renamed on
purpose are listed in ``RENAMED``. Settings that the older version refuses must be refused by the newer one.

    python benchmarks/same_reports.py 2a36a34 [--requests 600] [--only least-time]
    python benchmarks/same_reports.py build/plain --only host         a compiled install against the checkout

The results of a commit are kept in ``build/same_reports`` (or ``--cache``), so that each is replayed once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _peers import conversation_trace

ROOT = Path(__file__).resolve().parent.parent
TRACE = conversation_trace()

RENAMED: dict[str, str] = {}
"""Old text -> new text, for names in reports that changed on purpose. Applied to the JSON of the older side."""
ADDED = (
    ".report.config.router.object_credit",
    ".report.config.decode_router.object_credit",
    *(f".report.config.{name}" for name in ("client", "client_options", "turnaround", "warm_up")),
    *(f".report.config.{name}" for name in ("flow", "engine_requests", "queue", "handover.reserves")),
    *(f".report.config.{name}" for name in ("max_tokens", "render_token_us", "renderers", "handover.second_front_end")),
    ".report.sessions",
    *(f".report.scaling.{name}" for name in ("card_seconds", "cost", "flaps", "flap_s", "workers", "within_slo")),
    ".report.tenants",
    *(
        f".report.config.workers.engine.{name}"
        for name in ("cache_quota", "tenant_quotas", "tiers.tiers.quotas", "tiers.spill", "tiers.wait_for_save")
    ),
    ".report.config.flow.tenant_requests",
    ".report.config.prefetch",
    *(f".report.config.workers.engine.groups.{name}" for name in ("cached", "checkpoint_unit")),
    ".report.cache_time",
    ".rows.flow_wait_ms",
    ".rows.tenant",
    ".report.ranges",
    ".report.timing.held_out",
    ".report.timing.run_class",
)
"""Places that only the newer side has, on purpose."""
INTENDED: dict[str, tuple[str, str]] = {
    "policy aibrix": ("abdfe2ab", "draws and reads metrics as AIBrix's router does"),
    "policy llm-d-blend, 70, hybrid": ("224bd7d4", "what was routed counts whole, as llm-d does"),
    "least-time, temperature": ("e4e247ec", "policies that don't read temperature refuse it"),
}
"""Beginning of a setting's name -> commit that changed its values on purpose, and how. They are compared, and counted apart."""

POLICIES = [
    "kv",
    "least-time",
    "approx",
    "least-loaded",
    "affinity",
    "round-robin",
    "random",
    "longest-match",
    "least-prefill",
    "lmetric",
    "sticky",
    "llm-d-blend",
    "cache-aware",
    "prefix-hash",
    "preble",
    "aibrix",
    "dualmap",
    "load-aware",
    "ray-prefix",
    "conductor",
]
EVICTIONS = [
    "priority",
    "slru",
    "lfu",
    "s3-fifo",
    "t-lru",
    "workload-aware",
    "hits-per-token",
    "queue-informed",
    "marconi",
    "belady",
]
DECIDERS = ["never", "uncached", "isl-bounding", "prefill-load", "isl-or-load", "drift", "least-time"]

SMALL: dict[str, Any] = {"block_size": 64, "num_gpu_blocks": 3000}
"""Few enough blocks for eviction, waiting and preemption within some hundred requests."""
TINY: dict[str, Any] = {"block_size": 64, "num_gpu_blocks": 2200, "speedup": 20}
"""For a hundred workers: requests arrive fast enough to queue."""
HOST: dict[str, Any] = {"host_blocks": 12000, "host_bandwidth": "32/32"}
LOWER: dict[str, Any] = {**HOST, "storage_blocks": 20000, "remote_blocks": 40000}
LIMITS: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
PINNED: dict[str, Any] = {"timing": "polynomial"}
"""For a model on a card: roofline and tables change with every measurement, so both sides take times that know neither."""
GPT_OSS: dict[str, Any] = {"model": "gpt-oss-20b", "gpu": "h100", "num_gpu_blocks": 9000, **LIMITS, **PINNED}
KINDS = [
    {"count": 2, "num_gpu_blocks": 3000},
    {"count": 2, "num_gpu_blocks": 2500, "timing_speedup": 2.0, "host_blocks": 6000},
]
MANY_KINDS = [{**kind, "count": 50} for kind in KINDS]
ROLES: dict[str, Any] = {"prefill": 2, "decode": 2, "router": "kv", **SMALL, "speedup": 2}


def settings() -> dict[str, dict[str, Any]]:
    """All settings by name."""
    made: dict[str, dict[str, Any]] = {
        # As in benchmarks/replay.py and examples/demo.py.
        "8 kv, block 64": {
            "workers": 8,
            "router": "kv",
            "block_size": 64,
            "num_gpu_blocks": 16384,
            "predicted_ttl_s": 0,
        },
        "8 kv, block 16": {
            "workers": 8,
            "router": "kv",
            "block_size": 16,
            "num_gpu_blocks": 65536,
            "predicted_ttl_s": 0,
        },
        "4 kv, host, fifo": {
            "workers": 4,
            "router": "kv",
            "block_size": 64,
            "num_gpu_blocks": 16384,
            "predicted_ttl_s": 0,
            "host_blocks": 65536,
            "host_bandwidth": "32/32",
            "link_discipline": "fifo",
            "last_block": "recompute-block",
        },
        "1 round-robin": {"workers": 1, "router": "round-robin", "block_size": 64, "num_gpu_blocks": 16384},
        "demo, round-robin": {"router": "round-robin"},
        "demo, kv": {"router": "kv"},
        "demo, kv + host": {"router": "kv", "host_bytes": "256GiB"},
    }
    for policy in POLICIES:
        made[f"policy {policy}, 8"] = {"workers": 8, "router": policy, **SMALL, "speedup": 3}
        made[f"policy {policy}, 100"] = {"workers": 100, "router": policy, **TINY}
        made[f"policy {policy}, 100, host"] = {"workers": 100, "router": policy, **TINY, **HOST}
        made[f"policy {policy}, 70, hybrid"] = {"workers": 70, "router": policy, **GPT_OSS, "speedup": 20}
    for policy in ("kv", "least-time"):
        made |= {
            f"{policy}, host, block 16": {
                "workers": 4,
                "router": policy,
                "block_size": 16,
                "num_gpu_blocks": 9000,
                **HOST,
            },
            f"{policy}, host, fair": {"workers": 2, "router": policy, **SMALL, **HOST},
            f"{policy}, four tiers": {"workers": 4, "router": policy, **SMALL, **LOWER},
            f"{policy}, shared host": {"workers": 4, "router": policy, **SMALL, **HOST, "host_scope": "shared"},
            f"{policy}, shared storage": {
                "workers": 8,
                "router": policy,
                **SMALL,
                **HOST,
                "storage_blocks": 20000,
                "storage_scope": "shared",
                "shared_bandwidth": "20/20",
            },
            f"{policy}, temperature, 100": {"workers": 100, "router": policy, **TINY, "temperature": 0.5},
            f"{policy}, guard": {"workers": 8, "router": policy, **SMALL, "guard": 2},
            f"{policy}, guard, 100": {"workers": 100, "router": policy, **TINY, "guard": 2},
            f"{policy}, hybrid, host": {"workers": 2, "router": policy, **GPT_OSS, "host_blocks": 9000},
            f"{policy}, hybrid, 8": {"workers": 8, "router": policy, **GPT_OSS, "num_gpu_blocks": 4000},
            f"{policy}, lag, 100": {"workers": 100, "router": policy, **TINY, "event_lag": "500ms"},
            f"{policy}, digests": {
                "workers": 8,
                "router": policy,
                **SMALL,
                "digest_every": "10s",
                "digest_error": 0.05,
            },
            f"{policy}, ranks": {"workers": 3, "dp_size": 2, "router": policy, **SMALL},
            f"{policy}, ranks, 40": {"workers": 40, "dp_size": 2, "router": policy, **TINY},
            f"{policy}, pull": {"workers": 4, "router": policy, **SMALL, **HOST, "peer_pull": "host:min_lead=1024"},
            f"{policy}, pull, 100": {
                "workers": 100,
                "router": policy,
                **TINY,
                **HOST,
                "peer_pull": "device:min_lead=1024",
            },
            f"{policy}, threshold scaling": {
                "workers": 2,
                "router": policy,
                **SMALL,
                "autoscale": "threshold:ttft_p99=1s,min=1,max=6,startup=20s",
            },
            f"{policy}, predictive scaling": {
                "workers": 2,
                "router": policy,
                **SMALL,
                "autoscale": "predictive:min=1,max=6,startup=20s",
            },
            f"{policy}, session ends": {
                "workers": 4,
                "router": policy,
                **SMALL,
                "hints": "session-end:recall=0.5,false=0.1",
                "heed_hints": True,
            },
            f"{policy}, retention": {
                "workers": 4,
                "router": policy,
                **SMALL,
                **HOST,
                "hints": "ttl:seconds=60,then=first",
                "heed_hints": True,
            },
            f"{policy}, closed loop": {"workers": 2, "router": policy, **SMALL, "concurrency": 40},
            f"{policy}, output": {
                "workers": 8,
                "router": policy,
                **SMALL,
                "track_output": True,
                "reserve_output": 0.5,
            },
            f"{policy}, two kinds": {"router": policy, "workers": KINDS, "block_size": 64},
            f"{policy}, two kinds, 100": {"router": policy, "workers": MANY_KINDS, "block_size": 64, "speedup": 20},
            f"{policy}, model on a card": {
                "workers": 4,
                "router": policy,
                "model": "qwen3-32b",
                "gpu": "h100",
                "tp": 2,
                "num_gpu_blocks": 4000,
                **LIMITS,
                **PINNED,
            },
        }
    for eviction in EVICTIONS:
        made[f"eviction {eviction}"] = {"workers": 4, "router": "kv", **SMALL, "eviction": eviction}
        if eviction == "queue-informed":
            continue  # for the device alone
        made[f"eviction {eviction}, host"] = {
            "workers": 2,
            "router": "kv",
            **SMALL,
            **HOST,
            "eviction": eviction,
            "host_eviction": eviction,
        }
    for policy in ("write_through_generated", "after_hits", "on_eviction"):
        made[f"offload {policy}"] = {"workers": 2, "router": "kv", **SMALL, **LOWER, "offload_policy": policy}
    for policy in ("threshold", "least-time"):
        made[f"load {policy}"] = {"workers": 2, "router": "kv", **SMALL, **LOWER, "load_policy": policy}
    made["least-time, 66, shared storage"] = {**made["least-time, shared storage"], "workers": 66, **TINY}
    made |= {
        "round-robin, small, host": {"workers": 2, "router": "round-robin", **SMALL, **HOST},
        "asynchronous": {"workers": 2, "router": "kv", "async_scheduling": True, **SMALL},
        "asynchronous, round-robin, block 16": {
            "workers": 2,
            "router": "round-robin",
            "block_size": 16,
            "async_scheduling": True,
            "num_gpu_blocks": 12000,
        },
        "speculative": {"workers": 2, "router": "kv", **SMALL, "num_speculative_tokens": 3},
        "chunks of blocks": {"workers": 2, "router": "kv", **SMALL, **HOST, "blocks_per_chunk": 4},
        "priorities": {"workers": 2, "router": "kv", **SMALL, "scheduling_policy": "priority"},
        "measured link": {
            "workers": 2,
            "router": "kv",
            "block_size": 64,
            "num_gpu_blocks": 3000,
            "host_blocks": 12000,
            "link": "h200",
        },
        "one pass at a time": {"workers": 2, "router": "kv", **SMALL, "plans": False},
        # Workers without roles have TensorRT-LLM's own rules now.
        "trtllm": {"prefill": 2, "decode": 2, "router": "kv", "backend": "trtllm", "num_gpu_blocks": 6000},
        "hybrid, roles": {"prefill": 2, "decode": 2, "router": "kv", **GPT_OSS},
        "4 + 4 kv": {
            "prefill": 4,
            "decode": 4,
            "router": "kv",
            "nic": "none",
            "block_size": 64,
            "num_gpu_blocks": 16384,
        },
        "roles": ROLES,
        "roles, destination first": {**ROLES, "protocol": "destination-first"},
        "roles, streamed": {**ROLES, "streamed": 0.5, "sends": "prompt"},
        "roles, host, bus": {**ROLES, **HOST, "bus_bandwidth": "40/40"},
        "roles, node": {**ROLES, "node_bandwidth": "50/50", "workers_per_node": 2},
        "roles, no contention": {**ROLES, "contention": False},
        "roles, pull": {**ROLES, **HOST, "peer_pull": "host:min_lead=1024"},
        "roles, scaling": {**ROLES, "autoscale": "threshold:ttft_p99=1s,min=1,max=4,startup=20s"},
        "roles, kv decode": {**ROLES, "decode_router": "kv"},
        "roles, 70": {"prefill": 70, "decode": 70, "router": "least-time", **TINY},
        "roles, kv, 70": {"prefill": 70, "decode": 70, "router": "kv", "decode_router": "kv", **TINY},
    }
    for decider in DECIDERS:
        made[f"roles, {decider}"] = {**ROLES, "router": "least-time", "decider": decider}
    return made


SETTINGS = settings()


def outcome(chosen: dict[str, Any], requests: int) -> dict[str, Any]:
    """Replay with the kvyard of this process. Returns the report and the rows as JSON values, or the refusal."""
    from kvyard.errors import KvyardError
    from kvyard.replay.report.files import to_json
    from kvyard.replay.run import replay
    from kvyard.replay.settings import SETTINGS as KNOWN

    if "concurrency" in chosen and "turnaround" in KNOWN:
        chosen = {**chosen, "turnaround": 0}  # closed loops had none
    try:
        run = replay(TRACE, limit=requests, **chosen)
    except KvyardError as refusal:
        return {"refused": str(refusal)}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        run.save(per_request=rows)
        return {"report": json.loads(to_json(run.report)), "rows": rows.read_text().splitlines()}


def halfway(spread: dict[str, Any]) -> set[str]:
    """Percentiles of a spread that lie exactly between two values: the lower one counts now, the one of even rank did."""
    ranks = {name: share * (spread["count"] - 1) for name, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95))}
    return {name for name, rank in ranks.items() if rank % 1 == 0.5 and rank // 1 % 2}


def without_halfway(result: dict[str, Any]) -> None:
    """Take the medians that ``halfway`` leaves out from a series over time: those of windows with 4, 8, 12, ... requests."""
    series, answered = result["report"]["series"], Counter[int]()
    for row in map(json.loads, result["rows"]):
        if row["status"] == "finished":
            answered[row["arrival_ns"] // round(series["window_s"] * 1e9)] += 1
    series["ttft_p50"] = [None if answered[index] % 4 == 0 else p50 for index, p50 in enumerate(series["ttft_p50"])]


def compare(name: str, before: Any, after: Any, place: str = "") -> list[str]:
    """List the places where two JSON values differ; text that is JSON is read."""
    if isinstance(before, str) and isinstance(after, str) and before != after and before[:1] == after[:1] == "{":
        before, after = json.loads(before), json.loads(after)
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        if {"count", "p50"} <= before.keys() and before["count"] == after.get("count"):
            keys = [key for key in keys if key not in halfway(before)]
        missing = object()
        return [
            line
            for key in keys
            for line in compare(name, before.get(key, missing), after.get(key, missing), f"{place}.{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for at, (left, right) in pairs for line in compare(name, left, right, f"{place}[{at}]")]
    if before == after or (type(before) is object and re.sub(r"\[\d+\]", "", place) in ADDED):
        return []
    shown = [str(value)[:90] if type(value) is not object else "(nothing)" for value in (before, after)]
    return [f"{name}: {place.lstrip('.')}: {shown[0]} -> {shown[1]}"]


def run_all(package: Path, names: list[str], requests: int, folder: Path) -> None:
    """Replay all settings that ``folder`` has no result of yet, with the package in ``package``, in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not (folder / file_name(name, requests)).exists()]
    if not missing:
        return
    command = [
        sys.executable,
        __file__,
        "--one",
        json.dumps(missing),
        "--requests",
        str(requests),
        "--cache",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    if subprocess.run(command, check=False, env=environment).returncode:
        sys.exit(f"the replays from {package} failed")


def file_name(name: str, requests: int) -> str:
    """Name the file of a result by all that it depends on besides the package."""
    key = json.dumps([name, SETTINGS[name], requests])
    return hashlib.sha256(key.encode()).hexdigest()[:24] + ".json"


def unpacked(commit: str, folder: Path) -> Path:
    """Unpack the package as of ``commit``."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        sys.exit(f"{commit} is neither a folder nor a commit")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "src"


def replay_here(names: list[str], requests: int, folder: Path) -> None:
    """Replay with the package of this process and write a result per name into ``folder``."""
    for name in names:
        started = time.process_time()
        result = outcome(SETTINGS[name], requests)
        result["cpu_s"] = time.process_time() - started
        path = folder / file_name(name, requests)
        path.with_suffix(".part").write_text(json.dumps(result))
        path.with_suffix(".part").rename(path)


def renamed(text: str) -> str:
    """Apply ``RENAMED`` to JSON text of the older side."""
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("other", nargs="?", default="HEAD", help="a commit, or a folder that holds the package; HEAD")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--here", type=Path, default=ROOT / "src", help="instead of this checkout: another folder")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "same_reports", help="results of commits")
    parser.add_argument("--lines", type=int, default=4, help="differences to show of a setting; 4")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        replay_here(json.loads(args.one), args.requests, args.cache)
        return
    names = [name for name in SETTINGS if args.only in name]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if Path(args.other).is_dir():
            old, package = work / "old", Path(args.other)
        else:
            commit = ["git", "rev-parse", "--verify", "--quiet", f"{args.other}^{{commit}}"]
            full = subprocess.run(commit, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
            old, package = args.cache / (full or "none"), unpacked(args.other, work)
        run_all(package, names, args.requests, old)
        run_all(args.here, names, args.requests, work / "new")
        different = intended = 0
        for name in names:
            before = json.loads(renamed((old / file_name(name, args.requests)).read_text()))
            after = json.loads((work / "new" / file_name(name, args.requests)).read_text())
            seconds = before.pop("cpu_s"), after.pop("cpu_s")
            for result in (before, after):
                if "refused" not in result:
                    without_halfway(result)
            lines = compare(name, before, after)
            reason = next((INTENDED[start] for start in INTENDED if name.startswith(start)), None)
            if lines and reason:
                intended += 1
                lines = ["on purpose since {}: {}".format(*reason)]
                verdict = "changed"
            else:
                different += bool(lines)
                verdict = "different" if lines else "refused" if "refused" in before else "same"
            print(f"{name:38} {verdict:9} {seconds[0]:7.2f} s before {seconds[1]:7.2f} s after")
            print("".join(f"    {line}\n" for line in lines[: args.lines]), end="", flush=True)
    if different:
        sys.exit(f"{different} of {len(names)} reports are different, {intended} changed on purpose")
    print(f"{len(names) - intended} reports have the same values, {intended} changed on purpose")


if __name__ == "__main__":
    main()
