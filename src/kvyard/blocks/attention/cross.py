"""Cross attention of encoder-decoder models: blocks for the encoder's tokens."""

from kvyard.blocks.group import Demand, Group, GroupHit
from kvyard.blocks.rule import Rule
from kvyard.blocks.spec import Attention
from kvyard.blocks.table import BlockTable
from kvyard.integers import ceil_div


class CrossGroup(Group):
    """Cross attention: blocks for the encoder's tokens, taken once, never cached and never shared."""

    acts_every_step = True

    def required(self, demand: Demand) -> int:
        return ceil_div(demand.encoder, self.block_size)

    def adopt(self, table: BlockTable, hit: GroupHit, local: int, external: int) -> None:
        """Do nothing: this group holds none of the prompt's tokens."""

    def take_external(self, table: BlockTable, total: int, external: int) -> None:
        """Do nothing: this group holds none of the prompt's tokens."""


CROSS = Attention(
    wire="cross_attention",
    cacheable=False,
    rule=lambda spec: Rule(spec.block_size),
    group_class=lambda spec, caching, hash_block_size: CrossGroup,
)
