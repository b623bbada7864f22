"""Group specifications: what kind of attention a group of layers has and how large its blocks are.

A spec is a value that says nothing about any request. What follows from it is in ``kvyard.blocks.rules``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.types import GroupMeta

KINDS = ("full", "mla", "sliding_window", "sliding_window_mla", "chunked_local", "mamba", "cross")
STATE_MODES = ("none", "all", "align")

WIRE_KINDS = {
    "full": "full_attention",
    "mla": "mla_attention",
    "sliding_window": "sliding_window",
    "sliding_window_mla": "sliding_window_mla",
    "chunked_local": "chunked_local_attention",
    "mamba": "mamba",
    "cross": "cross_attention",
}
"""How each kind is called in KV events."""


class ConfigError(KvyardError, ValueError):
    """A configuration that can't work; the message says which value and what would."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layers that share a block table."""

    kind: str = "full"
    block_size: int = 16
    window: int | None = None
    """Tokens a sliding window sees, the current one included."""
    chunk: int | None = None
    """Tokens of a chunk of chunked-local attention."""
    mode: str = "align"
    """How a state (Mamba) group keeps states: ``none``, ``all`` or ``align``."""
    spec_blocks: int = 0
    """Extra state blocks for speculative decoding."""
    eagle: bool = False
    """Whether a draft head reads this group, so that the last hit block must be computed again."""

    @property
    def is_full(self) -> bool:
        """Whether every earlier token stays visible and hits are plain prefixes."""
        return self.kind in ("full", "mla")

    @property
    def is_window(self) -> bool:
        return self.kind in ("sliding_window", "sliding_window_mla")

    @property
    def is_state(self) -> bool:
        return self.kind == "mamba"

    @property
    def meta(self) -> GroupMeta:
        """What events say of a group like this."""
        return GroupMeta(block_size=self.block_size, kind=WIRE_KINDS[self.kind], window=self.window)

    def check(self, where: str) -> None:
        """Raise ``ConfigError``, naming ``where``, if this spec makes no sense by itself."""
        if self.kind not in KINDS:
            raise ConfigError(f"{where}: unknown kind {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.block_size < 1:
            raise ConfigError(f"{where}: block_size must be at least 1, got {self.block_size}")
        if self.is_window and (self.window is None or self.window < 1):
            raise ConfigError(f"{where}: a {self.kind} group needs a window of at least 1 token, got {self.window}")
        if self.kind == "chunked_local" and (self.chunk is None or self.chunk < 1):
            raise ConfigError(f"{where}: a chunked_local group needs a chunk of at least 1 token, got {self.chunk}")
        if self.is_state and self.mode not in STATE_MODES:
            raise ConfigError(f"{where}: unknown state mode {self.mode!r}; choose one of {', '.join(STATE_MODES)}")
        if self.window is not None and not self.is_window:
            raise ConfigError(f"{where}: a {self.kind} group has no window; leave it out or choose sliding_window")
        if self.chunk is not None and self.kind != "chunked_local":
            raise ConfigError(f"{where}: a {self.kind} group has no chunk; leave it out or choose chunked_local")
        if not self.is_state and (self.mode != "align" or self.spec_blocks):
            raise ConfigError(f"{where}: mode and spec_blocks are for mamba groups, not for {self.kind}")
        if self.spec_blocks < 0:
            raise ConfigError(f"{where}: spec_blocks must not be negative, got {self.spec_blocks}")


class Geometry(msgspec.Struct, frozen=True):
    """The block sizes that a set of groups agrees on."""

    hash_block_size: int
    """Tokens per hash; every group's block size is a multiple of it."""
    scheduler_block_size: int
    """The common multiple of all block sizes: hits of several groups normally end on it."""
    fine_hits: bool
    """Whether a hit may end inside a block (an aligned state group with finer hashes)."""


def resolve_geometry(
    groups: Sequence[GroupSpec],
    *,
    caching: bool = True,
    hash_block_size: int | None = None,
    scheduler_block_size: int | None = None,
) -> Geometry:
    """Check that ``groups`` can live together and work out their common sizes. Raises ``ConfigError``."""
    if not groups:
        raise ConfigError("at least one group is needed")
    for index, spec in enumerate(groups):
        spec.check(f"group {index}")
    sizes = [spec.block_size for spec in groups]
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
    if any(spec.kind == "cross" for spec in groups):
        raise ConfigError("a cross group can't be cached: switch caching off for encoder-decoder models")
    if any(size % unit for size in sizes):
        raise ConfigError(f"every block size ({sizes}) must be a multiple of hash_block_size {unit}")
    if len(groups) == 1 and unit != sizes[0]:
        raise ConfigError(f"one group caches whole blocks: hash_block_size {unit} must equal its block_size {sizes[0]}")
    if any(spec.kind == "chunked_local" and spec.block_size != common for spec in groups):
        raise ConfigError("chunked_local groups need one block size for all groups")
    aligned_states = any(s.is_state and s.mode == "align" and s.block_size > unit for s in groups)
    reads_inside = all(s.is_full or s.is_state or s.block_size == unit for s in groups)
    return Geometry(unit, common, len(groups) > 1 and aligned_states and reads_inside)


def check_retention(interval: int | None, groups: Sequence[GroupSpec], scheduler_block_size: int) -> None:
    """Raise ``ConfigError`` unless ``interval`` is a retention these groups can honour.

    ``None`` keeps every reachable block, 0 only the points a resend can resume at, n one more every n tokens.
    """
    if interval is None:
        return
    if not any(spec.is_window or spec.is_state for spec in groups):
        if interval:
            raise ConfigError("retention_interval only matters to window and state groups: use 0 here")
    elif interval < 0 or interval % scheduler_block_size:
        raise ConfigError(
            f"retention_interval must be 0 or a positive multiple of {scheduler_block_size}, got {interval}"
        )
