"""Kernels that public tables lack, timed on one card inside CUDA graphs: what the roofline's small constants come from.

Public operator tables have products, attention, experts and collectives, each alone. They lack the small kernels between
them (norms, rotation, activation, cache writes), the sampler, routing and permutation apart from the products, grouped
products of a few tokens, attention with odd past, and how much a chain of kernels in a graph costs beyond their sum.

    python benchmarks/h200_kernels.py [--seconds 420]      # needs torch and a GPU; writes $OUT/kernels.jsonl

One JSON line a shape: ``kind``, its sizes, ``us`` (median over replays of a graph that has the kernel many times) and, first,
the device. It stops early rather than exceed ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

BF16 = torch.bfloat16
DEVICE = "cuda"


def graph_us(call: Callable[[], Any], inside: int = 20, replays: int = 15) -> float:
    """Microseconds of one ``call``, of ``inside`` in a CUDA graph; the median of ``replays``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inside)
    return median(times)


def eager_us(call: Callable[[], Any], calls: int = 200) -> float:
    """Microseconds of host time to launch one ``call`` without a graph."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / calls * 1e6


Shape = tuple[str, dict[str, Any], Callable[[], float]]


def rotating(shape: tuple[int, ...], copies: int) -> Iterator[torch.Tensor]:
    """Endless copies of a tensor, so that none is in L2 when it comes again."""
    tensors = [torch.randn(shape, device=DEVICE, dtype=BF16) * 0.02 for _ in range(copies)]
    while True:
        yield from tensors


def small_kernels() -> Iterator[Shape]:
    """Norm with residual, gated activation, rotation, cache write: compiled into one kernel each, as engines have them."""

    def norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        wide = total.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16) * weight, total

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    made_norm, made_gated, made_rotate = (torch.compile(one, dynamic=True) for one in (norm, gated, rotate))
    for tokens in (1, 8, 64, 256, 1024, 8192):
        for hidden in (2880, 5120, 8192):
            x, y = (torch.randn(tokens, hidden, device=DEVICE, dtype=BF16) for _ in range(2))
            weight = torch.ones(hidden, device=DEVICE, dtype=BF16)
            yield (
                "norm",
                {"tokens": tokens, "hidden": hidden},
                lambda x=x, y=y, weight=weight: graph_us(lambda: made_norm(x, y, weight)),
            )
        wide = torch.randn(tokens, 2 * 12800, device=DEVICE, dtype=BF16)
        yield "gated", {"tokens": tokens, "width": 12800}, lambda wide=wide: graph_us(lambda: made_gated(wide))
        heads = torch.randn(tokens, 40, 128, device=DEVICE, dtype=BF16)
        turn = torch.randn(tokens, 1, 64, device=DEVICE, dtype=BF16)
        yield (
            "rotate",
            {"tokens": tokens, "heads": 40},
            lambda heads=heads, turn=turn: graph_us(lambda: made_rotate(heads, turn, turn)),
        )
        cache = torch.zeros(1 << 16, 2 * 8 * 128, device=DEVICE, dtype=BF16)
        fresh = torch.randn(tokens, 2 * 8 * 128, device=DEVICE, dtype=BF16)
        slots = torch.randperm(1 << 16, device=DEVICE)[:tokens]
        yield (
            "cache_write",
            {"tokens": tokens},
            lambda cache=cache, fresh=fresh, slots=slots: graph_us(lambda: cache.index_copy_(0, slots, fresh)),
        )


def sampling() -> Iterator[Shape]:
    """Greedy and random sampling from 16-bit logits."""
    for vocabulary in (128256, 151936, 201088):
        for sequences in (1, 8, 32, 128, 256):
            logits = torch.randn(sequences, vocabulary, device=DEVICE, dtype=BF16)

            def greedy(logits: torch.Tensor = logits) -> Any:
                return logits.float().argmax(-1)

            def drawn(logits: torch.Tensor = logits) -> Any:
                chances = torch.softmax(logits.float() / 0.8, -1)
                return (chances / torch.empty_like(chances).exponential_()).argmax(-1)

            size = {"vocabulary": vocabulary, "sequences": sequences}
            yield "greedy", size, lambda call=greedy: graph_us(call, 5)
            yield "drawn", size, lambda call=drawn: graph_us(call, 5)


def routing() -> Iterator[Shape]:
    """Choice of experts and permutation of tokens, apart from the grouped products."""
    for experts, chosen, hidden in ((128, 4, 2880), (128, 8, 4096), (256, 8, 7168)):
        for tokens in (1, 8, 32, 128, 512, 2048, 8192):
            x = torch.randn(tokens, hidden, device=DEVICE, dtype=BF16)
            scores = torch.randn(tokens, experts, device=DEVICE, dtype=BF16)

            def choose(scores: torch.Tensor = scores, chosen: int = chosen) -> Any:
                return torch.topk(torch.softmax(scores.float(), -1), chosen, -1)

            ids = choose()[1]

            def permute(ids: torch.Tensor = ids, x: torch.Tensor = x, chosen: int = chosen) -> Any:
                order = torch.argsort(ids.flatten())
                return x[order // chosen]

            size = {"experts": experts, "chosen": chosen, "hidden": hidden, "tokens": tokens}
            yield "choose", size, lambda call=choose: graph_us(call)
            yield "permute", size, lambda call=permute: graph_us(call)


def grouped() -> Iterator[Shape]:
    """Grouped products of uniformly chosen experts, weights in 16 bits, larger than L2."""
    if not hasattr(torch, "_grouped_mm"):
        return
    for experts, chosen, hidden, inner in ((128, 4, 2880, 2880), (128, 8, 4096, 1536), (64, 8, 7168, 2048)):
        weights = torch.randn(experts, hidden, 2 * inner, device=DEVICE, dtype=BF16) * 0.02
        for tokens in (1, 4, 16, 64, 256, 1024, 4096):
            ids = torch.stack([torch.randperm(experts, device=DEVICE)[:chosen] for _ in range(tokens)])
            counts = torch.bincount(ids.flatten(), minlength=experts)
            ends = counts.cumsum(0).to(torch.int32)
            x = torch.randn(tokens * chosen, hidden, device=DEVICE, dtype=BF16)
            size = {
                "experts": experts,
                "chosen": chosen,
                "hidden": hidden,
                "inner": inner,
                "tokens": tokens,
                "called": int((counts > 0).sum()),
            }
            yield (
                "grouped",
                size,
                lambda x=x, weights=weights, ends=ends: graph_us(lambda: torch._grouped_mm(x, weights, offs=ends), 5),
            )
        del weights
        torch.cuda.empty_cache()


def products() -> Iterator[Shape]:
    """Matrix products of a layer of Qwen3-14B and of half a Qwen3-32B, alone and chained."""
    for name, shapes in {
        "qwen3-14b": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
        "qwen3-32b-tp2": ((5120, 5120), (5120, 4096), (25600, 5120), (5120, 12800)),
    }.items():
        pools = [rotating(shape, 8) for shape in shapes]
        for tokens in (1, 8, 64, 128, 256, 512, 2048, 8192):
            inputs = [torch.randn(tokens, shape[1], device=DEVICE, dtype=BF16) for shape in shapes]
            for (n, k), pool, x in zip(shapes, pools, inputs, strict=True):
                yield (
                    "product",
                    {"model": name, "tokens": tokens, "n": n, "k": k},
                    lambda pool=pool, x=x: graph_us(lambda: F.linear(x, next(pool)), 8),
                )

            def layer(inputs: list[torch.Tensor] = inputs, pools: list[Iterator[torch.Tensor]] = pools) -> None:
                for x, pool in zip(inputs, pools, strict=True):
                    F.linear(x, next(pool))

            yield "layer", {"model": name, "tokens": tokens}, lambda call=layer: graph_us(call, 8)
        del pools
        torch.cuda.empty_cache()


def attention() -> Iterator[Shape]:
    """Prompts after cached tokens, at lengths that aren't round (PyTorch's own flash kernel, causal to the end)."""
    from torch.nn.attention.bias import causal_lower_right

    for heads, stored in ((40, 8), (64, 8)):
        for new, past in ((37, 0), (100, 900), (100, 9000), (500, 3500), (1000, 0), (1000, 7000), (2048, 30000)):
            query = torch.randn(1, heads, new, 128, device=DEVICE, dtype=BF16)
            keys, values = (torch.randn(1, stored, new + past, 128, device=DEVICE, dtype=BF16) for _ in range(2))
            keys, values = (one.repeat_interleave(heads // stored, 1) for one in (keys, values))
            mask = causal_lower_right(new, new + past)

            def attend(
                query: torch.Tensor = query, keys: torch.Tensor = keys, values: torch.Tensor = values, mask: Any = mask
            ) -> Any:
                return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

            yield (
                "prompt_attention",
                {"heads": heads, "stored": stored, "new": new, "past": past},
                lambda call=attend: graph_us(call, 5),
            )


def launches() -> Iterator[Shape]:
    """Host time of launching kernels one by one, and of replaying a graph of as many."""
    x = torch.randn(16, 512, device=DEVICE, dtype=BF16)
    weight = torch.randn(512, 512, device=DEVICE, dtype=BF16)
    yield "launch", {"of": "product"}, lambda: eager_us(lambda: F.linear(x, weight))
    yield "launch", {"of": "addition"}, lambda: eager_us(lambda: x + x)
    for kernels in (100, 500, 1000):
        yield "graph_chain", {"kernels": kernels}, lambda kernels=kernels: graph_us(lambda: x.add_(1), kernels, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0)
    asked = parser.parse_args()
    began = time.monotonic()
    folder = Path(os.environ.get("OUT", "."))
    with (folder / "kernels.jsonl").open("w") as out:

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        write({"kind": "device", "name": torch.cuda.get_device_name(), "torch": torch.__version__})
        for part in (launches, products, grouped, routing, small_kernels, sampling, attention):
            try:
                for kind, size, measure in part():
                    if time.monotonic() - began > asked.seconds:
                        write({"kind": "stopped", "in": part.__name__})
                        return
                    try:
                        write({"kind": kind, **size, "us": round(measure(), 2)})
                    except Exception as problem:  # one shape that can't be captured doesn't end the rest
                        torch.cuda.synchronize()
                        write({"kind": "failed", "of": kind, **size, "why": str(problem).splitlines()[0][:120]})
            except Exception as problem:
                write({"kind": "failed", "of": part.__name__, "why": str(problem).splitlines()[0][:120]})
            print(f"{part.__name__} done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
