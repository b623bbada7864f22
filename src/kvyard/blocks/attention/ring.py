"""A ring per request, beside groups that are cached: one block that is written over and over, never cached and never shared."""

from kvyard.blocks.group import Demand, Group, GroupHit
from kvyard.blocks.request import Request
from kvyard.blocks.rule import Rule
from kvyard.blocks.spec import Attention
from kvyard.blocks.table import BlockTable


class RingGroup(Group):
    """One block per request, from its first tokens to its end."""

    def required(self, demand: Demand) -> int:
        return 1

    def need(self, request: Request, table: BlockTable, hit: GroupHit, demand: Demand) -> int:
        return 0 if table.length else 1

    def adopt(self, table: BlockTable, hit: GroupHit, local: int, external: int) -> None:
        """Adopt nothing: rings aren't cached."""

    def take_external(self, table: BlockTable, total: int, external: int) -> None:
        self.take(table, 1 - table.length)


RING = Attention(
    wire="ring",
    cacheable=False,
    scratch=True,
    rule=lambda spec: Rule(spec.block_size),
    group_class=lambda spec, caching, hash_block_size: RingGroup,
)
