"""Which chunk goes next: held against an obvious model, order by order."""

from __future__ import annotations

import random
import sys

import pytest

from kvyard.blocks import Retention
from kvyard.blocks.extent import DEFAULT_PRIORITY
from kvyard.blocks.request import wish_at
from kvyard.blocks.spec import ConfigError
from kvyard.vllm.ranking import ChunkRanking, RetentionError, read_wishes


class Model:
    """A list that is sorted whenever it is asked for: by priority where that counts, then by last use."""

    def __init__(self, by_priority: bool) -> None:
        self.by_priority = by_priority
        self.chunks: dict[bytes, list[int]] = {}  # priority, last use, pinned
        self.uses = 0

    def use(self, key: bytes) -> None:
        self.uses += 1
        self.chunks[key][1] = self.uses

    def line(self) -> list[bytes]:
        rank = (lambda key: self.chunks[key][:2]) if self.by_priority else (lambda key: self.chunks[key][1:2])
        return sorted(self.chunks, key=rank)


@pytest.mark.parametrize("order", ["lru", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_a_ranking_equals_a_sorted_list(order: str, seed: int) -> None:
    rng = random.Random(seed)
    ranking: ChunkRanking[int] = ChunkRanking(order, now=lambda: 0)
    model = Model(ranking.reads_priorities)
    evicted = refused = 0
    for step in range(2000):
        keys = rng.sample([bytes([n]) for n in range(40)], rng.randint(1, 6))
        match rng.choice(["insert", "insert", "touch", "pin", "remove", "evict"]):
            case "insert" if keys[0] not in model.chunks:
                priority, pinned = rng.choice([10, DEFAULT_PRIORITY, 80]), rng.random() < 0.5
                ranking.insert(keys[0], step, pinned=pinned, priority=priority)
                model.chunks[keys[0]] = [priority, 0, pinned]
                model.use(keys[0])
            case "touch":
                ranking.touch(keys)
                for key in reversed(keys):
                    if key in model.chunks:
                        model.use(key)
            case "pin" if keys[0] in model.chunks:
                model.chunks[keys[0]][2] = pinned = rng.random() < 0.3
                ranking.pin(keys[0], pinned)
            case "remove" if keys[0] in model.chunks:
                ranking.remove(keys[0])
                del model.chunks[keys[0]]
            case "evict":
                count, protected = rng.randint(1, 5), set(keys)
                wanted = [key for key in model.line() if not model.chunks[key][2] and key not in protected][:count]
                found = ranking.evict(count, protected)
                if len(wanted) < count:
                    assert found is None
                    refused += 1
                else:
                    assert found is not None and [key for key, _ in found] == wanted
                    evicted += count
                    for key in wanted:
                        del model.chunks[key]
        assert list(ranking) == model.line()
        assert all((ranking.get(bytes([n])) is not None) == (bytes([n]) in model.chunks) for n in range(40))
    assert evicted > 50 and refused > 5
    ranking.clear()
    assert list(ranking) == []


def test_a_raised_priority_ends() -> None:
    now = 0
    ranking: ChunkRanking[str] = ChunkRanking("priority", now=lambda: now)
    ranking.insert(b"kept", "a", pinned=False, priority=80, expires=100)
    ranking.insert(b"plain", "b", pinned=False)
    assert list(ranking) == [b"plain", b"kept"]
    now = 100
    ranking.insert(b"later", "c", pinned=False)
    assert list(ranking) == [b"kept", b"plain", b"later"], "by last use"


def test_cleared_chunks_are_released() -> None:
    ranking: ChunkRanking[str] = ChunkRanking("lru", now=lambda: 0)
    key = bytes(random.Random(1).randbytes(32))
    before = sys.getrefcount(key)
    ranking.insert(key, "a", pinned=False)
    assert sys.getrefcount(key) > before
    ranking.clear()
    assert sys.getrefcount(key) == before and list(ranking) == [] and ranking.get(key) is None


def test_orders_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown eviction policy 'best': choose one of"):
        ChunkRanking("best")


def test_retention_ranges_are_read_and_the_last_of_several_counts() -> None:
    wishes = read_wishes(
        [{"start": 0, "stop": None, "priority": 80}, {"start": 64, "stop": 96, "priority": 5, "duration": 9}]
    )
    assert wishes == (Retention(0, None, 80), Retention(64, 96, 5, 9))
    assert [wish_at(wishes, token) for token in (0, 63, 64, 95, 96)] == [
        (80, None),
        (80, None),
        (5, 9),
        (5, 9),
        (80, None),
    ]
    assert read_wishes(None) == () and wish_at((), 7) == (DEFAULT_PRIORITY, None)


@pytest.mark.parametrize("raw", [5, {"start": 0}, [{"start": 0}], [{"start": 0, "stop": None, "priority": 500}], ["x"]])
def test_invalid_retention_is_refused_in_a_sentence(raw: object) -> None:
    with pytest.raises(RetentionError, match="retention must be a list of start, stop, priority and duration"):
        read_wishes(raw)


def test_orders_that_learn_are_refused() -> None:
    """A chunk there is told neither by which request it is used nor where in a prompt it stands."""
    with pytest.raises(
        ConfigError, match="lfu depends on who used a block, which vLLM does not report: choose one of lru, priority"
    ):
        ChunkRanking("lfu")
