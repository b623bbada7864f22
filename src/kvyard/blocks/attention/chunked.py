"""Chunked-local attention: a text is cut into chunks of ``chunk`` tokens, and none sees another."""

from bisect import bisect_right
from typing import ClassVar

from kvyard.blocks.rule import Rule, RuleMatch
from kvyard.blocks.spans import Spans
from kvyard.blocks.spec import Attention, ConfigError, GroupSpec
from kvyard.integers import ceil_div


class ChunkRule(Rule):
    """Chunked-local attention: nothing before the current chunk is ever read."""

    forgets: ClassVar[bool] = True

    def __init__(self, block_size: int, chunk: int) -> None:
        super().__init__(block_size)
        self.chunk = chunk

    def stale(self, computed: int) -> int:
        return computed // self.chunk * self.chunk

    def fresh_until(self, position: int) -> int:
        return ceil_div((position + 1) * self.block_size, self.chunk) * self.chunk - 1

    def match(self, spans: Spans, limit: int, alignment: int, drop: bool) -> RuleMatch:
        size = self.block_size
        blocks = limit // size
        low = self.stale(limit) // size
        index = bisect_right(spans, low, key=lambda span: span[0]) - 1
        high = min(blocks, spans[index][1]) if index >= 0 else low
        return RuleMatch(max(low, high) * size, low)

    def cap(self, in_flight: int, max_tokens: int) -> int | None:
        return ceil_div(min(self.chunk + in_flight, max_tokens), self.block_size)


def _rule(spec: GroupSpec) -> Rule:
    assert spec.chunk is not None
    return ChunkRule(spec.block_size, spec.chunk)


def _check(spec: GroupSpec, where: str) -> None:
    if spec.chunk is None or spec.chunk < 1:
        raise ConfigError(f"{where}: a {spec.kind} group needs a chunk of at least 1 token, got {spec.chunk}")


CHUNKED_LOCAL = Attention(
    wire="chunked_local_attention", fields=("chunk",), rule=_rule, check=_check, needs_one_size=True, drafts=False
)
