"""Kernels: the few constants by which each kind of kernel falls short of its card, per card and engine.

``kernels.json`` beside this file is fitted to operator tables of aiconfigurator-core (Apache-2.0) by
``scripts/distil_kernels.py``. Shares are of the peaks in ``kvyard.engine.cards``. It knows neither models nor passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import log2
from typing import TypeVar

import msgspec

from kvyard.engine.cards import Card, Shares


class ProductKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix product: weights are read while arithmetic runs, activations come on top."""

    launch_us: float
    mem: float
    """Share of the memory's bandwidth, reading weights."""
    arith: float
    """Share of the arithmetic."""
    blend: float
    """Power of the norm that joins both: 1 if they add up, more the better one hides the other."""
    move: float
    """Share of the memory's bandwidth, for activations; above 1 they stay in L2."""

    def us(self, weights: float, work: float, moved: float) -> float:
        """Microseconds by those at the card's peaks."""
        memory, arithmetic, power = weights / self.mem, work / self.arith, self.blend
        joined: float = (memory**power + arithmetic**power) ** (1.0 / power)
        return self.launch_us + joined + moved / self.move


class ExpertKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of experts: routing, permutation, both grouped products."""

    launch_us: float
    """Launch time of all its kernels, routing and permutation included."""
    arith: float
    move: float
    """Share of the memory's bandwidth, for activations of pairs."""
    imbalance: float
    """Over many ranks the busiest has 1 + this many times the mean of pairs."""
    reads: tuple[float, ...]
    """By pairs per expert (``PAIRS_EACH``): times of reading the weights once at the peak. Every tile of tokens reads them."""

    def us(self, weights: float, work: float, moved: float, each: float, ranks: int) -> float:
        """Microseconds on the busiest of ``ranks`` that hold whole experts, by those of the mean rank at the card's peaks, for
        ``each`` pairs per expert.
        """
        busiest = 1.0 + self.imbalance * (1.0 - 1.0 / ranks)
        return self.launch_us + weights * self._reads(each) + busiest * (work / self.arith + moved / self.move)

    def _reads(self, each: float) -> float:
        at = (log2(each) - log2(PAIRS_EACH[0])) / 2.0 if each > PAIRS_EACH[0] else 0.0
        low = min(int(at), len(self.reads) - 2)
        return self.reads[low] + min(at - low, 1.0) * (self.reads[low + 1] - self.reads[low])


PAIRS_EACH = (4.0, 16.0, 64.0, 256.0, 1024.0)
"""Knots of ``ExpertKernel.reads``, by fours."""


