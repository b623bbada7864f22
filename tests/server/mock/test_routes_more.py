"""Responses, messages, batches and embeddings, by the official client where it knows them, with the engine's cache behind.

That fields are vLLM's own is held by ``test_routes_corpus.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("openai", reason="needs the openai client")

import openai
from tests.server.mock.support import PATIENCE, Served

from kvyard.server.mock.responses import MOST, KeptResponse, ResponseStore

LONG = "The same long prompt, again and again. " * 4


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as fleet:
        yield fleet
        fleet.check()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as made:
        yield made


def events(text: str) -> list[tuple[str, Any]]:
    found = [one.split("\n", 1) for one in text.split("\n\n")[:-1]]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]


def test_a_response_and_what_goes_on_from_it(client: Any) -> None:
    first = client.responses.create(model="mock", input=f"first {LONG}", instructions="Be brief.", max_output_tokens=8)
    assert (first.status, len(first.output_text), first.usage.output_tokens) == ("incomplete", 8, 8)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    again = client.responses.create(model="mock", input="And then?", previous_response_id=first.id, max_output_tokens=4)
    assert again.previous_response_id == first.id
    # Of its prompt, less the instructions, which aren't taken over, and what a block can't hold.
    assert again.usage.input_tokens > first.usage.input_tokens
    third = client.responses.create(model="mock", input="And?", previous_response_id=again.id, max_output_tokens=4)
    assert third.usage.input_tokens_details.cached_tokens >= (again.usage.input_tokens - 30) // 16 * 16 > 0


def test_a_response_that_isnt_stored_is_gone(client: Any) -> None:
    first = client.responses.create(model="mock", input="secret", max_output_tokens=2, store=False)
    for ask in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(model="mock", input="x", previous_response_id=first.id),
        lambda: client.responses.cancel(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_a_streamed_response_is_the_whole_one(client: Any) -> None:
    ask = {"model": "mock", "input": "stream", "max_output_tokens": 12}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_response()
    assert made.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert client.responses.retrieve(made.id).output_text == whole.output_text


def test_the_last_responses_are_kept() -> None:
    store = ResponseStore()
    for number in range(MOST + 2):
        store.keep(str(number), KeptResponse({}, []))
    assert store.find("1") is None and store.find("2") is not None and store.find(str(MOST + 1)) is not None


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "name": "f"}]},
        {"background": True},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    ],
)
def test_unsupported_fields_of_responses_are_refused(served: Served, body: dict[str, Any]) -> None:
    said = served.post("/v1/responses", 400, **{"model": "mock", "input": "x", **body})
    assert "this mock" in said["error"]["message"]


def test_messages_say_what_was_cached(served: Served) -> None:
    ask = {
        "model": "mock",
        "max_tokens": 4,
        "system": "Say what was cached.",
        "messages": [{"role": "user", "content": LONG}],
    }
    first, again = (served.post("/v1/messages", **ask) for _ in range(2))
    count = served.post("/v1/messages/count_tokens", **{**ask, "max_tokens": None})["input_tokens"]
    assert count == sum(first["usage"].values()) - 4
    assert first["content"] == again["content"]
    usage = first["usage"]
    assert usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] == count // 16 * 16
    assert usage["cache_read_input_tokens"] <= 16 < again["usage"]["cache_read_input_tokens"] == (count - 1) // 16 * 16
    reply = served.client.post("/v1/messages", json={**ask, "stream": True})
    found = events(reply.text)
    text = "".join(event["delta"]["text"] for name, event in found if name == "content_block_delta")
    assert text == first["content"][0]["text"]
    assert [name for name, _ in found if name != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_a_message_says_why_it_ended(served: Served) -> None:
    ask = {"model": "mock", "max_tokens": 500, "messages": [{"role": "user", "content": "End."}]}
    whole = served.post("/v1/messages", **ask)
    assert whole["stop_reason"] == "end_turn"
    word = whole["content"][0]["text"].split()[1]
    cut = served.post("/v1/messages", **ask, stop_sequences=[word])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", word)
    assert word not in cut["content"][0]["text"]


def test_an_adapter_has_messages_of_its_own(served: Served) -> None:
    served.post("/v1/load_lora_adapter", lora_name="poet", lora_path="/models/poet")
    ask = {"max_tokens": 4, "messages": [{"role": "user", "content": f"poet {LONG}"}]}
    served.post("/v1/messages", model="mock", **ask)
    found = served.post("/v1/messages", model="poet", **ask)
    assert (found["model"], found["usage"]["cache_read_input_tokens"]) == ("poet", 0)
    assert served.post("/v1/messages", 404, model="none", **ask)["type"] == "error"


def test_a_batch_is_its_conversations(served: Served) -> None:
    turns = [[{"role": "user", "content": name}] for name in ("one", "two", "three")]
    batch = served.post("/v1/chat/completions/batch", model="mock", messages=turns, max_tokens=6)
    alone = [served.post("/v1/chat/completions", model="mock", messages=one, max_tokens=6) for one in turns]
    assert [one["message"]["content"] for one in batch["choices"]] == [
        one["choices"][0]["message"]["content"] for one in alone
    ]
    assert batch["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


def test_embeddings(client: Any) -> None:
    found = client.embeddings.create(
        model="mock", input=["one", "two", "one"]
    )  # as base64, unless it is told otherwise
    one, two, again = (item.embedding for item in found.data)
    assert one == again != two and len(one) == 64
    assert sum(number * number for number in one) == pytest.approx(1, abs=1e-5)
    plain = client.embeddings.create(model="mock", input="one", encoding_format="float", dimensions=8)
    assert len(plain.data[0].embedding) == 8
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (9, 9)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="none", input="x")


def test_a_prompt_that_was_embedded_is_cached(served: Served) -> None:
    text = f"embedded {LONG}"
    served.post("/v1/embeddings", model="mock", input=text)
    assert served.cached(text) == len(text) // 16 * 16
