"""Full attention: every earlier token stays visible. MLA is that with another layout of its cache."""

from kvyard.blocks.fine import FineGroup
from kvyard.blocks.group import Group
from kvyard.blocks.rule import Rule
from kvyard.blocks.spec import Attention, GroupSpec


def _group(spec: GroupSpec, caching: bool, hash_block_size: int) -> type[Group]:
    return FineGroup if caching and spec.block_size != hash_block_size else Group


FULL = Attention(
    wire="full_attention",
    also_wire=("sink_full_attention",),
    is_full=True,
    rule=lambda spec: Rule(spec.block_size),
    group_class=_group,
)
MLA = Attention(wire="mla_attention", is_full=True, rule=lambda spec: Rule(spec.block_size), group_class=_group)
