"""The model answers what vLLM answered, operation by operation; and it keeps its own books straight."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.blocks.model import NULL, Model, digest
from tests.blocks.record_golden import FAMILIES, walk

HERE = Path(__file__).resolve().parent
OURS = sorted((HERE.parent / "golden" / "blocks").glob("*.xz"))
SHARED = HERE.parents[2] / "shared" / "golden"
OTHERS = [path for path in sorted(SHARED.rglob("*.xz")) if path.name not in {ours.name for ours in OURS}]


@pytest.mark.parametrize("path", [*OURS, *OTHERS], ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_answers_like_the_golden_log(path: Path) -> None:
    model = Model()
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            op, expected = record["op"], record["result"]
            if op["op"] == "config":
                for name in ("vllm", "coordinator", "managers"):  # names of vLLM's own parts
                    expected.pop(name)
            answer = json.loads(json.dumps(model.apply(op)))
            different = {k for k in answer.keys() | expected.keys() if answer.get(k) != expected.get(k)}
            assert not different, f"line {number}, {op}: " + "; ".join(
                f"{k} should be {expected.get(k)}, is {answer.get(k)}" for k in sorted(different)
            )


def test_there_are_logs_of_every_family() -> None:
    assert {path.name.split("@")[0] for path in OURS} >= FAMILIES.keys()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_books_balance_on_a_walk(name: str) -> None:
    """What must hold after every operation, whatever vLLM does: counts, capacity, and a mirror built from events."""
    model, mirror = Model(), Counter[tuple[int, Any]]()

    def apply(op: dict[str, Any]) -> dict[str, Any]:
        result = model.apply(op)
        held = Counter(b for group in model.groups for table in group.tables.values() for b in table if b != NULL)
        held += Counter(b for group in model.groups for pair in group.copies for b in pair)
        assert held == Counter({b: n for b, n in model.pool.refs.items() if n})
        assert sorted([*model.pool.queue, *held]) == list(range(1, model.pool.count))
        if op["op"] == "take_events" and model.pool.events is not None:
            follow(mirror, result["events"])
            held_keys = {(group, shown(model, h)): len(blocks) for (group, h), blocks in model.pool.holders.items()}
            if not FAMILIES[name].report:  # reports of hits look like stores
                assert +mirror == Counter(held_keys)
        return result

    assert sum(1 for _ in walk(apply, FAMILIES[name], seed=7, steps=30)) > 100


def follow(mirror: Counter[tuple[int, Any]], events: list[dict[str, Any]]) -> None:
    for event in events:
        if event["type"] == "AllBlocksCleared":
            mirror.clear()
        else:
            change = 1 if event["type"] == "BlockStored" else -1
            for hash_ in event["block_hashes"]:
                mirror[event["group_idx"], hash_] += change


def shown(model: Model, hash_: bytes) -> Any:
    """A hash as it stands in an answer."""
    value = model.pool.on_wire(hash_)
    return value.hex() if isinstance(value, bytes) else value


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_hash_vectors() -> None:
    seed = digest("vllm-none-hash")
    assert seed.hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    model = Model()
    model.apply({"op": "config", "block_size": 4})
    first, second = model.apply({"op": "new", "req": "a", "tokens": [1, 2, 3, 4, 5, 6, 7, 8]})["hashes"]
    assert first == "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"
    assert second == "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1"
    assert model.pool.on_wire(bytes.fromhex(first)) == 9561501211280363793
    (salted,) = model.apply({"op": "new", "req": "b", "tokens": [1, 2, 3, 4], "salt": "tenant-a"})["hashes"]
    assert salted.startswith("0e172de9") and salted.endswith("3cae")


def test_keyless_blocks_are_reused_first_and_chains_lose_their_tail_first() -> None:
    model = Model()
    model.apply({"op": "config", "num_blocks": 11, "block_size": 16, "trace": True})
    model.apply({"op": "new", "req": "a", "tokens": list(range(55))})
    assert model.apply({"op": "allocate", "req": "a", "num_new_tokens": 55})["blocks"] == [[1, 2, 3, 4]]
    model.apply({"op": "new", "req": "b", "tokens": [*range(48), 900, 901]})
    assert model.apply({"op": "get_computed", "req": "b"})["hit_tokens"] == 48
    assert model.apply({"op": "allocate", "req": "b", "num_new_tokens": 2})["blocks"] == [[1, 2, 3, 5]]
    assert model.apply({"op": "free", "req": "a"})["queue"] == [4, 6, 7, 8, 9, 10]
    assert model.apply({"op": "free", "req": "b"})["queue"] == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


@pytest.mark.parametrize(
    ("cached", "hit"),
    [("T", 1), ("TF", 1), ("TTF", 2), ("TTTF", 3), ("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8), ("FFF", 0)],
)
def test_a_window_hit_needs_its_tail_only(cached: str, hit: int) -> None:
    model = Model()
    group = {"type": "sliding_window", "window": 4}
    model.apply({"op": "config", "num_blocks": 40, "block_size": 2, "groups": [group], "max_in_flight_tokens": 0})
    text = list(range(2 * len(cached)))
    model.apply({"op": "new", "req": "a", "tokens": text})
    blocks = model.apply({"op": "allocate", "req": "a", "num_new_tokens": len(text)})["blocks"][0]
    model.apply({"op": "evict", "blocks": [b for b, flag in zip(blocks, cached, strict=True) if flag == "F"]})
    model.apply({"op": "new", "req": "b", "tokens": [*text, 99]})
    found = model.apply({"op": "get_computed", "req": "b"})
    assert found["hit_tokens"] == 2 * hit
    needed = 0 if hit == 0 else min(hit, 2)
    assert found["hit_blocks"] == [[NULL] * (hit - needed) + blocks[hit - needed : hit]]


def test_every_group_holds_its_hits_before_any_group_takes_blocks() -> None:
    """31 blocks, two groups, 5 hits, 2 blocks loaded from elsewhere and 1 new block each."""
    model = Model()
    window = {"type": "sliding_window", "window": 1000}
    model.apply({"op": "config", "num_blocks": 31, "block_size": 4, "groups": [window, {"type": "full"}]})
    text = list(range(20))
    model.apply({"op": "new", "req": "a", "tokens": text})
    model.apply({"op": "allocate", "req": "a", "num_new_tokens": 20})
    model.apply({"op": "free", "req": "a"})
    model.pool.queue.sort()  # the hits are what would be handed out next
    model.apply({"op": "new", "req": "b", "tokens": [*text, *range(50, 62)]})
    assert model.apply({"op": "get_computed", "req": "b"})["hit_tokens"] == 20
    result = model.apply({"op": "allocate", "req": "b", "num_new_tokens": 4, "num_external": 8})
    assert result["blocks"] == [[1, 2, 3, 4, 5, 11, 12, 15], [6, 7, 8, 9, 10, 13, 14, 16]]
    assert result["num_free"] == 14


def test_a_failed_allocation_changes_nothing_but_what_left_the_window() -> None:
    model = Model()
    groups = [{"type": "full"}, {"type": "sliding_window", "window": 4}]
    model.apply({"op": "config", "num_blocks": 11, "block_size": 4, "groups": groups, "trace": True})
    model.apply({"op": "new", "req": "a", "tokens": list(range(40))})
    before = model.apply({"op": "allocate", "req": "a", "num_new_tokens": 16})
    assert before["blocks"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    after = model.apply({"op": "allocate", "req": "a", "num_new_tokens": 24})
    assert after["allocated"] is False
    assert model.tables("a") == [[1, 2, 3, 4], [0, 0, 0, 8]]
    assert after["queue"] == [9, 10, 7, 6, 5]
