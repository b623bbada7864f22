"""What ``kvyard expect`` takes beside a replay of the same trace, and what ``--watch`` takes of its gateway's processor time.

    python benchmarks/expect.py [--limit 12000] [--repeats 3] [--seconds 150]

The first: CPU seconds of whole commands, alternating. The counts are those of the replay itself (a healthy engine),
and those of an engine with a tenth of the blocks (a fault, whose cause is searched). The second: a mock fleet, a
gateway that records, a client that keeps it busy, and a watcher; CPU seconds from the processes' own statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from threading import Thread

import httpx

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
SETTINGS = ["--block-size", "512", "--num-gpu-blocks", "4000", "--workers", "4", "--router", "kv"]
TICK = os.sysconf("SC_CLK_TCK")


def cpu(*words: object, codes: tuple[int, ...] = (0,)) -> float:
    """Run a command; return the CPU seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "kvyard", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode in codes, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def counts(folder: Path, limit: int, blocks: int) -> Path:
    """Counts by request of an engine with this many blocks; beside them a page of metrics with their sums."""
    rows, answers = folder / "rows.jsonl", folder / f"answers-{blocks}.jsonl"
    settings = [str(blocks) if word == "4000" else word for word in SETTINGS]
    cpu("replay", TRACE, "--limit", limit, *settings, "--per-request", rows, "-q")
    queries = hits = 0
    with answers.open("w") as file:
        for line in rows.read_text().splitlines():
            row = json.loads(line)
            print(json.dumps({"request_id": row["id"], "cached": row["cached_tokens"]}), file=file)
            queries, hits = queries + row["input_tokens"], hits + row["cached_tokens"]
    answers.with_suffix(".txt").write_text(
        f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"
    )
    return answers


def beside_a_replay(limit: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        healthy, small = counts(folder, limit, 4000), counts(folder, limit, 400)
        trace = [TRACE, "--limit", limit, *SETTINGS]
        commands: dict[str, list[object]] = {
            "replay": ["replay", *trace, "-q"],
            "expect, no counts": ["expect", *trace],
            "expect, counts that are owed": ["expect", *trace, "--answers", healthy],
            "expect, counts of a smaller pool": ["expect", *trace, "--answers", small],
            "expect, sums of a smaller pool": ["expect", *trace, "--metrics", small.with_suffix(".txt")],
        }
        took: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, words in commands.items():
                took[name].append(cpu(*words, codes=(0, 1)))
        base = median(took["replay"])
        for name, times in took.items():
            print(
                f"{name}: {median(times):.2f} CPU s ({min(times):.2f} to {max(times):.2f}), {median(times) / base:.2f}x"
            )


def spent(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def started(*words: object, until: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return it and the line with ``until``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvyard", *map(str, words)], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if until in line:
            Thread(target=process.stdout.read, daemon=True).start()
            return process, line
    raise SystemExit("".join(lines))


def drive(url: str, ends: float, seed: int) -> None:
    """Ask about a few documents, one request after the other."""
    random = Random(seed)
    documents = [[random.randrange(200) for _ in range(800)] for _ in range(20)]
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        while time.monotonic() < ends:
            prompt = [*random.choice(documents), *(random.randrange(200) for _ in range(40))]
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4}).raise_for_status()


def of_a_gateway(seconds: float) -> None:
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        recording = Path(temporary, "traffic.jsonl")
        try:
            mock, line = started(
                *("mock", "--workers", 2, "--port", 0, "--kv-events", "--speed", 1000, "--num-gpu-blocks", 4000),
                until="serving",
            )
            processes.append(mock)
            fleet = next(word for word in line.replace(",", " ").split() if word.startswith("http"))
            gateway, line = started("gateway", "--fleet", fleet, "--port", 0, "--record", recording, until="http://")
            processes.append(gateway)
            url = next(word for word in line.replace(",", " ").split() if word.startswith("http"))
            ends = time.monotonic() + seconds
            clients = [Thread(target=drive, args=(url, ends, seed)) for seed in range(4)]
            for client in clients:
                client.start()
            time.sleep(15)
            watch, _ = started(
                *("expect", recording, "--watch", "10s", "--gateway", url, "--port", 0),
                *("--block-size", 16, "--num-gpu-blocks", 4000, "--workers", 2, "--router", "least-time"),
                until="metrics at",
            )
            processes.append(watch)
            began = spent(gateway.pid), spent(watch.pid)
            for client in clients:
                client.join()
            used = spent(gateway.pid) - began[0], spent(watch.pid) - began[1]
            view = httpx.get(f"{url}/dashboard/view", trust_env=False).json()
            rows = sum(1 for _ in recording.open())
            print(
                f"gateway {used[0]:.1f} CPU s for {rows} requests, watcher {used[1]:.2f} CPU s = {used[1] / used[0]:.1%} "
                f"(its start {began[1]:.2f} CPU s); last result {view['expectation']}"
            )
        finally:
            for process in processes:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    beside_a_replay(options.limit, options.repeats)
    of_a_gateway(options.seconds)
