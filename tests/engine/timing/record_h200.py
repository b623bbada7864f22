"""Measures passes of a Llama-3-8B-shaped model on a GPU and writes the JSON lines that ``kvyard profile fit`` reads.

Run by hand on a machine with PyTorch and a GPU: ``python record_h200.py OUT.jsonl all repeat`` (or ``probe``, which compares
attention kernels). Random bf16 weights. One KV buffer serves all layers, so that contexts fit that would not otherwise. Each
pass is captured as a CUDA graph, so that launching from Python costs nothing. It recorded ``data/h200-graphs.jsonl`` on
2026-11-15 (NVIDIA H200, PyTorch 2.11, CUDA 13; medians of up to 20 runs). Not part of the test suite.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 32, 4096, 32, 8, 128, 14336, 128256
DEVICE = "cuda"


class Model:
    def __init__(self, attention: str) -> None:
        self.attention = attention
        new = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * 0.02  # noqa: E731
        self.layers = [
            (
                new(HIDDEN),
                new((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
                new(HIDDEN, HEADS * HEAD),
                new(HIDDEN),
                new(2 * MLP, HIDDEN),
                new(HIDDEN, MLP),
            )
            for _ in range(LAYERS)
        ]
        self.norm, self.head, self.embed = new(HIDDEN), new(VOCAB, HIDDEN), new(VOCAB, HIDDEN)
        angles = torch.outer(
            torch.arange(140_000, device=DEVICE).float(), 500000.0 ** (-torch.arange(0, 64, device=DEVICE) / 64)
        )
        self.cos, self.sin = torch.cos(angles).bfloat16(), torch.sin(angles).bfloat16()

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, tokens, prefills, decode):
        """``prefills`` are (new, past, keys, values); ``decode`` is (batch, ctx, keys, values) or None."""
        x = F.embedding(tokens, self.embed)
        positions = [torch.arange(past, past + new, device=DEVICE) for new, past, _, _ in prefills]
        if decode:
            positions.append(torch.full((decode[0],), decode[1] - 1, device=DEVICE))
        at = positions[0] if len(positions) == 1 else torch.cat(positions)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        for n1, qkv, out, n2, up, down in self.layers:
            h = F.rms_norm(x, (HIDDEN,), n1)
            q, k, v = F.linear(h, qkv).view(-1, HEADS + 2 * KV_HEADS, HEAD).split((HEADS, KV_HEADS, KV_HEADS), 1)
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            parts, start = [], 0
            for new, past, keys, values in prefills:
                parts.append(
                    self.prefill(
                        q[start : start + new], k[start : start + new], v[start : start + new], past, keys, values
                    )
                )
                start += new
            if decode:
                batch, ctx, keys, values = decode
                keys[:batch, :, ctx - 1] = k[start:]
                values[:batch, :, ctx - 1] = v[start:]
                got = F.scaled_dot_product_attention(
                    q[start:].unsqueeze(2), keys[:batch, :, :ctx], values[:batch, :, :ctx], enable_gqa=True
                )
                parts.append(got.reshape(batch, -1))
            a = parts[0] if len(parts) == 1 else torch.cat(parts)
            x = x + F.linear(a, out)
            g, u = F.linear(F.rms_norm(x, (HIDDEN,), n2), up).chunk(2, -1)
            x = x + F.linear(F.silu(g) * u, down)
        ends, start = [], 0
        for new, *_ in prefills:
            start += new
            ends.append(start - 1)
        last = torch.cat([x[e : e + 1] for e in ends] + [x[start:]])
        return F.linear(F.rms_norm(last, (HIDDEN,), self.norm), self.head).argmax(-1)

    def prefill(self, q, k, v, past, keys, values):
        new = len(q)
        keys[:, past : past + new] = k.transpose(0, 1)
        values[:, past : past + new] = v.transpose(0, 1)
        q = q.transpose(0, 1)[None]
        if not past:
            got = F.scaled_dot_product_attention(
                q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
            )
            return got[0].transpose(0, 1).reshape(new, -1)
        allk, allv = keys[None, :, : past + new], values[None, :, : past + new]
        if self.attention == "repeat":
            allk, allv = allk.repeat_interleave(4, 1), allv.repeat_interleave(4, 1)
            got = F.scaled_dot_product_attention(q, allk, allv, attn_mask=causal_lower_right(new, past + new))
        elif self.attention == "expand":
            allk = allk[:, :, None].expand(1, KV_HEADS, 4, past + new, HEAD).reshape(1, HEADS, past + new, HEAD)
            allv = allv[:, :, None].expand(1, KV_HEADS, 4, past + new, HEAD).reshape(1, HEADS, past + new, HEAD)
            got = F.scaled_dot_product_attention(q, allk, allv, attn_mask=causal_lower_right(new, past + new))
        elif self.attention == "gqa":
            got = F.scaled_dot_product_attention(
                q, allk, allv, attn_mask=causal_lower_right(new, past + new), enable_gqa=True
            )
        elif self.attention == "flash":
            got = torch.ops.aten._scaled_dot_product_flash_attention(q, allk, allv, 0.0, True)[0]
        else:
            mask = torch.ones(new, past + new, dtype=torch.bool, device=DEVICE).tril(past)
            got = F.scaled_dot_product_attention(q, allk, allv, attn_mask=mask, enable_gqa=True)
        return got[0].transpose(0, 1).reshape(new, -1)


def timed(work, budget: float = 1.5, most: int = 20) -> float:
    """Median milliseconds by device events."""
    work()
    torch.cuda.synchronize()
    times, begun = [], time.monotonic()
    while len(times) < 3 or (len(times) < most and time.monotonic() - begun < budget):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        work()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


def graphed(work) -> float:
    """Return the device's time of a captured graph, without the time to launch from Python."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return timed(graph.replay)


