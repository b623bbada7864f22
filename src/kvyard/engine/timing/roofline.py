"""``roofline``: a pass on a card without measurements, from the card's data sheet and the model's config.

Every operator is bound by the memory it reads or by its arithmetic, each at the share of the peak that kernels reach; between
the two they blend. Small kernels and collectives cost at least their launch. Two measured numbers, the time of a prompt and of
one decode step, scale what is left (``calibrate``). What the formula leaves out: kernels that fall off at odd shapes, and
transfers of a pipeline that overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar

import numpy as np

from kvyard.engine.cards import Card, Shares
from kvyard.engine.timing.model import SHORT, Durations, Times, contexts, scaled, scaled_many
from kvyard.engine.timing.operators import Operators

GEMM_US = 3.5
"""What a matrix product takes besides its work."""
KERNEL_US = 2.5
"""What any other kernel takes at least."""
HOST_US = 500.0
"""Host work of a pass that the card waits for."""
GRAPH_TOKENS = 512
"""Up to here passes run as CUDA graphs of fixed sizes."""


def padded(tokens: int) -> int:
    """The size of the CUDA graph that ``tokens`` run in: 1, 2, 4, then multiples of 8."""
    if tokens > GRAPH_TOKENS or tokens <= 2:
        return tokens
    return 4 if tokens <= 4 else (tokens + 7) // 8 * 8


class RooflineModel:
    """Durations of passes. ``prefill`` and ``decode`` scale what prompts and decode steps take beyond the host's part."""

    needs_longest: ClassVar[bool] = False

    def __init__(
        self,
        of: Operators,
        card: Card,
        shares: Shares | None = None,
        *,
        host_us: float = HOST_US,
        prefill: float = 1.0,
        decode: float = 1.0,
        speedup: float = 1.0,
        decode_speedup: float = 1.0,
    ) -> None:
        shares = shares or card.shares
        self._of = of
        self._memory = card.bandwidth * shares.mem / 1e6
        self._rate = card.rate(of.dtype) * shares.arith / 1e6
        self._head_rate = card.rate("bf16") * shares.arith / 1e6
        self._cache = card.bandwidth * shares.decode_mem / 1e6
        self._prompt_rate = card.rate("bf16") * shares.prefill_arith / 1e6
        self._link = card.peer_bandwidth / 1e6
        self._hop_us = card.peer_latency_us
        self._mixed = shares.mixed_decode
        self._host = host_us
        self._prefill, self._decode = prefill, decode
        self._prompt_ratio, self._decode_ratio = speedup, speedup * decode_speedup
        self._bases: dict[tuple[int, int], float] = {}
        self._full = [one for one in of.attention if not one.window]
        self._windowed = [one for one in of.attention if one.window]

    # -- the two verbs ----------------------------------------------------------------------------------------------

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        prompts = [(new, past) for new, past in prefills if new]
        tokens = decode_batch + sum(new for new, _ in prompts)
        if not tokens:
            return 0
        base = self._base(tokens, decode_batch + len(prompts))
        read = self._reading(decode_batch, decode_context) if decode_batch else 0.0
        if not prompts:
            return scaled(round((self._host + (base + read) * self._decode) * 1e3), self._decode_ratio)
        work = base + read * self._mixed + sum(self._attending(new, past) for new, past in prompts)
        return scaled(round((self._host + work * self._prefill) * 1e3), self._prompt_ratio)

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        base, scale, host = self._base(batch, batch), self._decode, self._host
        if passes > SHORT:
            read = self._readings(batch, contexts(batch, context, passes))
            return scaled_many(np.rint((host + (base + read) * scale) * 1e3), self._decode_ratio)
        steps = range(context, context + batch * passes, batch)
        reading, ratio = self._reading, self._decode_ratio
        spent = [scaled(round((host + (base + reading(batch, at)) * scale) * 1e3), ratio) for at in steps]
        return np.array(spent, dtype=np.int64)

    def uneven_ns(self, tokens: int, of_all: Sequence[int]) -> int:
        if not self._of.exchanges:
            return 0
        most = max(of_all)
        mean = padded(most) if most <= GRAPH_TOKENS else sum(max(1, one) for one in of_all) / len(of_all)
        us = (self._shared(mean) - self._shared(padded(tokens))) * self._prefill
        return round(us * 1e3 / self._prompt_ratio)

    # -- parts, in microseconds -------------------------------------------------------------------------------------

    def _base(self, tokens: int, sequences: int) -> float:
        """Everything but attention over what is cached."""
        found = self._bases.get((tokens, sequences))
        if found is None:
            if len(self._bases) > 1 << 16:
                self._bases.clear()
            found = self._bases[tokens, sequences] = self._work_out(padded(tokens), sequences)
        return found

    def _work_out(self, tokens: int, sequences: int) -> float:
        of, memory, rate = self._of, self._memory, self._rate
        total = 0.0
        for product in of.products:
            moved = product.n * product.k * product.weight + 2.0 * tokens * (product.n + product.k)
            total += product.count * _blend(moved / memory, 2.0 * tokens * product.n * product.k / rate)
        total += self._shared(tokens)
        head = of.head
        moved = head.n * head.k * head.weight
        total += _blend(moved / memory, 2.0 * sequences * head.n * head.k / self._head_rate)
        if of.small_kernels:
            each = tokens * of.small_bytes / of.small_kernels / memory
            total += of.small_kernels * (each if each > KERNEL_US else KERNEL_US)
        # Attention is two kernels: over pieces of the context, and putting those together.
        total += 2 * KERNEL_US * sum(one.count for one in of.attention) + sequences * of.states / memory
        if of.collectives:
            moved = tokens * of.collective_bytes * 2.0 * (of.ranks - 1) / of.ranks
            total += of.collectives * (self._hop_us + moved / self._link)
        return total + of.hops * (self._hop_us + tokens * of.collective_bytes / self._link)

    def _shared(self, tokens: float) -> float:
        """Experts, and the exchange of tokens between the data ranks that share them, for ``tokens`` of each rank."""
        of, total = self._of, 0.0
        for layer in of.experts:
            called = layer.experts * (1.0 - (1.0 - layer.chance) ** (tokens * layer.tokens))
            pairs = tokens * layer.per_token
            moved = called * layer.expert_bytes + 4.0 * pairs * sqrt(layer.pair_flops)
            total += layer.count * (2 * GEMM_US + _blend(moved / self._memory, pairs * layer.pair_flops / self._rate))
        if of.exchanges:
            # Every rank gathers the tokens of all, and their results are scattered.
            moved = tokens * of.collective_bytes * (of.data_ranks - 1)
            total += of.exchanges * (self._hop_us + moved / self._link)
        return total

    def _attending(self, new: int, past: int) -> float:
        """Attention of one prompt."""
        total = 0.0
        for one in self._of.attention:
            seen = past if not one.window or past < one.window else one.window
            pairs = new * seen + (0.5 * new * new if not one.window or new < one.window else 1.0 * new * one.window)
            work = pairs * one.prompt_flops / self._prompt_rate
            read = (seen + new) * one.token_bytes / self._cache
            total += one.count * (work if work > read else read)
        return total

    def _reading(self, batch: int, context: int) -> float:
        """Attention of a decode step: all that its requests have cached is read once."""
        total = 0.0
        for one in self._full:
            read = context * one.token_bytes / self._cache
            work = context * one.decode_flops / self._rate
            total += one.count * (read if read > work else work)
        for one in self._windowed:
            seen = batch * one.window if context > batch * one.window else context
            total += one.count * (seen * one.token_bytes / self._cache)
        return total

    def _readings(self, batch: int, context: Times) -> Times:
        """The same for many steps."""
        total = np.zeros(len(context))
        for one in self._full:
            read = context * one.token_bytes / self._cache
            work = context * one.decode_flops / self._rate
            total += one.count * np.maximum(read, work)
        for one in self._windowed:
            seen = np.minimum(context, float(batch * one.window))
            total += one.count * (seen * one.token_bytes / self._cache)
        return total


def _blend(memory: float, arithmetic: float) -> float:
    return sqrt(memory * memory + arithmetic * arithmetic) + GEMM_US
