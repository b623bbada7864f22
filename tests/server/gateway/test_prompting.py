"""From a body to the ids of its prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvyard import openai
from kvyard.server.gateway.prompting import PeekedBody, PeekedCompletion, PeekedPrompt, Prompting, read_body
from kvyard.server.http import Refusal


def test_fields_read_of_a_request() -> None:
    found = read_body(openai.COMPLETIONS, b'{"model":"m","prompt":[1,2],"other":1}')
    assert isinstance(found, PeekedCompletion) and msgspec.json.decode(found.prompt) == [1, 2]
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


def test_template_arguments_reach_tokenize() -> None:
    """As vLLM puts it together for the chat itself: /tokenize has neither documents nor reasoning_effort."""
    asked: list[dict[str, Any]] = []

    async def engine(body: dict[str, Any]) -> list[int] | None:
        asked.append(msgspec.json.decode(msgspec.json.encode(body)))
        return list(range(10))

    def variables(**fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "h"}], **fields}
        asyncio.run(Prompting("engine", engine).prompts(read_body(openai.CHAT, msgspec.json.encode(body))))
        return asked.pop().get("chat_template_kwargs")

    assert variables() is None
    assert variables(reasoning_effort="high") == {"reasoning_effort": "high", "enable_thinking": True}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    own = {"enable_thinking": False, "reasoning_effort": "low", "documents": [1]}
    assert variables(reasoning_effort="high", documents=[2], chat_template_kwargs=own) == {
        "enable_thinking": False,
        "reasoning_effort": "high",
        "documents": [2],
    }
    body = b'{"messages":[{"role":"user","content":"h"}],"add_special_tokens":true}'
    asyncio.run(Prompting("engine", engine).prompts(read_body(openai.CHAT, body)))
    assert asked.pop()["add_special_tokens"] is True
    bad = b'{"messages":[],"chat_template_kwargs":[]}'
    assert asyncio.run(Prompting("engine", engine).prompts(read_body(openai.CHAT, bad))) == [] and not asked


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 3}, [2, 3, 4]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 0}, []),
        ({"truncate_prompt_tokens": -1}, None),
    ],
)
def test_prompts_that_are_cut(fields: dict[str, int], left: list[int] | None) -> None:
    async def engine(body: dict[str, Any]) -> list[int] | None:
        return None

    body = msgspec.json.encode({"prompt": [1, 2, 3, 4], **fields})
    found = asyncio.run(Prompting("engine", engine).prompts(read_body(openai.COMPLETIONS, body)))
    assert found == ([] if left is None else [left])


@pytest.mark.parametrize(
    ("path", "fields", "reads"),
    [
        (openai.COMPLETIONS, {}, True),
        (openai.COMPLETIONS, {"echo": True}, True),
        (openai.COMPLETIONS, {"logprobs": 3}, True),
        (openai.COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (openai.COMPLETIONS, {"prompt_logprobs": 0}, False),
        (openai.CHAT, {"prompt_logprobs": 1}, False),
        (openai.CHAT, {"logprobs": True, "top_logprobs": 2}, True),
    ],
)
def test_requests_that_read_no_cache(path: str, fields: dict[str, Any], reads: bool) -> None:
    found = read_body(path, msgspec.json.encode({"prompt": [1], **fields}))
    assert isinstance(found, PeekedPrompt) and found.reads_cache is reads
