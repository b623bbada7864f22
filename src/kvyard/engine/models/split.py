"""Split of a model over cards by vLLM's rules: the layers of a stage, and refusals of impossible splits."""

from __future__ import annotations

import msgspec

from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import check_heads, mixers
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Split of a model over cards; names are vLLM's."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    """Ranks that each have requests of their own. They share the experts, and have copies of all else."""
    enable_expert_parallel: bool = False
    """True if whole experts are spread over all tensor and data ranks, instead of slices of every expert."""

    def check(self) -> None:
        """Raise ``KvyardError`` for a size that can't be."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise KvyardError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage that share the experts of a layer."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def shared_expert_ranks(self) -> int:
        """Ranks that share an expert that every token goes through.

        With tensor, data and expert parallelism at once vLLM spreads tokens over tensor ranks instead, and each has all of it.
        """
        spread = self.enable_expert_parallel and self.tensor_parallel_size > 1 and self.data_parallel_size > 1
        return 1 if spread else self.tensor_parallel_size

    def experts_of(self, experts: int, width: int) -> tuple[int, int]:
        """Return the number of experts of a rank, and the part of their width."""
        if self.enable_expert_parallel:
            return ceil_div(experts, self.expert_ranks), width
        return experts, ceil_div(width, self.expert_ranks)

    def stages(self, layers: int) -> list[range]:
        """Return the layers of each pipeline stage. What doesn't divide goes to stages before the last, which has the output
        layer.
        """
        count = self.pipeline_parallel_size
        sizes = [layers // count] * count
        for back in range(layers % count):
            sizes[-2 - back] += 1
        starts = [sum(sizes[:stage]) for stage in range(count)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


WHOLE = Parallelism()
"""On one card."""


def check_split(fields: Fields, split: Parallelism) -> None:
    """Raise ``KvyardError`` for a model that can't be split so, saying what can be."""
    split.check()
    layers = len(mixers(fields))
    if split.pipeline_parallel_size > layers:
        raise KvyardError(
            f"{fields.architecture}: {layers} layers can't be cut into {split.pipeline_parallel_size} pipeline stages;"
            f" pipeline_parallel_size may be 1 to {layers}"
        )
    if split.enable_expert_parallel and not fields.integer("num_experts", 0):
        raise KvyardError(
            f"{fields.architecture} has no experts: leave enable_expert_parallel out, it is for mixtures of experts"
        )
    heads = fields.integer("num_attention_heads")
    # MLA keeps one latent for all heads, so only the heads of queries count.
    kv_heads = 1 if fields.get("kv_lora_rank") is not None else fields.integer("num_key_value_heads", heads)
    check_heads(fields, heads, kv_heads, split.tensor_parallel_size)
