"""``hits-per-token`` in groups with windows: what is evicted is what a model evicts that goes block by block.

In such a group a request lets go of blocks before it ends, as they leave its window. A piece is what it lets go of at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.blocks.model import Model, NoneLeft, Pool
from tests.blocks.walks import Explorer, Mismatch, draw_family

ORDER = "hits-per-token"
KINDS = {"full", "mla", "sliding_window", "sliding_window_mla"}


class HitsPool(Pool):
    """The queue is in order of hits per token: of each free block, its uses by the tokens of its piece."""

    def __init__(self, count: int, events: bool, whole_hashes: bool) -> None:
        super().__init__(count, events, whole_hashes)
        self.uses: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.last: dict[int, str] = {}
        """Block -> the last request that used it."""
        self.evictions = 0

    def used(self, name: str, blocks: list[int], size: int) -> None:
        cached = [block for block in blocks if block in self.keys]
        piece = [block for block in cached if block not in self.uses]
        for block in piece:
            self.uses[block], self.sizes[block] = 0, len(piece) * size
        for block in cached:
            if self.last.get(block) != name:
                self.uses[block] += 1
                self.last[block] = name

    def take(self, count: int) -> list[int]:
        if count > len(self.queue):
            raise NoneLeft
        self.evictions += sum(block in self.keys for block in self.queue[:count])
        taken = super().take(count)
        self.forget(taken)
        return taken

    def clear(self) -> bool:
        done = super().clear()
        if done:
            self.forget(range(1, self.count))  # they go before all that is cached from now on
        return done

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for known in (self.uses, self.sizes, self.last):
                known.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        super().release(blocks)
        # What was told to forget its content while it was held goes to the front.
        self.forget([block for block in blocks if block and not self.refs[block] and block not in self.keys])
        # Stable: who became free first goes first among equals.
        self.queue.sort(key=self.rank)

    def rank(self, block: int) -> float:
        return self.uses[block] / self.sizes[block] if block in self.uses else -1.0


class HitsModel(Model):
    make_pool = HitsPool

    def op_config(self, op: dict[str, Any]) -> dict[str, Any]:
        return super().op_config({name: value for name, value in op.items() if name != "eviction"})


def windows_walk(seed: int, count: int) -> int:
    """``count`` operations on groups of which one at least has a window; returns how many cached blocks were evicted."""
    rng = random.Random(seed)
    while True:
        family = draw_family(rng.choice)
        kinds = {group["type"] for group in family.config["groups"]}
        if kinds <= KINDS and kinds - {"full", "mla"} and family.config["caching"]:
            break
    family.config["eviction"] = ORDER
    model = HitsModel()
    for _ in Explorer(family, seed, model).operations(count):
        pass
    assert isinstance(model.pool, HitsPool)
    return model.pool.evictions


TIGHT = (10, 13, 15, 22)
"""Seeds of walks that evict much."""


@pytest.mark.parametrize("seed", TIGHT)
def test_victims_are_those_of_the_model(seed: int) -> None:
    assert windows_walk(seed, 400) > 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_victims_are_those_of_the_model_at_length() -> None:
    assert sum(windows_walk(seed, 2500) for seed in range(100, 180)) > 5000


@pytest.mark.parametrize("rank", [lambda self, block: 0.0, lambda self, block: float(self.uses.get(block, -1))])
def test_another_eviction_order_is_detected(
    rank: Callable[[HitsPool, int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: with the order of LRU, and with uses that aren't divided by a piece's size."""
    monkeypatch.setattr(HitsPool, "rank", rank)
    with pytest.raises(Mismatch):
        windows_walk(TIGHT[0], 400)