def buffers(*shape: int):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16), torch.randn(
        *shape, device=DEVICE, dtype=torch.bfloat16
    )


@torch.inference_mode()
def main(path: str, what: str) -> None:
    out = open(path, "w")  # noqa: SIM115

    def write(**row) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()
        print(json.dumps(row), flush=True)

    write(kind="device", name=torch.cuda.get_device_name(), torch=torch.__version__)
    model = Model("gqa")
    keys, values = buffers(KV_HEADS, 70_000, HEAD)

    def prefill(new: int, past: int) -> float:
        tokens = torch.randint(VOCAB, (new,), device=DEVICE)
        return graphed(lambda: model.forward(tokens, [(new, past, keys, values)], None))

    def decode(batch: int, ctx: int) -> float:
        tokens = torch.randint(VOCAB, (batch,), device=DEVICE)
        cache = (batch, ctx, *buffers(batch, KV_HEADS, ctx, HEAD))
        return graphed(lambda: model.forward(tokens, [], cache))

    def mixed(prefills, batch: int, ctx: int) -> float:
        tokens = torch.randint(VOCAB, (sum(new for new, _ in prefills) + batch,), device=DEVICE)
        cache = (batch, ctx, *buffers(batch, KV_HEADS, ctx, HEAD)) if batch else None
        return graphed(lambda: model.forward(tokens, [(n, p, keys, values) for n, p in prefills], cache))

    prefill(16, 0)
    if what == "probe":
        for attention in ("gqa", "repeat", "expand", "flash", "mask"):
            model.attention = attention
            for new, past in (
                (64, 2048),
                (64, 8192),
                (128, 8192),
                (256, 8192),
                (1024, 8192),
                (64, 32768),
                (1024, 32768),
                (4096, 2048),
            ):
                try:
                    write(kind="prefill", attention=attention, new=new, past=past, ms=prefill(new, past))
                except Exception as error:
                    print(attention, new, past, repr(error)[:300])
        for new in (16, 128, 512, 1024, 4096, 16384):
            write(kind="prefill", new=new, past=0, ms=prefill(new, 0))
        for batch, ctx in ((1, 256), (128, 1024), (32, 4096), (512, 256)):
            write(kind="decode", batch=batch, ctx=ctx, ms=decode(batch, ctx))
    else:
        model.attention = sys.argv[3]
        sizes = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
        for past in (0, 2048, 8192, 32768):
            for new in sizes:
                write(kind="prefill", new=new, past=past, ms=prefill(new, past))
        for ctx in (256, 1024, 4096, 16384, 65536):
            for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                if batch * ctx <= 2**22:
                    write(kind="decode", batch=batch, ctx=ctx, ms=decode(batch, ctx))
        for prefills in ([(64, 0)], [(256, 0)], [(512, 0)], [(2048, 0)], [(512, 8192)], [(2048, 8192)], [(8192, 0)]):
            for batch, ctx in ((1, 1024), (8, 4096), (32, 4096), (128, 1024), (64, 16384), (256, 4096)):
                write(kind="mixed", prefills=prefills, batch=batch, ctx=ctx, ms=mixed(prefills, batch, ctx))
        for prefills in ([(128, 0)] * 4, [(512, 0)] * 4, [(1024, 0), (256, 2048)], [(256, 8192)] * 2):
            write(kind="mixed", prefills=prefills, batch=0, ctx=0, ms=mixed(prefills, 0, 0))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
