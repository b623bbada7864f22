"""The rules for one stream, over a case that is told what an engine publishes."""

from __future__ import annotations

from typing import Any

import msgspec

from kvyard.server.doctor.case import Case
from kvyard.server.doctor.case_rules import block_size, namespace
from kvyard.server.doctor.finding import Expected

TEXT = list(range(100, 116))


class Told:
    """A case, and the number of the next message."""

    def __init__(self) -> None:
        self.case = Case("tcp://a:1", replay=None, prompt=TEXT)
        self.case.start(0)
        self._seq = 0

    def stored(self, hashes: list[int], tokens: list[int], size: int, rank: int = 0, **fields: Any) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        payload = msgspec.msgpack.encode([1.0, [{**event, **fields}], rank])
        self.case.message([b"", self._seq.to_bytes(8, "big"), payload], self._seq)
        self._seq += 1


def test_the_expected_block_size_may_be_that_of_any_group() -> None:
    told = Told()
    told.stored([1, 2], TEXT[:8], 4, group_idx=0)
    told.stored([3], TEXT[:8], 8, group_idx=1)
    for size in (4, 8):
        assert not list(block_size(told.case, Expected(block_size=size)))
    (found,) = block_size(told.case, Expected(block_size=16))
    assert "4, 8" in found.seen


def test_one_rank_that_has_the_prompt_under_a_salt_is_enough() -> None:
    told = Told()
    told.stored([1, 2, 3], TEXT[:12], 4, extra_keys=[["tenant"], None, None])
    told.stored([4, 5], [7] * 8, 4, rank=1)
    assert told.case.blind_match() == 12
    (found,) = namespace(told.case, Expected())
    assert "with a salt" in found.seen
