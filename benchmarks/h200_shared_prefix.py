"""Decode attention over a paged cache in which requests share prefixes, timed on a GPU.

Requests of a batch that share a prefix read the same blocks. Where their programs run at the same time, the second reader finds
them in L2, so that a step takes less than the sum of its contexts says. This measures how much less, by how many requests
share a prefix, with a flash-decoding kernel that doesn't split contexts and computes heads of a request next to each other.

    python benchmarks/h200_shared_prefix.py    # needs torch, triton and a GPU; writes $OUT

One JSON line a shape: ``batch``, ``groups`` (prefixes), ``prefix`` and ``own`` tokens, ``heads`` (of keys and values), ``us``,
and ``gb_s`` (bytes of all contexts over that time).
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
import triton
import triton.language as tl

DEVICE, BF16 = "cuda", torch.bfloat16
WIDTH, BLOCK, QUERIES = 128, 16, 16
TILE = 64
SHAPES = [
    (batch, groups, prefix, own, heads)
    for heads in (4, 8)
    for batch in (32, 96, 160)
    for groups in (batch, 48, 24, 12, 4, 1)
    for prefix, own in ((6000, 1700), (16000, 400))
    if groups <= batch
]


@triton.jit
def decode(
    q, k, v, table, lengths, out, width_blocks, HEADS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, M: tl.constexpr
):
    head, request = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + request)
    rows, cols, steps = tl.arange(0, M), tl.arange(0, D), tl.arange(0, T)
    query = tl.load(q + (request * HEADS + head) * M * D + rows[:, None] * D + cols[None, :])
    best = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    made = tl.zeros([M, D], tl.float32)
    for start in range(0, length, T):
        at = start + steps
        block = tl.load(table + request * width_blocks + at // 16, mask=at < length, other=0).to(tl.int64)
        place = ((block * 16 + at % 16) * HEADS + head) * D
        keys = tl.load(k + place[None, :] + cols[:, None], mask=(at < length)[None, :], other=0.0)
        scores = tl.where((at < length)[None, :], tl.dot(query, keys), -1e30)
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        scale = tl.exp(best - higher)
        values = tl.load(v + place[:, None] + cols[None, :], mask=(at < length)[:, None], other=0.0)
        made = made * scale[:, None] + tl.dot(weights.to(tl.bfloat16), values)
        total = total * scale + tl.sum(weights, 1)
        best = higher
    result = made / total[:, None]
    tl.store(out + (request * HEADS + head) * M * D + rows[:, None] * D + cols[None, :], result.to(tl.bfloat16))


def timed(batch: int, groups: int, prefix: int, own: int, heads: int) -> float:
    """Microseconds of a step, median of 20."""
    draw = random.Random(f"{batch} {groups} {prefix}")
    shared, mine = prefix // BLOCK, own // BLOCK
    blocks = groups * shared + batch * mine
    cache = [torch.randn((blocks, BLOCK, heads, WIDTH), device=DEVICE, dtype=BF16) for _ in "kv"]
    of = [at % groups for at in range(batch)]
    draw.shuffle(of)
    names = list(range(blocks))
    draw.shuffle(names)
    rows = [
        names[of[at] * shared : (of[at] + 1) * shared]
        + names[groups * shared + at * mine : groups * shared + (at + 1) * mine]
        for at in range(batch)
    ]
    table = torch.tensor(rows, device=DEVICE, dtype=torch.int32)
    lengths = torch.full((batch,), (shared + mine) * BLOCK, device=DEVICE, dtype=torch.int32)
    query = torch.randn((batch, heads, QUERIES, WIDTH), device=DEVICE, dtype=BF16)
    out = torch.empty_like(query)

    def launch() -> None:
        decode[(heads, batch)](
            query, *cache, table, lengths, out, table.shape[1], heads, WIDTH, TILE, QUERIES, num_warps=4, num_stages=4
        )

    for _ in range(3):
        launch()
    spans = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return sorted(spans)[10]


def main() -> None:
    path = Path(os.environ.get("OUT", ".")) / "h200-shared-prefix.jsonl"
    with path.open("w") as file:
        for batch, groups, prefix, own, heads in SHAPES:
            us = timed(batch, groups, prefix, own, heads)
            read = batch * ((prefix // BLOCK) + (own // BLOCK)) * BLOCK * heads * WIDTH * 4
            row = {"batch": batch, "groups": groups, "prefix": prefix, "own": own, "heads": heads, "us": round(us, 1)}
            row["gb_s"] = round(read / us / 1e3)
            print(json.dumps(row), flush=True)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
