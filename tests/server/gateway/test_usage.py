"""Token counts that engines write into their answers, wherever they are."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked, gated

from kvyard.server.gateway.usage import SMALL, AnswerTokens, UsageReader, answer_tokens

USAGE = {"prompt_tokens": 70_000, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
BEHIND: dict[str, Any] = {
    "prompt_logprobs": [{"5": {"logprob": -1.0, "decoded_token": '"usage": {"prompt_tokens": 1}'}}] * 500,
    "prompt_token_ids": list(range(70_000)),
}
"""Fields that engines write behind usage where a client asks for them."""


def read_in_pieces(data: bytes, size: int) -> AnswerTokens:
    reader = UsageReader()
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    return reader.tokens


def test_usage_is_read_from_the_end() -> None:
    whole = b'{"choices":[{"text":"\\"usage\\": {\\"cached_tokens\\": 9}"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
    assert answer_tokens(whole) == AnswerTokens(5, 2, None)
    detailed = b'"usage": {"prompt_tokens" : 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}'
    assert answer_tokens(detailed) == AnswerTokens(5, 2, 3)
    stream = b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    assert answer_tokens(stream) == AnswerTokens(7, 1, None)
    assert answer_tokens(b"") == answer_tokens(b'{"usage":null}') == AnswerTokens()
    for strange in (b"9223372036854775807", b"1.5", b"1e9", b"-1"):
        assert answer_tokens(b'{"usage":{"prompt_tokens":%s,"completion_tokens":2}}' % strange) == AnswerTokens(None, 2)


def test_a_whole_answer_is_looked_through_and_what_it_repeats_does_not_count() -> None:
    whole = {"id": "x", "usage": USAGE, **BEHIND, "tools": [{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}]}
    data = json.dumps(whole).encode()
    assert len(data) < SMALL and answer_tokens(data) == AnswerTokens(70_000, 3, 64)
    large = json.dumps({"text": "x" * SMALL, "usage": USAGE, **BEHIND}).encode()
    assert answer_tokens(large) == AnswerTokens(70_000, 3, 64)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 22, 23, 24, 100, 4096, 1 << 20])
@pytest.mark.parametrize("spaces", [True, False])
def test_a_stream_may_be_cut_anywhere(size: int, spaces: bool) -> None:
    separators = (", ", ": ") if spaces else (",", ":")
    events = [{"choices": [], "usage": None}] * 3
    events += [{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}, {"usage": USAGE, **BEHIND}]
    data = b"".join(b"data: %b\n\n" % json.dumps(one, separators=separators).encode() for one in events)
    if size < 7:
        data = data[:1000] + data[-300:]
    assert read_in_pieces(data + b"data: [DONE]\n\n", size) == AnswerTokens(70_000, 3, 64)


def test_counts_that_come_in_two_events_are_one() -> None:
    """As Anthropic's streams have them."""
    stream = (
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":0}}}\n\n'
        b'data: {"type":"content_block_delta"}\n\ndata: {"type":"message_delta","usage":{"output_tokens":5}}\n\n'
    )
    for size in (1, 10, 60, 1000):
        assert read_in_pieces(stream, size) == AnswerTokens(9, 5, None)


def test_reading_takes_no_time_whatever_an_engine_says() -> None:
    """Ten million names and braces: few of them are looked at."""
    for data in (b'"usage"' * 1_000_000, b'"usage":{' * 1_000_000, b"{" * 5_000_000):
        assert answer_tokens(data) == AnswerTokens()


def test_limits_and_promises_count_what_stands_in_the_middle_of_an_answer() -> None:
    rng = random.Random(4)
    whole = json.dumps({"usage": USAGE, **BEHIND}).encode()

    def script(head: str, body: bytes) -> list[bytes]:
        if b'"stream"' not in body:
            return [answer("200 OK", whole)]
        data, pieces = b"data: " + whole + b"\n\ndata: [DONE]\n\n", []
        while data:
            cut = rng.randrange(1, 50_000)
            pieces.append(data[:cut])
            data = data[cut:]
        return chunked(*pieces)

    with ScriptedEngine(script) as engine, gated(engine) as gate:
        gate.ready(1)
        for stream in ({}, {"stream": True}):
            gate.complete("x", **stream)
        found = gate.metrics()
        assert found['kvyard_gateway_reported_prompt_tokens_total{model="odd"}'] == 140_000
        assert found['kvyard_gateway_reported_cached_tokens_total{model="odd"}'] == 128
        assert found['kvyard_gateway_output_tokens_total{model="odd"}'] == 6
