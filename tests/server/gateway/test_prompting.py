"""From a body to the ids of its prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvyard import openai
from kvyard.server.gateway.prompting import PeekedBody, PeekedCompletion, Prompting, read_body
from kvyard.server.http import Refusal


def test_what_is_read_of_a_request() -> None:
    found = read_body(openai.COMPLETIONS, b'{"model":"m","prompt":[1,2],"other":1}')
    assert isinstance(found, PeekedCompletion) and found.prompt == [1, 2]
    # A field of the wrong type is the engine's to refuse; only the name is read then.
    assert type(read_body(openai.COMPLETIONS, b'{"model":"m","stream":"yes"}')) is PeekedBody
    assert read_body("/v1/embeddings", b'{"model":"m","input":[]}').model == "m"
    for bad in (b"", b"[]", b"5", b'{"model":5}', b"\xff", b'{"a":', b'{"stream":"x","n":NaN}'):
        with pytest.raises(Refusal) as refused:
            read_body(openai.CHAT, bad)
        assert refused.value.status == 400


def test_prompts() -> None:
    asked: list[dict[str, Any]] = []

    async def engine(body: dict[str, Any]) -> list[int] | None:
        asked.append(body)
        return [1, 2, 3] if body.get("prompt") != "fail" else None

    def read(how: str, path: str, body: bytes) -> list[list[int]]:
        return asyncio.run(Prompting(how, engine).prompts(read_body(path, body)))

    text, chat = openai.COMPLETIONS, openai.CHAT
    assert read("bytes", text, b'{"prompt":"ab"}') == [[97, 98]] and not asked
    assert read("bytes", text, b'{"prompt":["a",[5,6]]}') == [[97], [5, 6]]
    assert read("engine", text, b'{"prompt":[7,8]}') == [[7, 8]] and not asked
    assert read("engine", text, b'{"prompt":"x","add_special_tokens":false}') == [[1, 2, 3]]
    assert asked.pop() == {"model": None, "prompt": "x", "add_special_tokens": False}
    assert read("engine", text, b'{"prompt":"fail"}') == []
    asked.clear()
    messages = b'{"model":"m","messages":[{"role":"user","content":"h"}],"tools":[1],"chat_template_kwargs":{"a":1}}'
    assert read("engine", chat, messages) == [[1, 2, 3]]
    sent = msgspec.json.decode(msgspec.json.encode(asked.pop()))
    assert sent == {
        "model": "m",
        "messages": [{"role": "user", "content": "h"}],
        "tools": [1],
        "chat_template_kwargs": {"a": 1},
    }
    assert read("bytes", chat, b'{"messages":[{"role":"user","content":"h"}]}') != []
    for odd in (
        b'{"messages":[{"content":5}]}',
        b'{"messages":5}',
        b"{}",
        b'{"messages":[{"role":"u","content":[{}]}]}',
    ):
        assert read("bytes", chat, odd) == []
    image = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}'
    assert read("engine", chat, image) == [] and not asked
    assert read("bytes", "/v1/embeddings", b'{"input":"x"}') == []
