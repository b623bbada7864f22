"""Counting what an index holds, a little with every look, however it is cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.index.support import removed, stored

from kvyard.events.types import EventBatch
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.index.memory import MemoryIndex
from kvyard.server.gateway import view
from kvyard.server.gateway.view import Holdings


@pytest.mark.source
def test_a_place_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine with 400 prompts of one block and one with a long prompt: no look counts more than so many segments."""
    indexer = Indexer(Identity(4))
    for name in ("many", "long"):
        indexer.register(Source(stream=name, worker=name))
    prompts = [[at, 1, 2, 3] for at in range(400)]
    indexer.apply_batch(EventBatch(stream="many", seq=0, events=[stored(prompt, 4) for prompt in prompts]))
    indexer.apply_batch(EventBatch(stream="long", seq=0, events=[stored(list(range(4 * 90)), 4)]))
    indexer.apply_batch(EventBatch(stream="many", seq=1, events=[removed(prompt, 4) for prompt in prompts[:50]]))
    counted: list[int] = []
    count = MemoryIndex.count_held

    def watched(self: MemoryIndex, place: int, segments: list[int]) -> int:
        counted.append(len(segments))
        return count(self, place, segments)

    monkeypatch.setattr(MemoryIndex, "count_held", watched)
    monkeypatch.setattr(view, "AT_ONCE", 64)
    holdings = Holdings(SimpleNamespace(models={"m": SimpleNamespace(indexer=indexer)}))  # type: ignore[arg-type]
    for _ in range(12):
        before = len(counted)
        holdings.look()
        assert sum(counted[before:]) <= 64
    found = {name: sum(tier.idle for tier in holdings.tiers([Holder(name)])) for name in ("many", "long")}
    assert found == {"many": 350, "long": 90}
