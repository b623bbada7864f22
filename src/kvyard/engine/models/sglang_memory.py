"""Memory that SGLang leaves beside weights and cache, by its own rule: unlike vLLM it measures no activations."""

from __future__ import annotations

from kvyard.engine.models.memory import GIB

MIB = 2**20
CONTEXT = 23 * GIB // 8
"""Of a card that works alone, beside weights and cache within the static share: CUDA's context and workspaces. Runs of
Qwen3-32B on one H100 (aiconfigurator-core's silicon rows) hold some 7,000 tokens at once, which leaves this."""
CONTEXT_OF_RANKS = 2 * GIB
"""Of a tensor-parallel rank, NCCL's buffers included. Qwen3-235B on 4 H100 logged 2.1 GiB."""
LARGE_CARD = 60 * GIB
LEAST_ON_LARGE_CARDS = 10 * GIB
GRAPHS = GIB
"""CUDA graphs of decode steps and of small prompts, half each."""


def context_bytes(ranks: int) -> int:
    """Return bytes of a card that are taken before SGLang looks at how much is free."""
    return CONTEXT_OF_RANKS if ranks > 1 else CONTEXT


def static_share(memory: int, chunk: int, ranks: int) -> float:
    """Return SGLang's default ``mem_fraction_static``: weights and cache, as a share of a card's memory.

    Source: ``_handle_gpu_memory_settings`` of 0.5: 1.5 MiB for each token of a chunk, graphs, and an eighth of a GiB a rank.
    """
    left = 512 * MIB + int(1.5 * MIB) * max(chunk, 2048) + ranks * GIB // 8 + GRAPHS
    if memory > LARGE_CARD:
        left = max(left, LEAST_ON_LARGE_CARDS)
    return round(1 - left / memory, 3)
