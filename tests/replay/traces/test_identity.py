"""Ids that name prefixes."""

from __future__ import annotations

import pytest

from kvyard.replay.traces import TraceError, TraceRequest
from kvyard.replay.traces.identity import cumulative, token_ids


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


@pytest.mark.parametrize("other", [[3, 2], [2], [1, 3, 2], [1, 2, 4, 3]])
def test_an_id_that_follows_another_than_before_names_a_single_block(other: list[int]) -> None:
    rows = [
        TraceRequest(str(at), 0, len(ids), 1, ids=ids, id_block_size=1) for at, ids in enumerate(([1, 2, 3], other))
    ]
    with pytest.raises(TraceError, match=r"an id must name all that comes before it"):
        list(cumulative(rows))


def test_ids_that_name_prefixes_pass() -> None:
    prompts = ([1, 2, 3], [1, 2], [1, 2, 4], [5], [1, 2, 3, 6])
    rows = [TraceRequest(str(at), 0, len(ids), 1, ids=ids, id_block_size=1) for at, ids in enumerate(prompts)]
    assert list(cumulative(rows)) == rows
