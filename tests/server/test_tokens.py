"""Token ids as people write them."""

from __future__ import annotations

import pytest

from kvyard.errors import KvyardError
from kvyard.server.http import Refusal
from kvyard.server.tokens import parse_tokens, render


@pytest.mark.parametrize("text", ["1,2, 3", "1 2\n3", "[1, 2, 3]", " [1,2,3] "])
def test_token_ids_in_any_shape(text: str) -> None:
    assert parse_tokens(text, "x") == [1, 2, 3]


@pytest.mark.parametrize("text", ["1.5", "a", "[1, -2]", "[true]", "[4294967296]", "[1", "[[1]]", '["1"]'])
def test_texts_that_are_no_tokens_are_refused(text: str) -> None:
    with pytest.raises(KvyardError, match=r"^x has "):
        parse_tokens(text, "x")


def test_a_conversation_as_text() -> None:
    """Word for word: a message without content that calls a tool, one in parts, and developers as vLLM takes them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    begin = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    called = '[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]'
    assert render(messages) == f"{begin}{called}<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages, go_on=True) == begin + called
    assert render(messages[:2], ask=False) == begin.removesuffix("<|im_start|>assistant\n")
    assert render([], [{"a": 1}], ask=False) == '<|im_start|>tools\n[{"a":1}]<|im_end|>\n'
    with pytest.raises(Refusal, match=r"messages\[1\]\.content\[0\]"):
        render([{"role": "user"}, {"role": "user", "content": [{"type": "image_url"}]}])
