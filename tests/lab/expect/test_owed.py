"""Hits in a pool that never evicts: what prompts share, block by block, is what the block manager itself finds."""

from __future__ import annotations

from random import Random

import pytest
from tests.lab.expect.support import conversations, documents

from kvyard.engine.config import EngineConfig
from kvyard.lab.expect.owed import ENDLESS, endless_hits
from kvyard.replay.report.plain_cache import PlainCache
from kvyard.replay.traces import TraceRequest


def branching(seed: int) -> list[TraceRequest]:
    """Prompts that go on from a random place of an earlier one, some with an answer, a salt or an adapter."""
    random = Random(seed)
    rows: list[TraceRequest] = []
    for at in range(60):
        earlier = [*(rows[random.randrange(at)].tokens or ())] if at else []
        tokens = earlier[: random.randint(0, len(earlier))]
        tokens += [random.randrange(3) for _ in range(random.randint(1, 40))]
        answer = [random.randrange(3) for _ in range(random.randint(1, 30))] if random.random() < 0.5 else None
        rows.append(
            TraceRequest(
                f"r{at}",
                at,
                len(tokens),
                len(answer or "1"),
                tokens=tokens,
                output_tokens=answer,
                salt=random.choice([None, None, "a"]),
                lora=random.choice([None, None, "b"]),
            )
        )
    return rows


@pytest.mark.parametrize("block", [4, 16, 24])
@pytest.mark.parametrize(
    "rows", [conversations(4, 3), documents(30), branching(1), branching(2)], ids=["chats", "ids", "one", "two"]
)
def test_an_endless_pool_has_every_block_that_was_shared(rows: list[TraceRequest], block: int) -> None:
    engine = EngineConfig(block_size=block)
    cache = PlainCache(engine, ENDLESS)
    found: list[int] = []
    for row in rows:
        before = cache.found
        cache.add(row, row.arrival)
        found.append(cache.found - before)
        if row.tokens is not None and row.output_tokens is not None and len(row.output_tokens) > 1:
            tokens = [*row.tokens, *row.output_tokens[:-1]]
            cache.add(TraceRequest(f"{row.id}#", 0, len(tokens), 1, tokens=tokens, salt=row.salt, lora=row.lora), 0)
    assert endless_hits(rows, engine).tolist() == found
    assert sum(found) > 0