class PromptKernel(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of prompts."""

    launch_us: float
    arith: float
    pad: float
    """Tokens of context that every new token costs more: tiles on the diagonal, queries and outputs."""


class DecodeKernel(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of decode steps, with the kernel that puts pieces of a context together."""

    launch_us: float
    mem: float
    pad: float
    """Tokens of context that every request costs more."""
    arith: float = 0.6
    """Share of the arithmetic, which bounds MLA alone."""


class EngineKernels(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one engine on one card: products and experts by dtype, attention by head dimension."""

    products: dict[str, ProductKernel] = {}
    experts: dict[str, ExpertKernel] = {}
    prompts: dict[str, PromptKernel] = {}
    decoding: dict[str, DecodeKernel] = {}
    all_reduce: dict[str, tuple[float, ...]] = {}


class _CardKernels(msgspec.Struct, frozen=True, kw_only=True):
    vllm: EngineKernels = EngineKernels()
    sglang: EngineKernels = EngineKernels()
    trtllm: EngineKernels = EngineKernels()
    all_gather: dict[str, tuple[float, ...]] = {}
    reduce_scatter: dict[str, tuple[float, ...]] = {}


class _Distilled(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    made_by: str
    messages: tuple[int, ...]
    pairs_each: tuple[float, ...]
    cards: dict[str, _CardKernels]


SUSTAINED = 0.82
"""Share of a product's arithmetic alone that is left in a whole model, where the card runs at its power limit: 0.82 in prompts
of a whole model on an H200, 0.85 in chains of products there (benchmarks/data/h200-kernels.jsonl)."""
UNLIMITED = 0.5
"""Share of the peak up to which arithmetic doesn't bring a card to that limit: attention with narrow heads, and experts whose
weights are widened first, which compute at 40 % of the peak."""
STAND_INS = {"rtx4090": "l40s", "l4": "l40s", "mi300x": "h100", "h20": "h100"}
"""Cards without tables, and the one whose constants they have instead."""
WIDENED = {"fp8": "int8", "fp4": "int4", "mxfp4": "int4"}
"""By stored type of weights: the constants that stand in on a card without that arithmetic, if they are widened first."""
OTHERS = ("vllm", "trtllm", "sglang")
"""Engines in whose tables one looks for what another's lack."""


@cache
def _distilled() -> _Distilled:
    text = files("kvyard.engine.timing").joinpath("kernels.json").read_bytes()
    return msgspec.json.decode(text, type=_Distilled)


class Kernels:
    """Kernels of one engine on one card. What its tables lack comes from another engine's there, then from an H100's and an
    A100's, the only one with products of narrow integers.
    """

    def __init__(self, card: Card, engine: str = "vllm", shares: Shares | None = None) -> None:
        distilled = _distilled()
        name = STAND_INS.get(card.name, card.name)
        measured = [
            distilled.cards[known] for known in dict.fromkeys((name, "h100", "a100")) if known in distilled.cards
        ]
        engines = dict.fromkeys((engine if engine in OTHERS else "vllm", *OTHERS))
        self._tables: list[EngineKernels] = [getattr(kernels, name) for kernels in measured for name in engines]
        self._measured = measured
        self._products: dict[str, ProductKernel] = {}
        self._messages = distilled.messages
        self._card = card
        self._shares = shares or (card.shares if card.name in STAND_INS else None)

    def product(self, dtype: str) -> ProductKernel:
        """Products of weights stored in ``dtype``."""
        known = self._products.get(dtype)
        if known is None:
            known = self._products[dtype] = self._product(dtype)
        return known

    def _product(self, dtype: str) -> ProductKernel:
        key, own = self._multiplied(dtype), [table.products for table in self._tables[: len(OTHERS)]]
        kernel = _first([table.products for table in self._tables], key)
        if not any(key in table for table in own) and (
            plain := next((table["bf16"] for table in own if "bf16" in table), None)
        ):
            # Of another card, whose kernels take longer to start: no longer than half as long again as this one's.
            kernel = msgspec.structs.replace(kernel, launch_us=min(kernel.launch_us, 1.5 * plain.launch_us))
        mem, arith = kernel.mem, kernel.arith * SUSTAINED
        if self._shares is not None:
            mem, arith = self._shares.mem, self._shares.arith
        return msgspec.structs.replace(kernel, mem=mem, arith=arith)

    def experts(self, dtype: str) -> ExpertKernel:
        """Layers of experts whose weights are stored in ``dtype``."""
        key = dtype if dtype == "mxfp4" else self._multiplied(dtype)
        key = "int4" if key == "int8" else key  # of integers there are experts in 4 bits alone
        kernel = _first([table.experts for table in self._tables], key)
        return kernel if key in ("mxfp4", "int4") else msgspec.structs.replace(kernel, arith=kernel.arith * SUSTAINED)

    def prompts(self, width: int) -> PromptKernel:
        """Attention of prompts with heads of ``width``."""
        kernel = _first([table.prompts for table in self._tables], _width(width))
        arith = max(kernel.arith * SUSTAINED, min(kernel.arith, UNLIMITED))
        if self._shares is not None:
            arith = self._shares.prefill_arith
        return msgspec.structs.replace(kernel, arith=arith)

    def decoding(self, width: int, cache_bytes: int = 2, latent: bool = False) -> DecodeKernel:
        """Attention of decode steps with heads of ``width``, over a cache of ``cache_bytes`` a number; or MLA's."""
        key = "mla" if latent else _width(width)
        tables = [table.decoding for table in self._tables]
        if cache_bytes == 1 and not latent and any(f"{key}-fp8" in table for table in tables):
            key += "-fp8"
        kernel = _first(tables, key)
        return kernel if self._shares is None else msgspec.structs.replace(kernel, mem=self._shares.decode_mem)

    def all_reduce(self, ranks: int, message: float) -> float:
        """Microseconds of an all-reduce of ``message`` bytes over ``ranks``."""
        return self._collective([table.all_reduce for table in self._tables], ranks, message, 2.0 * (ranks - 1) / ranks)

    def gather(self, ranks: int, message: float) -> float:
        """Microseconds until each of ``ranks`` has all of ``message`` bytes, of which it had its share."""
        return self._collective([kernels.all_gather for kernels in self._measured], ranks, message, (ranks - 1) / ranks)

    def scatter(self, ranks: int, message: float) -> float:
        """Microseconds until each of ``ranks`` has the sum of its share of ``message`` bytes."""
        return self._collective(
            [kernels.reduce_scatter for kernels in self._measured], ranks, message, (ranks - 1) / ranks
        )

    def _multiplied(self, dtype: str) -> str:
        if dtype in ("fp8", "fp4", "mxfp4") and dtype not in self._card.flops:
            return WIDENED[dtype]
        return dtype

    def _collective(
        self, curves: Sequence[Mapping[str, tuple[float, ...]]], ranks: int, message: float, travels: float
    ) -> float:
        """By the curve of as many ranks, or of the most below; beyond them each doubling adds a latency."""
        if self._card.name in STAND_INS or not curves or not curves[0]:
            return self._card.peer_latency_us + message * travels / self._card.peer_bandwidth * 1e6
        known = sorted(map(int, curves[0]))
        nearest = max((size for size in known if size <= ranks), default=known[0])
        us = _interpolated(self._messages, curves[0][str(nearest)], message)
        return us if ranks <= nearest else us + curves[0][str(nearest)][0] * (ranks / nearest - 1.0)


_Kernel = TypeVar("_Kernel")


def _first(tables: Sequence[Mapping[str, _Kernel]], key: str) -> _Kernel:
    """The kernel called ``key`` of the first table that has one; an H100's and an A100's, at the end, have all together."""
    return next(table[key] for table in tables if key in table)


def _interpolated(points: Sequence[int], us: Sequence[float], x: float) -> float:
    """Linear between points, flat before the first, in proportion beyond the last."""
    if x <= points[0]:
        return us[0]
    if x >= points[-1]:
        return us[-1] * x / points[-1]
    low = bisect_right(points, x) - 1
    return us[low] + (x - points[low]) / (points[low + 1] - points[low]) * (us[low + 1] - us[low])


def _width(width: int) -> str:
    """The measured head dimension nearest to ``width``."""
    return str(min((64, 128, 256), key=lambda one: abs(one - width)))
