"""Which class of group serves which spec."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.blocks.group import Group
from kvyard.blocks.pool import Pool
from kvyard.blocks.spec import ConfigError, GroupSpec


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
    choose = spec.attention.group_class
    found: type[object] = Group if choose is None else choose(spec, caching, hash_block_size)
    if not issubclass(found, Group):
        raise ConfigError(f"attention kind {spec.kind} is served by {found.__name__}, which is no Group")
    return found
