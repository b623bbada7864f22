"""What a manager's options must satisfy beyond the groups themselves: one clear sentence for each thing that can't work."""

from __future__ import annotations

from collections.abc import Sequence

from kvyard.blocks.spec import ConfigError, Geometry, GroupSpec, check_retention


def check_options(
    groups: Sequence[GroupSpec],
    geometry: Geometry,
    *,
    caching: bool,
    use_eagle: bool,
    retention_interval: int | None,
    watermark: float,
    **counts: int,
) -> None:
    """Raise ``ConfigError`` unless these options can be honoured for ``groups``.

    ``counts`` are the options that must not be negative, by name; ``num_prefill_lookahead`` is one of them.
    """
    check_retention(retention_interval, groups, geometry.scheduler_block_size)
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} must not be negative, got {value}")
    if not 0 <= watermark < 1:
        raise ConfigError(f"watermark is a share of the pool, from 0 to below 1, got {watermark}")
    if use_eagle or any(spec.eagle for spec in groups):
        _check_drafts(groups, geometry, caching, counts["num_prefill_lookahead"])


def _check_drafts(groups: Sequence[GroupSpec], geometry: Geometry, caching: bool, lookahead: int) -> None:
    for spec in groups:
        if caching and not spec.attention.drafts:
            raise ConfigError(f"{spec.kind} groups can't be cached next to a draft head: switch one of the two off")
    if caching and lookahead > geometry.scheduler_block_size:
        raise ConfigError(
            f"num_prefill_lookahead {lookahead} must not exceed the scheduler's block size {geometry.scheduler_block_size}"
        )
    finer = [s for s in groups if s.is_state and s.mode == "align" and s.block_size > geometry.hash_block_size]
    if lookahead > 1 and finer:
        raise ConfigError("aligned states with finer hashes can't follow more than one draft token per prefill")
