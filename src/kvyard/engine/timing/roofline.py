"""``roofline``: a pass on a card without measurements, from the card's data sheet and the model's config.

Every operator takes what its memory traffic and its arithmetic take at the card's peaks, by the constants of its kernel
(``kernels``), and at least a launch. Two measured numbers, the time of a prompt and of one decode step, scale the card's part
(``calibrate``). Left out: pipeline stages that overlap, and kernels that fall off at odd shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvyard.engine.cards import Card, Shares
from kvyard.engine.timing.host import NO_HOST, Host
from kvyard.engine.timing.kernels import Kernels
from kvyard.engine.timing.model import SHORT, Durations, Times, contexts, scaled, scaled_many
from kvyard.engine.timing.operators import AttentionShape, Experts, Operators, Product

KERNEL_US = 3.0
"""Least time of a kernel that only moves activations: 1.4 to 5 µs on an H200 (benchmarks/data/h200-kernels.jsonl)."""
MOVED = 0.5
"""Share of the memory's bandwidth in those (a norm with its residual, same file)."""
SAMPLER_US = 30.0
"""Greedy sampling of one sequence (same file),"""
SAMPLER_BYTES = 22
"""and bytes at the memory's peak per sequence and token of the vocabulary."""
GRAPH_TOKENS = 512
"""Up to here passes run as CUDA graphs of fixed sizes."""


def padded(tokens: int) -> int:
    """Return the size of the CUDA graph that ``tokens`` run in: 1, 2, 4, then multiples of 8."""
    if tokens > GRAPH_TOKENS or tokens <= 2:
        return tokens
    return 4 if tokens <= 4 else (tokens + 7) // 8 * 8


class _Attention:
    """Microseconds of ``count`` layers that attend alike, by tokens of context."""

    __slots__ = (
        "decode_launch",
        "decode_pad",
        "decode_us",
        "pair_us",
        "prompt_launch",
        "prompt_pad",
        "token_us",
        "window",
    )

    def __init__(self, of: AttentionShape, card: Card, kernels: Kernels) -> None:
        prompt, decode = kernels.prompts(of.width), kernels.decoding(of.width, of.cache_bytes, of.latent)
        flops = card.rate("bf16")
        self.decode_launch = of.count * decode.launch_us
        self.prompt_launch = of.count * prompt.launch_us
        self.pair_us = of.count * of.prompt_flops / (flops * prompt.arith) * 1e6
        self.prompt_pad = prompt.pad
        self.token_us = of.count * of.token_bytes / (card.bandwidth * decode.mem) * 1e6
        work_us = of.count * of.decode_flops / (flops * decode.arith) * 1e6 if of.latent else 0.0
        self.decode_us = max(self.token_us, work_us)
        self.decode_pad = decode.pad
        self.window = of.window

    def prompt(self, new: int, past: int) -> float:
        window = self.window
        seen = past if not window or past < window else window
        pairs = new * seen + (0.5 * new * new if not window or new < window else 1.0 * new * window)
        work = (pairs + self.prompt_pad * new) * self.pair_us
        read = (seen + new) * self.token_us
        return work if work > read else read

    def decode(self, batch: int, context: int) -> float:
        window = self.window
        if window and context > batch * window:
            context = batch * window
        return (context + self.decode_pad * batch) * self.decode_us

    def decodes(self, batch: int, context: Times) -> Times:
        if self.window:
            context = np.minimum(context, float(batch * self.window))
        return (context + self.decode_pad * batch) * self.decode_us


