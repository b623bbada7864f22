"""Properties that workers which share a tier must have in common."""

import msgspec

from kvyard.blocks.spec import GroupSpec


class Contract(msgspec.Struct, frozen=True):
    """Compared field by field when a worker joins."""

    groups: tuple[GroupSpec, ...]
    hash_block_size: int
    block_bytes: int
    blocks_per_chunk: int
