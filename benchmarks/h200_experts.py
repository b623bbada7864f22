"""A layer of MXFP4 experts as vLLM and SGLang run it on Hopper (OpenAI's triton_kernels), timed inside CUDA graphs.

Public operator tables time that layer on an H200 nearly as slow as on an H100, whose memory has 70 % of the bandwidth. This
measures gpt-oss-120b's layer, choice of experts included, by tokens, tensor ranks and how evenly experts are called.

    python benchmarks/h200_experts.py --packages build/triton_kernels    # needs torch, a GPU and that package; writes $OUT

``triton_kernels`` is a folder of triton's repository (python/triton_kernels, of the release that is installed) and no part of
this one. One JSON line a shape: ``ranks``, ``tokens``, ``law``, ``called`` (experts that any token calls), ``us``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from h200_kernels import BF16, DEVICE, graph_us

EXPERTS, CHOSEN, HIDDEN, INNER = 128, 4, 2880, 2880
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
LAWS = {"even": 0.0, "skewed": 1.0}
"""Standard deviation of experts' own scores, where those of tokens have 1."""
WARPS = 8
"""Of a block, for which engines lay out the scales."""


def quantised(shape: tuple[int, ...], kernels: Any) -> tuple[Any, Any]:
    """Random weights in MXFP4, laid out for Hopper, with their scales."""
    parts = [
        kernels.downcast_to_mxfp(torch.randn((8, *shape[1:]), device=DEVICE, dtype=BF16), torch.uint8, axis=1)
        for _ in range(shape[0] // 8)
    ]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    # Of concatenated experts the first axis after them must be the dense one, as the quantiser leaves it.
    values = values.transpose(-1, -2).contiguous().transpose(-1, -2)
    scales = scales.transpose(-1, -2).contiguous().transpose(-1, -2)
    layout, options = kernels.layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    made = kernels.convert_layout(kernels.wrap_torch_tensor(values, dtype=kernels.FP4), layout, **options)
    layout, options = kernels.layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=WARPS)
    return made, kernels.convert_layout(kernels.wrap_torch_tensor(scales), layout, **options)


def layer(ranks: int, kernels: Any) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """One rank's part of the layer: from activations and scores of experts to activations."""
    inner = (INNER // ranks + 63) // 64 * 64
    up, up_scale = quantised((EXPERTS, HIDDEN, 2 * inner), kernels)
    down, down_scale = quantised((EXPERTS, inner, HIDDEN), kernels)
    up_bias = torch.zeros(EXPERTS, 2 * inner, device=DEVICE)
    down_bias = torch.zeros(EXPERTS, HIDDEN, device=DEVICE)
    first = kernels.PrecisionConfig(flex_ctx=kernels.FlexCtx(), weight_scale=up_scale)
    second = kernels.PrecisionConfig(flex_ctx=kernels.FlexCtx(), weight_scale=down_scale)
    gate = kernels.FnSpecs("swiglu", kernels.swiglu_fn, ("alpha", "limit"), reduction_n=2)
    act = kernels.FusedActivation(gate, (1.702, 7.0))

    def run(x: torch.Tensor, scores: torch.Tensor) -> Any:
        chosen = kernels.topk(scores, CHOSEN, apply_softmax=True)
        there, back = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        ragged = kernels.make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, there.shape[0])
        weights = chosen.vals.flatten()[back]
        routed = kernels.RoutingData(weights, ragged.slice_sizes, EXPERTS, CHOSEN, ragged)
        gather, scatter = kernels.GatherIndx(back, there), kernels.ScatterIndx(there, back)
        wide = kernels.matmul_ogs(
            x, up, up_bias, routed, gather_indx=gather, precision_config=first, fused_activation=act
        )
        return kernels.matmul_ogs(
            wide, down, down_bias, routed, scatter_indx=scatter, precision_config=second, gammas=weights
        )

    return run


class Kernels:
    """Names of ``triton_kernels`` that are used here."""

    def __init__(self) -> None:
        from triton_kernels import matmul_ogs, swiglu, tensor, topk
        from triton_kernels.matmul_ogs_details import opt_flags
        from triton_kernels.numerics_details.mxfp import downcast_to_mxfp
        from triton_kernels.tensor_details import layout

        self.downcast_to_mxfp, self.layout, self.topk = downcast_to_mxfp, layout, topk.topk
        self.swiglu_fn = swiglu.swiglu_fn
        for name in ("matmul_ogs", "PrecisionConfig", "FlexCtx", "FnSpecs", "FusedActivation"):
            setattr(self, name, getattr(matmul_ogs, name))
        for name in ("RoutingData", "GatherIndx", "ScatterIndx"):
            setattr(self, name, getattr(matmul_ogs, name))
        for name in ("convert_layout", "wrap_torch_tensor", "FP4", "make_ragged_tensor_metadata"):
            setattr(self, name, getattr(tensor, name))
        opt_flags.update_opt_flags_constraints({"split_k": 1})  # as engines do on Hopper


def shapes(kernels: Any) -> Iterator[dict[str, Any]]:
    """All shapes, with their times."""
    for ranks in (1, 2, 4, 8):
        run = layer(ranks, kernels)
        for law, spread in LAWS.items():
            own = torch.randn(EXPERTS, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) * spread
            for tokens in TOKENS:
                x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=BF16)
                scores = (torch.randn(tokens, EXPERTS, device=DEVICE) + own).to(BF16)
                called = int(torch.topk(scores.float(), CHOSEN, -1)[1].unique().numel())
                us = graph_us(partial(run, x, scores), 6, 15)
                yield {"ranks": ranks, "law": law, "tokens": tokens, "called": called, "us": round(us, 1)}
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default="", help="folder that has triton_kernels")
    asked = parser.parse_args()
    if asked.packages:
        sys.path.insert(0, str(Path(asked.packages).resolve()))
    began = time.monotonic()
    with (Path(os.environ.get("OUT", ".")) / "experts.jsonl").open("w") as out:
        out.write(
            json.dumps({"kind": "device", "name": torch.cuda.get_device_name(), "torch": torch.__version__}) + "\n"
        )
        for row in shapes(Kernels()):
            print(row, f"{time.monotonic() - began:.0f} s", flush=True)
            out.write(json.dumps({"kind": "experts", **row}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
