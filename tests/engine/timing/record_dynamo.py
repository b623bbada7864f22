"""Records durations of passes from NVIDIA Dynamo's mocker, to compare the polynomial model with.

Run by hand with a Python that has the wheels: ``python record_dynamo.py data/dynamo.json``. Recorded with ``ai-dynamo`` and
``ai-dynamo-runtime`` 1.6.1 (Apache-2.0), which are only run, through ``dynamo.replay.run_trace_replay``. A row is
(capacity, speedup_ratio, decode_speedup_ratio, prefills, decode batch, decode context, ns).
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile

os.environ.setdefault("DYN_LOG", "error")

from dynamo.replay import run_trace_replay

BLOCK = 64
APART = 60_000
"""Milliseconds between cases: none meets the one before it."""


class Script:
    """Requests for one replay, with fresh blocks unless they are shared on purpose."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.next = 0

    def fresh(self, tokens: int) -> list[int]:
        count = -(-tokens // BLOCK)
        self.next += count
        return list(range(self.next - count, self.next))

    def add(self, at: int, tokens: int, out: int, blocks: list[int]) -> None:
        self.rows.append({"timestamp": at, "input_length": tokens, "output_length": out, "hash_ids": blocks})

    def run(self, blocks: int, speedup: float, decode_speedup: float) -> dict[float, list[dict]]:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
            file.writelines(json.dumps(row) + "\n" for row in sorted(self.rows, key=lambda row: row["timestamp"]))
        engine = {"backend": "vllm", "block_size": BLOCK, "num_gpu_blocks": blocks}
        engine |= {"speedup_ratio": speedup, "decode_speedup_ratio": decode_speedup}
        report = run_trace_replay(
            file.name, extra_engine_args={"engine": engine}, trace_block_size=BLOCK, capture_per_request=True
        )
        os.unlink(file.name)
        found: dict[float, list[dict]] = {}
        for record in report.per_request:
            found.setdefault(record["arrival_time_ms"], []).append(record)
        return found


def ns(ms: float) -> int:
    return round(ms * 1e6)


def record(seed: int, blocks: int, speedup: float, decode_speedup: float, cases: int) -> list[list]:
    """Per case: a batch, some of it with cached prefixes, and its first decode step."""
    rng, script, batches = random.Random(seed), Script(), []
    script.add(0, 1, 1, script.fresh(1))  # the replay counts from its first request
    most = min(1500, blocks * BLOCK // 5)
    for case in range(cases):
        at, batch = (2 * case + 1) * APART, rng.randint(1, 5)
        for _ in range(batch):
            tokens = rng.randint(1, most)
            cached = rng.randint(0, (tokens - 1) // BLOCK)
            prefix = script.fresh(cached * BLOCK)
            if cached:
                script.add(at, cached * BLOCK, 1, prefix)
            script.add(at + APART, tokens, 2, prefix + script.fresh(tokens - cached * BLOCK))
        batches.append(at + APART)
    found = script.run(blocks, speedup, decode_speedup)
    rows = []
    for at in batches:
        records = found[float(at)]
        prefills = [[r["input_length"] - r["reused_input_tokens"], r["reused_input_tokens"]] for r in records]
        if None in (records[0]["ttst_ms"], records[0]["ttft_ms"]) or len({ns(r["ttft_ms"]) for r in records}) > 1:
            continue  # it was refused, or didn't fit into one pass
        context = sum(r["input_length"] + 1 for r in records)
        head = [blocks * BLOCK, speedup, decode_speedup]
        rows.append([*head, prefills, 0, 0, ns(records[0]["ttft_ms"])])
        rows.append([*head, [], len(records), context, ns(records[0]["ttst_ms"])])
    return rows


def main(path: str) -> None:
    rows = record(1, 16384, 1.0, 1.0, 60) + record(2, 96, 1.0, 1.0, 40)
    rows += record(3, 16384, 0.37, 2.3, 30) + record(4, 48, 3.0, 1.7, 30)
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(len(rows))


if __name__ == "__main__":
    main(sys.argv[1])
