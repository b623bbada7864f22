"""Prompts share exactly what the trace says they share, and are the same everywhere."""

from __future__ import annotations

from itertools import takewhile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.support import request
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.replay.live.prompts import LOWEST, PromptMaker, body_of
from kvyard.replay.traces import open_trace


def test_are_the_same_on_every_machine() -> None:
    row = request("a", ids=[7, 8], id_block_size=4, input_length=7)
    assert PromptMaker().tokens(row) == [27867, 13612, 3986, 23991, 28582, 27676, 2331]
    assert PromptMaker(seed=1).tokens(row) != PromptMaker().tokens(row)


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(1, 20),
    st.integers(0, 19),
    st.integers(0, 19),
)
def test_share_what_ids_say(one: list[int], other: list[int], size: int, cut: int, cut_other: int) -> None:
    """Ids name all before them, as a trace's do: here a path of choices."""

    def ids(path: list[int]) -> list[int]:
        return [hash(tuple(path[: at + 1])) for at in range(len(path))]

    rows = [
        request(name, ids=ids(path), id_block_size=size, input_length=max(1, len(path) * size - cut % size))
        for name, path, cut in (("a", one, cut), ("b", other, cut_other))
        if path
    ]
    prompts = [PromptMaker().tokens(row) for row in rows]
    for row, prompt in zip(rows, prompts, strict=True):
        assert len(prompt) == row.input_length and min(prompt) >= LOWEST
    if len(prompts) == 2:
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))) * size
        least = min(common, *map(len, prompts))
        assert prompts[0][:least] == prompts[1][:least]
        # Four tokens further, something differs: they are drawn from thousands.
        if min(map(len, prompts)) >= least + 4:
            assert prompts[0][: least + 4] != prompts[1][: least + 4]


def test_a_real_trace_reads_the_same_twice() -> None:
    rows = list(open_trace(CONVERSATION, None, limit=30))
    first = {row.id: PromptMaker().tokens(row) for row in rows}
    assert {row.id: PromptMaker().tokens(row) for row in reversed(rows)} == first
    # The first two share their first id of 512 tokens and no more.
    one, other = first["1"], first["2"]
    assert one[:512] == other[:512] and one[512:516] != other[512:516]


def test_prompts_without_ids_share_nothing() -> None:
    one, other = (PromptMaker().tokens(request(name, input_length=50)) for name in ("a", "b"))
    assert len(one) == len(other) == 50 and not set(zip(one, other, strict=False)) & {(x, x) for x in one[:4]}
    assert PromptMaker().tokens(request("a", input_length=3, tokens=[5, 6, 7])) == [5, 6, 7]


def test_bodies() -> None:
    row = request("a", input_length=2, output_length=0, tokens=[5, 6], priority=2, salt="pepper")
    body = msgspec.json.decode(body_of(row, [5, 6], "mock"))
    assert body["prompt"] == [5, 6] and body["model"] == "mock" and body["stream"] is True
    assert body["max_tokens"] == body["min_tokens"] == 1 and body["ignore_eos"] is True
    assert body["priority"] == 2 and body["cache_salt"] == "pepper"
    assert body["stream_options"] == {"include_usage": True}
    plain = msgspec.json.decode(body_of(request("a", lora="tuned"), [1], "mock", exact=False))
    assert plain["model"] == "tuned" and not {"min_tokens", "ignore_eos", "priority", "cache_salt"} & set(plain)


def test_a_small_vocabulary_is_kept_to() -> None:
    drawn = PromptMaker(vocabulary=1024).tokens(request("a", ids=[1, 2, 3], id_block_size=2000, input_length=5000))
    assert min(drawn) >= 128 and max(drawn) < 1024 and len(set(drawn)) > 800


def test_a_vocabulary_that_is_too_small() -> None:
    with pytest.raises(KvyardError, match="vocabulary"):
        PromptMaker(vocabulary=100)
