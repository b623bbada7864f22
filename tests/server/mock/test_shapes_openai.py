"""The official client can't tell it from a vLLM endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("openai", reason="needs the openai client")

import openai
from tests.server.mock.support import PATIENCE, Served

PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(engine={"scheduling_policy": "priority"}, tool_call_rate=1.0) as fleet:
        yield fleet
        fleet.check()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "mock" and model.max_model_len == 2048


def test_completion(client: Any) -> None:
    reply = client.completions.create(model="mock", prompt=PROMPT, max_tokens=24)
    (choice,) = reply.choices
    assert len(choice.text) == 24 and choice.finish_reason == "length"  # bytes are tokens
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (16, 24, 40)
    again = client.completions.create(model="mock", prompt=PROMPT, max_tokens=24)
    assert again.choices[0].text == choice.text and again.id != reply.id


def test_token_ids_are_the_same_prompt(client: Any) -> None:
    text = client.completions.create(model="mock", prompt=PROMPT, max_tokens=24)
    ids = client.completions.create(model="mock", prompt=list(PROMPT.encode()), max_tokens=24)
    assert ids.choices[0].text == text.choices[0].text
    several = client.completions.create(model="mock", prompt=[PROMPT, "Two"], n=2, max_tokens=24)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == text.choices[0].text != several.choices[1].text
    assert several.usage.prompt_tokens == 16 + 3 and several.usage.completion_tokens == 96
    mixed = client.completions.create(model="mock", prompt=[list(PROMPT.encode()), [84, 119, 111]], max_tokens=24)
    assert [mixed.choices[0].text, mixed.choices[1].text] == [several.choices[0].text, several.choices[2].text]


def test_streamed_completion_says_the_same(client: Any) -> None:
    whole = client.completions.create(model="mock", prompt=PROMPT, max_tokens=24, n=2)
    texts, reasons, usage = ["", ""], [None, None], None
    options = {"include_usage": True}
    for chunk in client.completions.create(
        model="mock", prompt=PROMPT, max_tokens=24, n=2, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert reasons[choice.index] is None, "nothing follows the last chunk"
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices] and reasons == ["length", "length"]
    assert usage is not None and usage.completion_tokens == 48


def test_chat(client: Any) -> None:
    reply = client.chat.completions.create(model="mock", messages=MESSAGES, max_completion_tokens=400)
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert reply.usage.completion_tokens == len(choice.message.content)
    text, roles, finish = "", [], None
    for chunk in client.chat.completions.create(model="mock", messages=MESSAGES, max_tokens=400, stream=True):
        (one,) = chunk.choices
        text += one.delta.content or ""
        roles.append(one.delta.role)
        finish = one.finish_reason
    assert text == choice.message.content and finish == choice.finish_reason
    assert roles[0] == "assistant" and not any(roles[1:])


def test_seed_and_index_change_the_answer(client: Any) -> None:
    def say(**more: Any) -> list[str]:
        reply = client.chat.completions.create(model="mock", messages=MESSAGES, max_tokens=30, **more)
        return [choice.message.content for choice in reply.choices]

    assert say(seed=1) == say(seed=1) != say(seed=2)
    one, two, three = say(n=3)
    assert len({one, two, three}) == 3 and say() == [one]


def test_stop(client: Any) -> None:
    full = client.completions.create(model="mock", prompt=PROMPT, max_tokens=60).choices[0].text
    word = full[20:24]
    at = full.index(word)
    reply = client.completions.create(model="mock", prompt=PROMPT, max_tokens=60, stop=["~~", word])
    assert reply.choices[0].text == full[:at] and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].stop_reason == word and reply.usage.completion_tokens == at + 4
    text = ""
    for chunk in client.completions.create(model="mock", prompt=PROMPT, max_tokens=60, stop=word, stream=True):
        text += chunk.choices[0].text
    assert text == full[:at]
    kept = client.completions.create(
        model="mock", prompt=PROMPT, max_tokens=60, stop=word, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == full[: at + 4]
    token = client.completions.create(
        model="mock", prompt=PROMPT, max_tokens=60, extra_body={"stop_token_ids": [ord(full[5])]}
    )
    assert token.choices[0].text == full[: full.index(full[5]) + 1]


def test_answers_end_before_max_tokens_unless_ignore_eos(client: Any) -> None:
    reply = client.chat.completions.create(model="mock", messages=MESSAGES)
    assert reply.choices[0].finish_reason == "stop"
    more = {"ignore_eos": True}
    reply = client.chat.completions.create(model="mock", messages=MESSAGES, max_tokens=700, extra_body=more)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 700


def test_logprobs(client: Any) -> None:
    reply = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
    ).choices[0]
    assert "".join(one.token for one in reply.logprobs.content) == reply.message.content
    for one in reply.logprobs.content:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].token == one.token
        assert 0 > one.logprob > one.top_logprobs[1].logprob and one.bytes == list(one.token.encode())
    likely = client.completions.create(model="mock", prompt="Hey", max_tokens=5, logprobs=2, echo=True).choices[0]
    assert likely.text.startswith("Hey") and likely.logprobs.token_logprobs[0] is None
    assert "".join(likely.logprobs.tokens) == likely.text and likely.logprobs.text_offset == list(range(8))
    assert len(likely.logprobs.top_logprobs[4]) == 2
    assert set(likely.logprobs.top_logprobs[1]) == {"e", "l"}, "others are tokens of the vocabulary as well"
    offsets = [
        at
        for chunk in client.completions.create(model="mock", prompt="Hey", max_tokens=5, logprobs=1, stream=True)
        for at in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == list(range(5))


def test_tools(client: Any) -> None:
    reply = client.chat.completions.create(model="mock", messages=MESSAGES, tools=TOOLS).choices[0]
    (call,) = reply.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and reply.finish_reason == "tool_calls" and reply.message.content is None
    assert set(arguments) == {"city", "unit", "days"} and arguments["unit"] in ("C", "F")
    name, text, finish = "", "", None
    for chunk in client.chat.completions.create(model="mock", messages=MESSAGES, tools=TOOLS, stream=True):
        for made in chunk.choices[0].delta.tool_calls or ():
            name += made.function.name or ""
            text += made.function.arguments
        finish = chunk.choices[0].finish_reason
    assert (name, json.loads(text), finish) == ("get_weather", arguments, "tool_calls")
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    named = client.chat.completions.create(model="mock", messages=MESSAGES, tools=TOOLS, tool_choice=chosen).choices[0]
    assert named.message.tool_calls and named.finish_reason == "stop"  # as vLLM has it
    after = [*MESSAGES, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    after.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert client.chat.completions.create(model="mock", messages=after, tools=TOOLS).choices[0].message.content
    none = client.chat.completions.create(model="mock", messages=MESSAGES, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content


def test_json_by_schema(client: Any) -> None:
    schema = {
        "$defs": {"age": {"type": "integer", "minimum": 3, "maximum": 5}},
        "type": "object",
        "properties": {"age": {"$ref": "#/$defs/age"}, "names": {"type": "array", "items": {"type": "string"}}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = client.chat.completions.create(model="mock", messages=MESSAGES, response_format=wanted).choices[0]
    found = json.loads(reply.message.content)
    assert 3 <= found["age"] <= 5 and all(isinstance(name, str) for name in found["names"])


def test_token_ids_come_back(client: Any) -> None:
    more = {"return_token_ids": True, "priority": 3}
    reply = client.chat.completions.create(model="mock", messages=MESSAGES, max_tokens=6, extra_body=more)
    assert bytes(reply.choices[0].token_ids).decode() == reply.choices[0].message.content
    assert bytes(reply.prompt_token_ids).decode().endswith("How are you?<|im_end|>\n<|im_start|>assistant\n")


def test_errors(client: Any) -> None:
    def create(**more: Any) -> Any:
        return client.completions.create(**{"model": "mock", "prompt": PROMPT, **more})

    with pytest.raises(openai.NotFoundError) as none:
        create(model="other")
    assert none.value.body["type"] == "NotFoundError" and none.value.body["param"] == "model"
    for param, more in {
        "max_tokens": {"max_tokens": 0},
        "temperature": {"temperature": -1},
        "top_p": {"top_p": 1.5},
        "logprobs": {"logprobs": 50},
        "prompt": {"prompt": ""},
        "stream_options": {"stream_options": {"include_usage": True}},
        "cache_salt": {"extra_body": {"cache_salt": ""}},
        "body.response_format.type": {"extra_body": {"response_format": {"type": "poem"}}},
    }.items():
        with pytest.raises(openai.BadRequestError) as bad:
            create(**more)
        assert bad.value.body["param"] == param and bad.value.body["code"] == 400, (param, bad.value.body)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        create(max_tokens=2040)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        create(prompt=[1] * 3000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="type text only"):
        client.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
        )
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="mock", messages=MESSAGES, tool_choice="required")


def test_many_at_once(served: Served) -> None:
    """Nothing is lost or doubled, and each stream has its own answer."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", timeout=PATIENCE) as client:

            async def one(number: int) -> str:
                text = ""
                stream = await client.completions.create(
                    model="mock", prompt=f"number {number}", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return list(await asyncio.gather(*(one(number) for number in range(30))))

    texts = asyncio.run(run())
    assert all(len(text) == 20 for text in texts) and len(set(texts)) == 30
