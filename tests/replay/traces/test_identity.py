"""Ids that name prefixes."""

from __future__ import annotations

import pytest

from kvyard.replay.traces.identity import token_ids


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_every_token_counts_for_its_block_and_all_after_it(length: int) -> None:
    tokens = list(range(length))
    ids = token_ids(tokens, 4)
    assert len(ids) == -(-length // 4) == len(set(ids))
    for at in range(length):
        other = token_ids([*tokens[:at], 99, *tokens[at + 1 :]], 4)
        assert [one == two for one, two in zip(ids, other, strict=True)] == [
            block < at // 4 for block in range(len(ids))
        ]