class RooflineModel:
    """Durations of passes. ``prefill`` and ``decode`` scale what prompts and decode steps take beyond the host's part."""

    needs_longest: ClassVar[bool] = False

    def __init__(
        self,
        of: Operators,
        card: Card,
        shares: Shares | None = None,
        *,
        engine: str = "vllm",
        host: Host = NO_HOST,
        prefill: float = 1.0,
        decode: float = 1.0,
        speedup: float = 1.0,
        decode_speedup: float = 1.0,
    ) -> None:
        kernels = Kernels(card, engine, shares)
        self._of = of
        self._card = card
        self._kernels = kernels
        self._attention = [_Attention(shape, card, kernels) for shape in of.attention]
        self._decode_launch = sum(shape.decode_launch for shape in self._attention)
        self._prompt_launch = sum(shape.prompt_launch for shape in self._attention)
        self._mixed_launch = max(self._decode_launch, self._prompt_launch)
        self._mixed = (shares or card.shares).mixed_decode
        self._host = host
        self._prefill, self._decode = prefill, decode
        self._prompt_ratio, self._decode_ratio = speedup, speedup * decode_speedup
        self._bases: dict[tuple[int, int], float] = {}

    # -- the two verbs ----------------------------------------------------------------------------------------------

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        prompts = [(new, past) for new, past in prefills if new]
        tokens = decode_batch + sum(new for new, _ in prompts)
        if not tokens:
            return 0
        sequences = decode_batch + len(prompts)
        base = self._base(tokens, sequences)
        read = self._reading(decode_batch, decode_context) if decode_batch else 0.0
        if not prompts:
            us = self._host.joined(sequences, (base + self._decode_launch + read) * self._decode)
            return scaled(round(us * 1e3), self._decode_ratio)
        work = base + (self._mixed_launch if decode_batch else self._prompt_launch) + read * self._mixed
        work += sum(self._attending(new, past) for new, past in prompts)
        return scaled(round(self._host.joined_prompts(sequences, work * self._prefill) * 1e3), self._prompt_ratio)

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        base, scale, joined = self._base(batch, batch) + self._decode_launch, self._decode, self._host.joined
        if passes > SHORT:
            read = self._readings(batch, contexts(batch, context, passes))
            us = self._host.joined_many(batch, (base + read) * scale)
            return scaled_many(np.rint(us * 1e3), self._decode_ratio)
        steps = range(context, context + batch * passes, batch)
        reading, ratio = self._reading, self._decode_ratio
        spent = [scaled(round(joined(batch, (base + reading(batch, step)) * scale) * 1e3), ratio) for step in steps]
        return np.array(spent, dtype=np.int64)

    def uneven_ns(self, tokens: int, of_all: Sequence[int]) -> int:
        if not self._of.exchanges:
            return 0
        most = max(of_all)
        mean = padded(most) if most <= GRAPH_TOKENS else sum(max(1, of_rank) for of_rank in of_all) / len(of_all)
        us = (self._shared(mean) - self._shared(padded(tokens))) * self._prefill
        return round(us * 1e3 / self._prompt_ratio)

    # -- parts, in microseconds -------------------------------------------------------------------------------------

    def _base(self, tokens: int, sequences: int) -> float:
        """Return the time of everything but attention over what is cached."""
        base_us = self._bases.get((tokens, sequences))
        if base_us is None:
            if len(self._bases) > 1 << 16:
                self._bases.clear()
            base_us = self._bases[tokens, sequences] = self._work_out(padded(tokens), sequences)
        return base_us

    def _work_out(self, tokens: int, sequences: int) -> float:
        of, kernels, peak = self._of, self._kernels, self._card.bandwidth / 1e6
        total = sum(product.count * self._product(product, tokens, of.dtype) for product in of.products)
        total += self._shared(tokens)
        total += self._product(of.head, sequences, "bf16")
        total += SAMPLER_US + sequences * of.head.n * SAMPLER_BYTES / peak
        if of.small_kernels:
            each = tokens * of.small_bytes / of.small_kernels / (peak * MOVED)
            total += of.small_kernels * (each if each > KERNEL_US else KERNEL_US)
        total += sequences * of.states / peak
        message = tokens * of.collective_bytes
        if of.collectives:
            total += of.collectives * kernels.all_reduce(of.ranks, message)
        return total + of.hops * (self._card.peer_latency_us + message / self._card.peer_bandwidth * 1e6)

    def _product(self, product: Product, tokens: int, dtype: str) -> float:
        card = self._card
        moved = tokens * (product.k * (6.0 if dtype in card.flops and dtype != "bf16" else 2.0) + 2.0 * product.n)
        return self._kernels.product(dtype).us(
            product.n * product.k * product.weight / card.bandwidth * 1e6,
            2.0 * tokens * product.n * product.k / card.rate(dtype) * 1e6,
            moved / card.bandwidth * 1e6,
        )

    def _shared(self, tokens: float) -> float:
        """Return experts, and the exchange of tokens between the data ranks that share them, for ``tokens`` of each rank."""
        of, total = self._of, 0.0
        for layer in of.experts:
            total += layer.count * self._experts(layer, tokens)
        if of.exchanges:
            # Every rank gathers the tokens of all, and their results are scattered.
            message, ranks = tokens * of.collective_bytes * of.data_ranks, of.data_ranks
            total += of.exchanges / 2 * (self._kernels.gather(ranks, message) + self._kernels.scatter(ranks, message))
        return total

    def _experts(self, layer: Experts, tokens: float) -> float:
        card, dtype = self._card, self._of.expert_dtype
        called = layer.experts * (1.0 - (1.0 - layer.chance) ** (tokens * layer.tokens))
        pairs = tokens * layer.per_token
        return self._kernels.experts(dtype).us(
            called * layer.expert_bytes / card.bandwidth * 1e6,
            pairs * layer.pair_flops / card.rate(dtype) * 1e6,
            pairs * layer.pair_bytes / card.bandwidth * 1e6,
            tokens * layer.tokens * layer.chance,
            layer.holders,
        )

    def _attending(self, new: int, past: int) -> float:
        """Return attention of one prompt."""
        return sum(attention.prompt(new, past) for attention in self._attention)

    def _reading(self, batch: int, context: int) -> float:
        """Return attention of a decode step: all that its requests have cached is read once."""
        return sum(attention.decode(batch, context) for attention in self._attention)

    def _readings(self, batch: int, context: Times) -> Times:
        """Like the above for many steps."""
        total = np.zeros(len(context))
        for attention in self._attention:
            total += attention.decodes(batch, context)
        return total
