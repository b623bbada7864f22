"""Fit the few constants of each kernel to public operator tables: makes ``src/kvyard/engine/timing/kernels.json``.

    pip install aiconfigurator-core==0.12.0
    python scripts/distil_kernels.py            # prints the error of every fit, about two minutes
    python scripts/distil_kernels.py --write

The tables are those of aiconfigurator-core (Copyright NVIDIA, Apache-2.0): kernels of vLLM, SGLang and TensorRT-LLM, timed
alone on each card. The forms are in ``kvyard/engine/timing/kernels.py``. Left out are:

- rows that timed the host and not the card: block-scaled FP8 products (60 to 90 µs whatever their size, three times the same
  product with one scale), and FP8 experts of FlashInfer without tuning (five times their Triton kernels);
- MXFP4 experts of SGLang's own Triton kernel, which widens the weights to bf16: SGLang takes it for LoRA and expert
  parallelism, and otherwise OpenAI's kernels, as vLLM does;
- experts without a gate, which have two matrices and not three;
- TensorRT-LLM's NVFP4 products, which are untuned (twice as long for 7,168 deep as for 7,168 wide);
- on Blackwell its experts in CUTLASS and DeepGEMM: its recipes take its generated kernels, those that vLLM and SGLang call
  through FlashInfer.

Decode attention is fitted where the cache is larger than L2: in a model the other layers have pushed it out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from kvyard.engine.cards import CARDS, Card
from kvyard.engine.timing.aic import SYSTEMS

OUT = Path(__file__).resolve().parent.parent / "src/kvyard/engine/timing/kernels.json"
ENGINES = ("vllm", "sglang", "trtllm")
GEMM_TYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "int8_wo": "int8", "int4_wo": "int4"}
EXPERT_TYPES = {
    "bfloat16": "bf16",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
    "w4a16_mxfp4": "mxfp4",
    "int4_wo": "int4",
}
NARROWED = {"w4a8_mxfp4_mxfp8": "mxfp4"}
"""What SGLang and TensorRT-LLM multiply MXFP4 experts with where cards can, on Blackwell; vLLM does if it is told to."""
BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "mxfp4": 0.53125, "int8": 1.0, "int4": 0.53125}
NOT_SERVED = "situ_as_silu|compressedtensors|^sglang_fused_moe_triton$"
"""Kernels of MXFP4 experts that engines don't run for gpt-oss: of other checkpoints, stand-ins with another activation, and one
that keeps experts in bf16."""
UNSERVED = {("sglang", "int8_wo"), ("trtllm", "nvfp4")}
"""Products that engines don't serve such checkpoints with: torchao's, slower than in 16 bits at a batch of one, and untuned
ones."""
UNGATED = "nongated"
GENERATED_SYSTEMS = {SYSTEMS[card] for card in ("b200", "b300", "gb200", "gb300")}
"""Cards on which TensorRT-LLM's recipes take experts of its generated kernels,"""
NOT_GENERATED = "deepgemm|moe_torch_flow_cutlass"
"""and its other kernels there,"""
GENERATED_TYPES = ("fp8_block", "nvfp4")
"""for experts in these."""
QUANTISES_US = 3.0
"""Time that TensorRT-LLM's FP8 products take longer to launch than those in 16 bits at most: a small kernel that quantises
their inputs. Its tables have 9 to 12 µs, since there the host launches both; those of vLLM and SGLang have 2 to 3."""
SKEWED = "power_law_1.01"
"""The distribution of tokens over experts that the tables' own estimator takes for most models."""
L2_BYTES = {"a100": 40e6, "h100": 50e6, "h200": 50e6, "l4": 48e6, "l40s": 96e6, "rtxpro6000": 128e6}
EACH = (4.0, 16.0, 64.0, 256.0, 1024.0)
"""Pairs per expert at which it is fitted how many times its weights are read."""
MESSAGES = [1 << power for power in range(12, 30, 2)]
LEAST_ROWS, MOST_ROWS = 60, 4000
"""Of a table, for a fit; of a fit."""

Predict = Callable[[np.ndarray], np.ndarray]


