"""Are reports the same to the byte before and after a change? For commits that make replays quicker and nothing else.

Runs the settings below from two places, this checkout and a commit (unpacked into a temporary folder) or another folder that
holds the package, and compares the reports and the rows of all requests.

    python benchmarks/same_reports.py HEAD~1 [--requests 1500] [--only host]
    python benchmarks/same_reports.py build/plain            a compiled install against the checkout
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import conversation_trace

ROOT = Path(__file__).resolve().parent.parent
TRACE = conversation_trace()
SMALL = {"num_gpu_blocks": 3000}
"""So few blocks that there is eviction, waiting and preemption with some hundred requests."""
HOST = {"host_blocks": 12000, "host_bandwidth": "32/32"}
SETTINGS: dict[str, dict[str, Any]] = {
    # As in benchmarks/replay.py and examples/demo.py.
    "8 kv, block 64": {"workers": 8, "router": "kv", "block_size": 64, "num_gpu_blocks": 16384, "predicted_ttl_s": 0},
    "8 kv, block 16": {"workers": 8, "router": "kv", "block_size": 16, "num_gpu_blocks": 65536, "predicted_ttl_s": 0},
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
    # The same with less room, and what else there is.
    "least-time": {"workers": 4, "router": "least-time", "block_size": 64, **SMALL},
    "least-time, host, block 16": {
        "workers": 4,
        "router": "least-time",
        "block_size": 16,
        "num_gpu_blocks": 9000,
        **HOST,
    },
    "kv, host, fair, block 64": {"workers": 2, "router": "kv", "block_size": 64, **SMALL, **HOST},
    "round-robin, small, host": {"workers": 2, "router": "round-robin", "block_size": 64, **SMALL, **HOST},
    "asynchronous": {"workers": 2, "router": "kv", "block_size": 64, "async_scheduling": True, **SMALL},
    "asynchronous, round-robin, block 16": {
        "workers": 2,
        "router": "round-robin",
        "block_size": 16,
        "async_scheduling": True,
        "num_gpu_blocks": 12000,
    },
    "sglang": {"workers": 2, "router": "kv", "backend": "sglang", "num_gpu_blocks": 190_000},
    "trtllm": {"workers": 2, "router": "kv", "backend": "trtllm", "num_gpu_blocks": 6000},
    "4 + 4 kv": {"prefill": 4, "decode": 4, "router": "kv", "nic": "none", "block_size": 64, "num_gpu_blocks": 16384},
    "hybrid, host": {"workers": 2, "model": "gpt-oss-20b", "gpu": "h100", "num_gpu_blocks": 9000, "host_blocks": 9000},
}


def digest(settings: dict[str, Any], requests: int) -> str:
    """What the kvyard of this process makes of ``settings``: a fingerprint of the report and of all rows."""
    from kvyard.errors import KvyardError
    from kvyard.replay.report.files import to_json
    from kvyard.replay.run import replay

    try:
        done = replay(TRACE, limit=requests, **settings)
    except KvyardError as refused:
        sys.exit(f"{settings}: {refused}")
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        done.save(per_request=rows)
        return hashlib.sha256(to_json(done.report) + rows.read_bytes()).hexdigest()


def digests(package: Path, names: list[str], requests: int) -> dict[str, tuple[str, float]]:
    """Of all settings that are named, from the package in the folder ``package``: fingerprints, and CPU seconds."""
    command = [sys.executable, __file__, "--one", json.dumps(names), "--requests", str(requests)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"the replays from {package} failed")
    found: dict[str, tuple[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def unpacked(commit: str, folder: Path) -> Path:
    """The package as of ``commit``."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        sys.exit(f"{commit} is neither a folder nor a commit")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("other", nargs="?", default="HEAD", help="a commit, or a folder that holds the package; HEAD")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--here", type=Path, default=ROOT / "src", help="instead of this checkout: another folder")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        found = {}
        for name in json.loads(args.one):
            began = time.process_time()
            found[name] = (digest(SETTINGS[name], args.requests), time.process_time() - began)
        print(json.dumps(found))
        return
    names = [name for name in SETTINGS if args.only in name]
    with tempfile.TemporaryDirectory() as folder:
        there = Path(args.other) if Path(args.other).is_dir() else unpacked(args.other, Path(folder))
        before, after = digests(there, names, args.requests), digests(args.here, names, args.requests)
    different = [name for name in names if before[name][0] != after[name][0]]
    for name in names:
        verdict = "different" if name in different else "same"
        print(f"{name:38} {verdict:9} {before[name][1]:7.2f} s before {after[name][1]:7.2f} s after")
    if different:
        sys.exit(f"{len(different)} of {len(names)} reports are different")
    print(f"all {len(names)} reports are the same to the byte")


if __name__ == "__main__":
    main()
