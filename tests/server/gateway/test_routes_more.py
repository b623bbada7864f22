"""Responses, messages, batches, embeddings and adapters through a gateway, with mock engines that serve them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("openai", reason="needs the openai client")
pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")

import openai
from tests.server.gateway.support import PATIENCE, Gated, front
from tests.server.mock.corpus import TOKENIZER

from kvyard.server.gateway.usage import AnswerTokens, answer_tokens

pytestmark = pytest.mark.zmq

LONG = "The licence grants you rights, and asks for little in return. " * 8


@pytest.fixture(scope="module")
def gated() -> Iterator[Gated]:
    # A tokenizer that begins texts with a token of its own; conversations are read by asking an engine.
    with front(3, mock={"tokenizer": str(TOKENIZER)}, tokenizer="engine") as (found, _):
        yield found


@pytest.fixture(scope="module")
def client(gated: Gated) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as made:
        yield made


def promised(gated: Gated) -> tuple[int, int]:
    tally = gated.gateway.traffic.promises
    return tally.promised, tally.delivered


def foreseen(gated: Gated, path: str, body: dict[str, Any]) -> int:
    """Blocks that some engine was announced to have of a prompt."""
    found = gated.client.post("/explain", json={"path": path, "body": body}).json()
    best = max(found["candidates"], key=lambda one: sum(one["tiers"].values()))
    return 0 if best["predicted"] else int(sum(best["tiers"].values()))


def test_responses_go_where_their_prompt_is_and_promises_hold(gated: Gated, client: Any) -> None:
    ask = {"model": "mock", "input": f"responses {LONG}", "instructions": "Be brief."}
    client.responses.create(**ask, max_output_tokens=2)
    eventually(lambda: foreseen(gated, "/v1/responses", ask))
    before = promised(gated)
    for streams in (False, True):
        if streams:
            with client.responses.stream(**ask, max_output_tokens=2) as stream:
                made = stream.get_final_response()
        else:
            made = client.responses.create(**ask, max_output_tokens=2)
        assert made.usage.input_tokens_details.cached_tokens > 64
    gated.idle()
    given, kept = (after - was for after, was in zip(promised(gated), before, strict=False))
    assert given == kept == 2 * made.usage.input_tokens_details.cached_tokens


def test_a_response_that_begins_is_no_first_token(gated: Gated, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before its prompt is computed: how fast engines are is learned from tokens."""
    said: list[bool] = []
    (pool,) = gated.gateway.members.pools.values()
    real = type(pool).first_token

    def first_token(self: Any, id_: object, seen: bool = True) -> None:
        said.append(seen)
        real(self, id_, seen)

    monkeypatch.setattr(type(pool), "first_token", first_token)
    with client.responses.stream(model="mock", input="first", max_output_tokens=2) as stream:
        stream.get_final_response()
    with gated.stream("first") as reply:
        reply.read()
    gated.idle()
    assert said == [False, True]


def test_a_continuation_finds_its_response(client: Any) -> None:
    for number in range(6):
        first = client.responses.create(model="mock", input=f"chain {number}", max_output_tokens=2)
        again = client.responses.create(model="mock", input="On.", previous_response_id=first.id, max_output_tokens=2)
        assert client.responses.retrieve(again.id).previous_response_id == first.id


def test_messages_go_where_their_prompt_is_and_promises_hold(gated: Gated) -> None:
    ask = {"model": "mock", "system": "Be brief.", "messages": [{"role": "user", "content": f"messages {LONG}"}]}
    gated.post("/v1/messages", **ask, max_tokens=2)
    eventually(lambda: foreseen(gated, "/v1/messages", ask))
    before = promised(gated)
    whole = gated.post("/v1/messages", **ask, max_tokens=2).json()
    streamed = gated.post("/v1/messages", **ask, max_tokens=2, stream=True)
    assert streamed.text.endswith('message_stop"}\n\n')
    gated.idle()
    given, kept = (after - was for after, was in zip(promised(gated), before, strict=False))
    assert given == kept == 2 * whole["usage"]["cache_read_input_tokens"] > 0
    count = gated.post("/v1/messages/count_tokens", **ask).json()["input_tokens"]
    assert count == sum(whole["usage"].values()) - 2


def test_batches_and_embeddings_reach_an_engine(gated: Gated, client: Any) -> None:
    turns = [[{"role": "user", "content": name}] for name in ("one", "two")]
    batch = gated.post("/v1/chat/completions/batch", model="mock", messages=turns, max_tokens=3).json()
    assert [one["index"] for one in batch["choices"]] == [0, 1]
    assert len(client.embeddings.create(model="mock", input="one").data[0].embedding) == 64
    gated.idle()


def test_an_adapter_is_loaded_everywhere_and_its_name_counts_at_once(gated: Gated, client: Any) -> None:
    done = gated.post("/v1/load_lora_adapter", lora_name="poet", lora_path="/models/poet").json()
    assert done == {"lora_name": "poet", "engines": list(gated.engines())}
    assert "poet" in [one.id for one in client.models.list().data]
    assert client.completions.create(model="poet", prompt="Once", max_tokens=2).model == "poet"
    again = gated.post("/v1/load_lora_adapter", 400, lora_name="poet", lora_path="/models/poet").json()
    assert again["error"]["message"].count("already been loaded") == len(gated.engines())
    gated.post("/v1/unload_lora_adapter", lora_name="poet")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="poet", prompt="Once", max_tokens=2)
    gated.post("/v1/load_lora_adapter", 400, lora_path="/models/poet")
    gated.post("/v1/load_lora_adapter", 404, lora_name="x", lora_path="/x", model="none")


def test_clients_dont_load_adapters() -> None:
    with Gated(token="client", admin_token="admin") as gated:
        gated.post("/v1/load_lora_adapter", 401, lora_name="x", lora_path="/x")


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (b'"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}', (9, 2, 4)),
        (b'"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}', (9, 2, 4)),
        (
            b'"usage":{"input_tokens":1,"output_tokens":2,"cache_creation_input_tokens":4,"cache_read_input_tokens":4}',
            (9, 2, 4),
        ),
        (b'"usage":{"input_tokens":9,"output_tokens":0}', (9, 0, None)),
        (b'{"no":1}', (None, None, None)),
    ],
)
def test_usage_is_read_from_an_answers_tail(tail: bytes, tokens: tuple[int | None, ...]) -> None:
    assert answer_tokens(tail) == AnswerTokens(*tokens)