def table(system: str, operator: str, engine: str, name: str, dtype: str = "") -> pd.DataFrame | None:
    """The newest table of one operator that has rows, of a ``dtype`` if one is given; ``None`` if there is none."""
    folder = Path(str(files("aiconfigurator_core"))) / "systems" / "data" / system / operator / engine
    paths = sorted(folder.glob(f"*/{name}_perf.parquet"), key=lambda path: _order(path.parent.name))
    for path in reversed(paths):
        rows = pd.read_parquet(path)
        if dtype:
            rows = rows[rows[f"{operator}_dtype"] == dtype]
        if "mxfp4" in dtype:
            rows = rows[~rows.kernel_source.astype(str).str.contains(NOT_SERVED)]
        if operator == "moe":
            rows = rows[~rows.kernel_source.astype(str).str.contains(UNGATED)]
            if engine == "trtllm" and dtype in GENERATED_TYPES and system in GENERATED_SYSTEMS:
                rows = rows[~rows.kernel_source.astype(str).str.contains(NOT_GENERATED)]
        on_one_rank = rows[rows.moe_ep_size == 1] if operator == "moe" else rows
        if len(on_one_rank) >= LEAST_ROWS:
            rows = rows[rows.latency > 0].copy()
            rows["us"] = rows.latency * 1e3
            if "window_size" not in rows:
                rows["window_size"] = 0
            return rows
    return None


def _order(version: str) -> tuple[int, ...]:
    digits = "".join(letter if letter.isdigit() else " " for letter in version)
    return tuple(map(int, digits.split()))


