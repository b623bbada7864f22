"""Which class of group serves which spec."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.blocks.fine import FineGroup
from kvyard.blocks.group import CrossGroup, Group
from kvyard.blocks.pool import Pool
from kvyard.blocks.spec import GroupSpec
from kvyard.blocks.state_group import AlignedStateGroup, StateGroup


def make_groups(
    specs: Sequence[GroupSpec],
    pool: Pool,
    *,
    caching: bool,
    hash_block_size: int,
    max_in_flight: int,
    max_model_len: int,
) -> list[Group]:
    """One group per (checked) spec, all over ``pool``."""
    return [
        _class_for(spec, caching, hash_block_size)(
            index,
            spec,
            pool,
            hash_block_size=hash_block_size,
            max_in_flight=max_in_flight,
            max_model_len=max_model_len,
        )
        for index, spec in enumerate(specs)
    ]


def _class_for(spec: GroupSpec, caching: bool, hash_block_size: int) -> type[Group]:
    if spec.kind == "cross":
        return CrossGroup
    if spec.is_full and caching and spec.block_size != hash_block_size:
        return FineGroup
    if spec.is_state:
        return AlignedStateGroup if spec.mode == "align" else StateGroup
    return Group
