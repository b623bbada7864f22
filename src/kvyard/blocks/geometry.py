"""Properties that a manager's groups must share: common block sizes, and one clear sentence for each option that can't be
honoured."""

import math
from collections.abc import Sequence

import msgspec

from kvyard.blocks.spec import ConfigError, GroupSpec


class Geometry(msgspec.Struct, frozen=True):
    """The block sizes that a set of groups agrees on."""

    hash_block_size: int
    """Tokens per hash; every group's block size is a multiple of it."""
    scheduler_block_size: int
    """The common multiple of all block sizes: hits of several groups normally end on it."""
    fine_hits: bool
    """True if a hit may end inside a block (an aligned state group with finer hashes)."""


def resolve_geometry(
    groups: Sequence[GroupSpec],
    *,
    caching: bool = True,
    hash_block_size: int | None = None,
    scheduler_block_size: int | None = None,
    context_shards: int = 1,
) -> Geometry:
    """Check that ``groups`` can live together and work out their common sizes. Raises ``ConfigError``."""
    if not groups:
        raise ConfigError("at least one group is needed")
    for index, spec in enumerate(groups):
        spec.check(f"group {index}")
    sizes = [spec.block_size for spec in groups if not spec.attention.scratch]
    if not any(spec.cached and not spec.attention.scratch for spec in groups):
        raise ConfigError("at least one group is needed that can be cached")
    unit = math.gcd(*sizes) if hash_block_size is None else hash_block_size
    common = math.lcm(*sizes) if scheduler_block_size is None else scheduler_block_size
    if unit < 1 or common < 1:
        raise ConfigError(f"block sizes must be at least 1, got hash {unit} and scheduler {common}")
    if any(common % size for size in sizes) or common % unit:
        raise ConfigError(
            f"scheduler_block_size {common} must be a multiple of every block size ({sizes}, hash {unit})"
        )
    if not caching:
        return Geometry(unit, common, False)
    for spec in groups:
        if not spec.attention.cacheable and not spec.attention.scratch:
            raise ConfigError(f"a {spec.kind} group can't be cached: switch caching off for models that have one")
    if any(spec.block_size % unit for spec in groups if spec.shares):
        raise ConfigError(f"every block size ({sizes}) must be a multiple of hash_block_size {unit}")
    if len(groups) == 1 and unit != sizes[0]:
        raise ConfigError(f"one group caches whole blocks: hash_block_size {unit} must equal its block_size {sizes[0]}")
    for spec in groups:
        if spec.attention.needs_one_size and spec.cached and spec.block_size != common:
            raise ConfigError(f"{spec.kind} groups need one block size for all groups")
    # Shared among ranks, blocks of full attention are larger than those of states, which may be as small as a hash.
    smallest = unit if context_shards > 1 else unit + 1
    aligned_states = any(s.is_state and s.mode == "align" and s.block_size >= smallest for s in groups)
    reads_inside = all(s.is_full or s.is_state or not s.shares or s.block_size == unit for s in groups)
    return Geometry(unit, common, len(groups) > 1 and aligned_states and reads_inside)


def check_retention(interval: int | None, groups: Sequence[GroupSpec], scheduler_block_size: int) -> None:
    """Raise ``ConfigError`` unless ``interval`` is a retention these groups can honour.

    ``None`` keeps every reachable block, 0 only the points a resend can resume at, n one more every n tokens.
    """
    if interval is None:
        return
    if not any(spec.attention.is_window or spec.is_state for spec in groups):
        if interval:
            # A test of vLLM's own looks for "no sliding-window or Mamba".
            raise ConfigError("there is no sliding-window or Mamba group for retention_interval: use 0")
    elif interval < 0 or interval % scheduler_block_size:
        raise ConfigError(
            f"retention_interval must be a non-negative multiple of scheduler_block_size {scheduler_block_size}, got {interval}"
        )


def check_amounts(watermark: float, **counts: int) -> None:
    """Raise ``ConfigError`` unless ``watermark`` is a share and none of ``counts``, options by name, is negative."""
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} must not be negative, got {value}")
    if not 0 <= watermark < 1:
        raise ConfigError(f"watermark is a share of the pool, from 0 to below 1, got {watermark}")


def check_drafts(groups: Sequence[GroupSpec], geometry: Geometry, caching: bool, lookahead: int) -> None:
    """Raise ``ConfigError`` unless ``groups`` can be used with a draft head that prefills ``lookahead`` tokens ahead."""
    for spec in groups:
        if caching and not spec.attention.drafts:
            raise ConfigError(f"{spec.kind} groups can't be cached next to a draft head: switch one of the two off")
    if caching and lookahead > geometry.scheduler_block_size:
        raise ConfigError(
            f"num_prefill_lookahead {lookahead} must not exceed the scheduler's block size {geometry.scheduler_block_size}"
        )