def sample(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sample(MOST_ROWS, random_state=0) if len(rows) > MOST_ROWS else rows


def fit(predict: Predict, us: np.ndarray, start: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Any:
    """Least squares of the logarithm, robust to outliers. Returns the constants and the median error."""
    fitted = least_squares(
        lambda log: np.log(predict(np.exp(log)) / us),
        np.log(start),
        bounds=(np.log(low), np.log(high)),
        loss="soft_l1",
        f_scale=0.1,
    )
    values = np.exp(fitted.x)
    errors = np.abs(predict(values) / us - 1)
    return values, float(np.median(errors))


def blend(memory: np.ndarray, arithmetic: np.ndarray, power: float) -> np.ndarray:
    return (memory**power + arithmetic**power) ** (1 / power)


def products(card: Card, rows: pd.DataFrame, dtype: str) -> tuple[dict[str, float], float, int]:
    rows = rows[(rows.n >= 512) & (rows.k >= 512) & (rows.n * rows.k >= 2**20) & (rows.n * rows.k <= 2**29)]
    # Half of the rows have a token more than a tile, in FP8 up to twice as slow. Engines pad small passes, and fill large ones.
    rows = sample(rows[(rows.m <= 16384) & ((rows.m <= 4) | (rows.m % 8 == 0))])
    m, n, k = (rows[name].to_numpy(float) for name in "mnk")
    weights = n * k * BYTES[dtype] / card.bandwidth * 1e6
    moved = (m * k * (6.0 if dtype in ("fp8", "fp4") else 2.0) + 2.0 * m * n) / card.bandwidth * 1e6
    work = 2.0 * m * n * k / card.rate(dtype) * 1e6

    def predict(of: np.ndarray) -> np.ndarray:
        return of[0] + blend(weights / of[1], work / of[2], of[3]) + moved / of[4]

    values, error = fit(
        predict, rows.us.to_numpy(), (4, 0.9, 0.7, 2.5, 0.8), (1, 0.2, 0.1, 1.0, 0.1), (40, 1.05, 1.1, 8.0, 5.0)
    )
    return _rounded(("launch_us", "mem", "arith", "blend", "move"), values), error, len(rows)


def experts(card: Card, rows: pd.DataFrame, dtype: str) -> tuple[dict[str, Any], float, int]:
    rows = rows[(rows.distribution == SKEWED) & (rows.topk > 1) & (rows.num_experts > 8)]
    rows = sample(rows[(rows.moe_ep_size <= 8) & (rows.moe_tp_size <= 8)])
    tokens, hidden, inner, top, count, slices, holders = (
        rows[name].to_numpy(float)
        for name in ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    )
    called = count / holders * (1 - (1 - top / count) ** tokens)
    pairs = tokens * top / holders
    size = 3 * hidden * inner / slices
    weights = called * size * BYTES[dtype] / card.bandwidth * 1e6
    moved = 4.0 * pairs * (hidden + inner / slices) / card.bandwidth * 1e6
    work = 2.0 * pairs * size / card.rate(dtype if dtype in ("fp8", "fp4") else "bf16") * 1e6
    apart = 1 - 1 / holders
    each = np.log2(tokens * top / count)
    knots = np.log2(EACH)

    def predict(of: np.ndarray) -> np.ndarray:
        reads = np.interp(each, knots, np.cumsum(of[3:]))
        return of[0] + weights * reads + work / of[1] + moved / of[2]

    # Experts on one rank first: how many pairs the busiest of several ranks has is another matter.
    us, alone = rows.us.to_numpy(), holders == 1
    values, error = fit(
        lambda of: np.where(alone, predict(of), us),
        us,
        (30, 0.5, 0.5, 1.0, *[0.05] * (len(EACH) - 1)),
        (5, 0.02, 0.1, 0.5, *[1e-4] * (len(EACH) - 1)),
        (200, 2.2, 10.0, 10.0, *[10.0] * (len(EACH) - 1)),
    )
    error = float(np.median(np.abs(predict(values)[alone] / us[alone] - 1)))

    def spread(of: np.ndarray) -> np.ndarray:
        return predict(values) + of[0] * apart * (work / values[1] + moved / values[2])

    imbalance, _ = fit(spread, us, (0.5,), (0.01,), (2.0,))
    constants: dict[str, Any] = _rounded(("launch_us", "arith", "move"), values) | _rounded(("imbalance",), imbalance)
    constants["reads"] = [float(f"{value:.3g}") for value in np.cumsum(values[3:])]
    return constants, error, len(rows)


def prompts(card: Card, rows: pd.DataFrame, width: int) -> tuple[dict[str, float], float, int]:
    rows = rows[(rows.head_dim == width) & (rows.window_size == 0) & (rows.kv_cache_dtype == "bfloat16")]
    if "attn_dtype" in rows:
        rows = rows[rows.attn_dtype == "bfloat16"]
    rows = sample(rows[(rows.num_heads >= 4) & (rows.isl >= 16) & (rows.isl * rows.batch_size <= 32768)])
    heads, new, batch = (rows[name].to_numpy(float) for name in ("num_heads", "isl", "batch_size"))
    pair_us = 4 * heads * width / card.rate("bf16") * 1e6

    def predict(of: np.ndarray) -> np.ndarray:
        return of[0] + batch * (0.5 * new * new + of[2] * new) * pair_us / of[1]

    values, error = fit(predict, rows.us.to_numpy(), (12, 0.6, 200), (2, 0.05, 0.1), (80, 1.1, 3000))
    return _rounded(("launch_us", "arith", "pad"), values), error, len(rows)


def decoding(card: Card, rows: pd.DataFrame, width: int, bytes_each: int = 2) -> tuple[dict[str, float], float, int]:
    stored = "bfloat16" if bytes_each == 2 else "fp8"
    rows = rows[(rows.head_dim == width) & (rows.window_size == 0) & (rows.kv_cache_dtype == stored)]
    rows = rows[(rows.num_key_value_heads <= rows.num_heads) & (rows.batch_size <= 1024)]
    rows = rows.assign(context=rows.step + 1, token_bytes=2.0 * bytes_each * width * rows.num_key_value_heads)
    return _decoding(card, rows, 0.0)


def latent(card: Card, rows: pd.DataFrame) -> tuple[dict[str, float], float, int]:
    """Decode steps of MLA: 576 numbers a token, read once for all heads, so that arithmetic may bound it."""
    rows = rows[(rows.kv_cache_dtype == "bfloat16") & (rows.batch_size <= 1024)]
    rows = rows.assign(context=rows.isl + rows.step, token_bytes=2.0 * 576)
    return _decoding(card, rows, 2.0 * (2 * 512 + 64))


def _decoding(card: Card, rows: pd.DataFrame, head_flops: float) -> tuple[dict[str, float], float, int]:
    read = rows.token_bytes * rows.batch_size * rows.context
    rows = sample(rows[((read > L2_BYTES.get(card.name, 126e6)) | (read < 2e5)) & (rows.context >= 64)])
    batch, context = rows.batch_size.to_numpy(float), rows.context.to_numpy(float)
    token_us = rows.token_bytes.to_numpy(float) / card.bandwidth * 1e6
    flops_us = rows.num_heads.to_numpy(float) * head_flops / card.rate("bf16") * 1e6

    def predict(of: np.ndarray) -> np.ndarray:
        return of[0] + batch * (context + of[2]) * np.maximum(token_us / of[1], flops_us / of[3])

    values, error = fit(predict, rows.us.to_numpy(), (12, 0.85, 60, 0.6), (2, 0.1, 0.1, 0.05), (80, 1.05, 1000, 1.1))
    names = ("launch_us", "mem", "pad", "arith")
    return _rounded(names, values if head_flops else values[:3]), error, len(rows)


def collectives(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Microseconds by bytes (``MESSAGES``), per number of ranks. Tables have messages in numbers of 16 bits."""
    curves = {}
    for ranks, group in rows.groupby("num_gpus"):
        curve = group.groupby("message_size").us.min().sort_index()
        sizes = np.log2(curve.index.to_numpy(float) * 2)
        us = np.minimum.accumulate(curve.to_numpy()[::-1])[::-1]  # a smaller message that took longer was disturbed
        curves[str(int(ranks))] = [
            round(float(2 ** np.interp(np.log2(size), sizes, np.log2(us))), 1) for size in MESSAGES
        ]
    return curves


def _rounded(names: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in zip(names, values, strict=False)}


def distil(card: Card, system: str) -> dict[str, Any]:
    """All constants of one card, by engine."""
    card_kernels: dict[str, Any] = {}

    def note(what: str, made: tuple[dict[str, float], float, int]) -> dict[str, float]:
        print(f"{card.name:10} {what:28} {made[2]:>5} rows, median error {made[1]:6.1%}  {made[0]}", flush=True)
        return made[0]

    for engine in ENGINES:
        kernels: dict[str, Any] = {}
        for part, types, make in (("products", GEMM_TYPES, products), ("experts", EXPERT_TYPES, experts)):
            operator = "gemm" if part == "products" else "moe"
            first = NARROWED if part == "experts" and engine != "vllm" else {}
            for theirs, ours in (first | types).items():
                if part == "products" and (engine, theirs) in UNSERVED:
                    continue
                rows = table(system, operator, engine, operator, theirs)
                if rows is not None and ours not in kernels.get(part, ()):
                    kernels.setdefault(part, {})[ours] = note(f"{engine} {part} {ours}", make(card, rows, ours))
        if engine == "trtllm" and "fp8" in kernels.get("products", ()):
            plain, quantised = kernels["products"]["bf16"], kernels["products"]["fp8"]
            quantised["launch_us"] = min(quantised["launch_us"], round(plain["launch_us"] + QUANTISES_US, 2))
        context = table(system, "attention", engine, "context_attention")
        steps = table(system, "attention", engine, "generation_attention")
        for name, rows, fit_width in (("prompts", context, prompts), ("decoding", steps, decoding)):
            if rows is not None:
                kernels[name] = {
                    str(width): note(f"{engine} {name} {width}", fit_width(card, rows, width))
                    for width in (64, 128, 256)
                    if ((rows.head_dim == width) & (rows.kv_cache_dtype == "bfloat16")).sum() > 200
                }
        if steps is not None and (steps.kv_cache_dtype == "fp8").sum() > LEAST_ROWS:
            for width in (64, 128):
                if ((steps.kv_cache_dtype == "fp8") & (steps.head_dim == width)).sum() > LEAST_ROWS:
                    made = note(f"{engine} decoding {width}, fp8", decoding(card, steps, width, 1))
                    kernels["decoding"][f"{width}-fp8"] = made
        compressed = table(system, "mla", engine, "generation_mla")
        if compressed is not None:
            kernels.setdefault("decoding", {})["mla"] = note(f"{engine} decoding mla", latent(card, compressed))
        reduce = table(system, "comm", engine, "custom_allreduce")
        if reduce is not None:
            if "backend" in reduce:
                reduce = reduce[~reduce.backend.astype(str).str.contains("eager")]
            kernels["all_reduce"] = collectives(reduce)
        if kernels:
            card_kernels[engine] = kernels
    nccl = table(system, "comm", "nccl", "nccl")
    if nccl is not None:
        nccl = nccl[nccl.nccl_dtype == "half"]
        for name in ("all_gather", "reduce_scatter"):
            rows = nccl[nccl.op_name == name]
            if len(rows):
                card_kernels[name] = collectives(rows)
    return card_kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help="one card")
    asked = parser.parse_args()
    cards = {name: distil(CARDS[name], system) for name, system in SYSTEMS.items() if asked.only in (None, name)}
    if asked.write:
        header = {
            "source": "aiconfigurator-core 0.12.0, operator tables; Copyright NVIDIA Corporation, Apache-2.0",
            "made_by": "scripts/distil_kernels.py",
            "messages": MESSAGES,
            "pairs_each": EACH,
        }
        OUT.write_text(json.dumps(header | {"cards": cards}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
