"""A deployment: which model on which card, split how. What timing that isn't fitted to one engine is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvyard.engine.cards import Card, find_card
from kvyard.engine.models.fields import find_config
from kvyard.engine.models.split import Parallelism
from kvyard.engine.timing.operators import Operators, make_operators


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model`` is a preset, a config.json, or a folder that has one; ``gpu`` a card of ``kvyard.engine.cards``."""

    model: str
    gpu: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    weight_dtype: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def card(self) -> Card:
        """Raises ``KvyardError`` for an unknown one."""
        return find_card(self.gpu)

    @property
    def split(self) -> Parallelism:
        """Return the split of the model."""
        return Parallelism(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
        )

    def config(self) -> dict[str, Any]:
        """Return the model's config. Raises ``KvyardError`` if there is none."""
        return find_config(self.model)

    def operators(self) -> Operators:
        """Return the operators of a pass on one rank. Raises ``KvyardError`` for a model that can't be split."""
        return make_operators(
            self.config(), self.split, weight_dtype=self.weight_dtype, kv_cache_dtype=self.kv_cache_dtype
        )

    @property
    def caveat(self) -> str:
        """Return a caveat beyond the known error of its times, after a comma; empty for most.

        Engines have several batches in a pipeline at once, which isn't modelled.
        """
        return ", pipeline stages one after the other" if self.pipeline_parallel_size > 1 else ""

    def __str__(self) -> str:
        ways = {"TP": self.tensor_parallel_size, "PP": self.pipeline_parallel_size, "DP": self.data_parallel_size}
        parts = [f"{name}{size}" for name, size in ways.items() if size > 1]
        if self.enable_expert_parallel:
            parts.append("EP")
        if self.weight_dtype is not None:
            parts.append(f"{self.weight_dtype} weights")
        if self.kv_cache_dtype != "auto":
            parts.append(f"{self.kv_cache_dtype} cache")
        return " ".join([Path(self.model).name, "on", self.gpu, *parts])
