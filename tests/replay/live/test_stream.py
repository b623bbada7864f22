"""Streams of completion chunks, however the network cuts them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.replay.live.stream import MOST, AnswerStream, StreamError


def event(text: str | None = None, finish: str | None = None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": choices, **more}).encode() + b"\n\n"


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 8},
}
WHOLE = event("Hi") + b": a comment\n\n" + event("") + event(" there") + event("", "length")
WHOLE += event(usage=USAGE) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12), st.booleans())
def test_wherever_it_is_cut(cuts: list[int], windows: bool) -> None:
    data = WHOLE.replace(b"\n", b"\r\n") if windows else WHOLE
    places = [0, *sorted(cuts), len(data)]
    stream = AnswerStream()
    came = sum(stream.feed(data[low:high]) for low, high in pairwise(places))
    assert came == stream.tokens == 3
    assert stream.done and stream.finish == "length"
    assert stream.usage is not None and stream.usage.completion_tokens == 4 and stream.usage.cached_tokens == 8


def test_an_answer_of_one_chunk_counts() -> None:
    stream = AnswerStream()
    assert stream.feed(event("", "stop")) == 1 and stream.finish == "stop"


def test_several_lines_make_one_event() -> None:
    stream = AnswerStream()
    assert stream.feed(b'event: x\ndata: {"choices":\n\n') == 0  # not an event that begins with its data
    assert stream.feed(b'data: {"choices":\ndata: [{"text": "a"}]}\n\n') == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'data: {"error": {"message": "out of\\n luck", "code": 500}}\n\n', "out of luck"),
        (b'data: {"error": "plain."}\n\n', "plain"),
        (b"data: {broken\n\n", "can't be read"),
        (b'{"choices": []}\n\n', "not an event stream"),
        (b"data: " + b"x" * (MOST + 1), "more than"),
    ],
)
def test_malformed_answers_are_failures(data: bytes, words: str) -> None:
    with pytest.raises(StreamError, match=words):
        AnswerStream().feed(data)


def test_usage_that_says_nothing_of_caches() -> None:
    stream = AnswerStream()
    stream.feed(event(usage={"prompt_tokens": 3, "completion_tokens": 1}))
    assert stream.usage is not None and stream.usage.cached_tokens is None
