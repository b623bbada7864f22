"""Checks of the answers in docs/start/questions.md that share no code with them: an LRU, a closed form, a bound.

    python benchmarks/questions.py [--limit 2000]

Question 1 is checked by benchmarks/plan.py, against a grid. Question 2: what host memory adds to reuse, against a plain LRU
over prefixes of each worker's requests in the order of their admission. Question 5: what a mock reports as cached, against what
earlier prompts of the trace had. Question 9: TTFT of four workers of which one dies lies between those of four and of three.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
ID = 512
"""Tokens that an id of the trace stands for."""
BLOCK = 64
TOKEN_BYTES = 128 << 10
Rows = list[dict[str, Any]]


def kvyard(*words: object) -> None:
    """Run a command as a user does."""
    subprocess.run([sys.executable, "-m", "kvyard", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def replayed(folder: Path, limit: int, *words: object) -> tuple[dict[str, Any], Rows]:
    """Return the report and the requests of a replay."""
    report, rows = folder / "report.json", folder / "rows.jsonl"
    kvyard("replay", TRACE, "--limit", limit, *words, "--report", report, "--per-request", rows, "-q")
    return json.loads(report.read_text()), [json.loads(line) for line in rows.read_text().splitlines()]


def trace(limit: int) -> Rows:
    """Return the first rows of the trace."""
    with lzma.open(TRACE, "rt") as lines:
        return [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]


def lru_reuse(prompts: Rows, admitted: Rows, tokens: int) -> float:
    """Return the share of prompt tokens that a plain LRU of ``tokens`` for each worker finds."""
    caches: dict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
    found = whole = 0
    for row in sorted(admitted, key=lambda row: row["admitted_ns"]):
        prompt, cache = prompts[int(row["id"]) - 1], caches[row["worker"]]
        ids, length = prompt["hash_ids"], prompt["input_length"]
        hit = next((index for index, name in enumerate(ids) if name not in cache), len(ids))
        found += min(hit * ID, (length - 1) // BLOCK * BLOCK)
        whole += length
        for name in reversed(ids):  # the beginning of a prompt is the last to go
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) * ID > tokens:
            cache.popitem(last=False)
    return found / whole


def host_memory(limit: int) -> None:
    """Check what each size of question 2 reuses."""
    prompts = trace(limit)
    for gib in (0, 128, 256, 512):
        with tempfile.TemporaryDirectory() as folder:
            report, rows = replayed(
                Path(folder), limit, "--workers", 4, "--num-gpu-blocks", "8k", "--host-bytes", f"{gib}GiB"
            )
        tokens = max(8000 * BLOCK, gib * 2**30 // TOKEN_BYTES)
        part = report["reuse"]["all"]
        said, plain = part["part"] / part["whole"], lru_reuse(prompts, rows, tokens)
        print(f"2  host memory {gib:3} GiB: {said:6.2%} reused, by a plain LRU {plain:6.2%}", flush=True)


def live_mock(limit: int = 20) -> None:
    """Check what the mock of question 5 reports as cached, one request after the other."""
    port = 18_000
    words = ["mock", "--port", str(port), "--kv-events", "--speed", "10", "--max-model-len", "131072"]
    mock = subprocess.Popen(
        [sys.executable, "-m", "kvyard", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.3)
        with tempfile.TemporaryDirectory() as folder:
            live = ("--live", f"http://127.0.0.1:{port}", "--speed", 10, "--any-length", "--concurrency", 1)
            report, _ = replayed(Path(folder), limit, *live)
    finally:
        mock.terminate()
        mock.wait()
    seen: set[int] = set()
    expected = 0
    for prompt in trace(limit):
        ids = prompt["hash_ids"]
        hit = next((index for index, name in enumerate(ids) if name not in seen), len(ids))
        expected += min(hit * ID, (prompt["input_length"] - 1) // 16 * 16)
        seen.update(ids)
    print(
        f"5  mock, {limit} requests: {report['reuse']['all']['part']:,} tokens reported as cached, closed form {expected:,}"
    )


def death(limit: int) -> None:
    """Check that the fleet of question 9 lies between four workers and three, and loses no request."""
    blocks = ("--num-gpu-blocks", "8000")
    found = {}
    for name, words in {
        "four": ("--workers", 4, *blocks),
        "one dies": ("--config", ROOT / "examples" / "engine_dies.toml"),
        "three": ("--workers", 3, *blocks),
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            report, _ = replayed(Path(folder), limit, *words)
        found[name] = report["latency"]["ttft"]["mean"]
        assert report["requests"]["finished"] == limit
    text = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.items())
    held = found["four"] <= found["one dies"] <= found["three"]
    print(f"9  mean TTFT: {text}: {'in order' if held else 'NOT in order'}")


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=2000)
    limit = parser.parse_args().limit
    host_memory(limit)
    live_mock()
    death(limit)


if __name__ == "__main__":
    main()
