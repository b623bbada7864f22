"""Checks of the answers in docs/start/questions.md that share no code with them: an LRU, a closed form, a bound.

    python benchmarks/questions.py [--limit 2000]

Question 1 is checked by benchmarks/plan.py, against a grid. Question 2: what host memory adds to reuse, against a plain LRU
over prefixes of each worker's requests in the order of their admission. Question 5: what a mock reports as cached, against what
earlier prompts of the trace had. Question 9: TTFT of four workers of which one dies lies between those of four and of three.
All on Mooncake's conversations, and on Weka's sessions (32 at a time) where they are beside the clone.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 64
TOKEN_BYTES = 128 << 10
Rows = list[dict[str, Any]]


class Prompt(NamedTuple):
    """A prompt by the trace's own ids of its blocks."""

    ids: Sequence[object]
    tokens: int


class Mooncake:
    """Requests that arrive at recorded times; an id stands for 512 tokens, the same in all requests."""

    path = ROOT / "examples" / "data" / "mooncake_conversation.jsonl.xz"
    id_tokens = 512
    flags: tuple[object, ...] = ()

    def prompts(self, limit: int) -> dict[str, Prompt]:
        """Return the first prompts by the ids that a replay gives them."""
        with lzma.open(self.path, "rt") as lines:
            rows = [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]
        return {str(number): Prompt(row["hash_ids"], row["input_length"]) for number, row in enumerate(rows, 1)}


class Weka:
    """Sessions whose turns follow each other; an id stands for 64 tokens, and is the session's own."""

    path = ROOT.parent / "shared" / "traces" / "weka" / "claude_code_710.jsonl.xz"
    id_tokens = 64
    flags: tuple[object, ...] = ("--concurrency", 32)

    def prompts(self, limit: int) -> dict[str, Prompt]:
        """Return the prompts of as many sessions as ``limit`` requests may come from."""
        found = {}
        with lzma.open(self.path, "rt") as lines:
            for _, line in zip(range(limit), lines, strict=False):
                session = json.loads(line)
                for number, row in enumerate(turns(session["requests"])):
                    ids = [(session["id"], name) for name in row["hash_ids"]]
                    found[f"{session['id']}:{number}"] = Prompt(ids, row["in"])
        return found


def turns(requests: Rows) -> Iterator[dict[str, Any]]:
    """Yield the requests of a session, those of a sub-agent in its place."""
    for row in requests:
        if row["type"] == "subagent":
            yield from turns(row["requests"])
        else:
            yield row


def kvyard(*words: object) -> None:
    """Run a command as a user does."""
    subprocess.run([sys.executable, "-m", "kvyard", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def replayed(trace: Mooncake | Weka, limit: int, *words: object) -> tuple[dict[str, Any], Rows]:
    """Return the report and the requests of a replay."""
    with tempfile.TemporaryDirectory() as folder:
        report, rows = Path(folder) / "report.json", Path(folder) / "rows.jsonl"
        kvyard("replay", trace.path, "--limit", limit, *words, "--report", report, "--per-request", rows, "-q")
        return json.loads(report.read_text()), [json.loads(line) for line in rows.read_text().splitlines()]


def lru_reuse(prompts: Mapping[str, Prompt], rows: Rows, id_tokens: int, room: int, block: int = BLOCK) -> int:
    """Return the prompt tokens that a plain LRU of ``room`` tokens for each worker finds, in the order of admission."""
    caches: dict[str, OrderedDict[object, None]] = defaultdict(OrderedDict)
    found = 0
    for row in sorted(rows, key=lambda row: row["admitted_ns"]):
        prompt, cache = prompts[row["id"]], caches[row["worker"]]
        assert prompt.tokens == row["input_tokens"]
        hit = next((place for place, name in enumerate(prompt.ids) if name not in cache), len(prompt.ids))
        found += min(hit * id_tokens, (prompt.tokens - 1) // block * block)
        for name in reversed(prompt.ids):  # the beginning of a prompt is the last to go
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) * id_tokens > room:
            cache.popitem(last=False)
    return found


def host_memory(trace: Mooncake | Weka, limit: int) -> None:
    """Check what each size of question 2 reuses."""
    prompts = trace.prompts(limit)
    for gib in (0, 128, 256, 512):
        fleet = ("--workers", 4, "--num-gpu-blocks", "8k", "--host-bytes", f"{gib}GiB")
        report, rows = replayed(trace, limit, *trace.flags, *fleet)
        part = report["reuse"]["all"]
        plain = lru_reuse(prompts, rows, trace.id_tokens, max(8000 * BLOCK, gib * 2**30 // TOKEN_BYTES))
        shares = f"{part['part'] / part['whole']:6.2%} reused, by a plain LRU {plain / part['whole']:6.2%}"
        print(f"2  host memory {gib:3} GiB: {shares}", flush=True)


def live_mock(trace: Mooncake | Weka, limit: int = 20) -> None:
    """Check what the mock of question 5 reports as cached, one request after the other."""
    port = 18_000
    words = ["mock", "--port", str(port), "--kv-events", "--speed", "10", "--max-model-len", "262144"]
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
        live = ("--live", f"http://127.0.0.1:{port}", "--speed", 10, "--any-length", "--concurrency", 1)
        report, rows = replayed(trace, limit, *live)
    finally:
        mock.terminate()
        mock.wait()
    for number, row in enumerate(rows):
        row["admitted_ns"] = number  # one at a time, in this order
    expected = lru_reuse(trace.prompts(limit), rows, trace.id_tokens, 1 << 60, 16)
    cached = report["reuse"]["all"]["part"]
    print(f"5  mock, {limit} requests: {cached:,} tokens reported as cached, closed form {expected:,}")


def death(trace: Mooncake | Weka, limit: int) -> None:
    """Check that the fleet of question 9 lies between four workers and three, and loses no request."""
    blocks = ("--num-gpu-blocks", "8000")
    found = {}
    for name, words in {
        "four": ("--workers", 4, *blocks),
        "one dies": ("--config", ROOT / "examples" / "engine_dies.toml", *blocks),
        "three": ("--workers", 3, *blocks),
    }.items():
        report, _ = replayed(trace, limit, *trace.flags, *words)
        found[name] = report["latency"]["ttft"]["mean"]
        assert report["requests"]["finished"] == limit
    text = ", ".join(f"{name} {ms:.1f} ms" for name, ms in found.items())
    held = found["four"] <= found["one dies"] <= found["three"]
    print(f"9  mean TTFT: {text}: {'in order' if held else 'NOT in order'}")


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--only", choices=["Mooncake", "Weka"])
    arguments = parser.parse_args()
    limit = arguments.limit
    for trace in (Mooncake(), Weka()):
        if trace.path.exists() and arguments.only in (None, type(trace).__name__):
            print(f"{type(trace).__name__}:")
            host_memory(trace, limit)
            live_mock(trace)
            death(trace, limit)


if __name__ == "__main__":
    main()
