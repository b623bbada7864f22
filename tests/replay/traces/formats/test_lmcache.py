"""LMCache's transcripts: prompts share what their texts share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.traces.support import SAMPLES

from kvyard.replay.traces import open_trace
from kvyard.replay.traces.formats.lmcache import text_tokens
from kvyard.replay.traces.info import describe

SESSIONS = SAMPLES / "lmcache"


def test_the_sample_is_recognised_and_in_order() -> None:
    rows = [json.loads(line) for file in SESSIONS.iterdir() for line in file.read_text().splitlines()]
    trace = open_trace(SESSIONS)
    found = list(trace)
    assert trace.format == "lmcache"
    times = sorted(row["timestamp"] for row in rows)
    assert [one.arrival for one in found] == [(time - times[0]) * 1000 for time in times]
    assert {one.session for one in found} == {row["session_id"] for row in rows}
    assert sum(one.input_length for one in found) == sum(-(-len(row["input"].encode()) // 4) for row in rows)
    assert describe(trace).reuse is not None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_tokens_are_equal_as_far_as_texts_are(shared: str, one: str, other: str) -> None:
    texts = [(shared + end).encode() for end in (one, other)]
    first, second = text_tokens(shared + one), text_tokens(shared + other)
    common, exact = _common(first, second), _common(*texts)
    assert exact // 4 <= common <= -(-exact // 4)


def test_rows_without_text_are_left_out_and_wrong_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = {"timestamp": 5, "input": "abcd", "output": "", "session_id": "s"}
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (good, {**good, "input": ""}, {**good, "timestamp": "x"}))
    )
    with pytest.raises(Exception, match="line 3"):
        list(open_trace(path))
    trace = open_trace(path, skip_bad=True)
    assert [(one.input_length, one.output_length) for one in trace] == [(1, 0)]
    assert trace.tally.left_out == {"prompts without text": 1} and trace.tally.skipped == 1
