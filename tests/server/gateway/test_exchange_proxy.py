"""Requests through a gateway: to the client it is the engine, and answers come as the engine wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import Gated, Served, cached, front, worker_of

pytestmark = pytest.mark.zmq

PROMPT = list(range(1000))


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Gated, Served]]:
    with front(2, mock={"loras": ()}) as (gated, served):
        yield gated, served
        gated.idle()
        served.check()


def test_the_openai_client(both: tuple[Gated, Served]) -> None:
    openai = pytest.importorskip("openai")
    gated, _ = both
    with openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mock"]
        messages = [{"role": "user", "content": "Good morning, how are you today?"}]
        whole = client.chat.completions.create(model="mock", messages=messages, max_tokens=12, seed=3)
        parts = client.chat.completions.create(
            model="mock", messages=messages, max_tokens=12, seed=3, stream=True, stream_options={"include_usage": True}
        )
        seen = list(parts)
        text = "".join(part.choices[0].delta.content or "" for part in seen if part.choices)
        assert text == whole.choices[0].message.content
        assert seen[-1].usage is not None and seen[-1].usage.completion_tokens == 12
        found = client.completions.create(model="mock", prompt="Once upon a time", max_tokens=5)
        assert found.usage is not None and found.usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError) as refused:
            client.completions.create(model="nobody", prompt="x")
        assert refused.value.body["type"] == "NotFoundError"
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="mock", prompt="x", max_tokens=-1)


def test_answers_are_the_engines(both: tuple[Gated, Served]) -> None:
    """One request, once directly and once through the gateway."""
    gated, served = both
    headers = {"x-request-id": "same"}
    body = {"prompt": "Tell me", "max_tokens": 6}
    through = gated.client.post("/v1/completions", json=body, headers=headers)
    worker = int(worker_of(through).removeprefix("worker"))
    direct = httpx.post(f"{served.urls[worker]}/v1/completions", json=body, headers=headers, trust_env=False)
    moving = re.compile(r'"(created|cached_tokens)":\d+')
    assert moving.sub("", through.text) == moving.sub("", direct.text)
    assert through.headers["content-type"] == direct.headers["content-type"]


def test_a_prompt_goes_where_it_was(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    first = gated.complete(PROMPT)
    assert cached(first) == 0

    def known() -> bool:
        said = gated.post("/explain", body={"prompt": PROMPT}).json()
        return bool(said["hit_blocks"] == 62 and not any(one["predicted"] for one in said["candidates"]))

    eventually(known)
    for _ in range(3):
        again = gated.complete(PROMPT)
        assert worker_of(again) == worker_of(first) and cached(again) == 992
        assert "hit=62/62" in again.headers["x-kvyard-decision"]
    metrics = gated.metrics()
    assert metrics['kvyard_gateway_predicted_cached_tokens_total{model="mock"}'] >= 3 * 992
    assert metrics['kvyard_gateway_reported_cached_tokens_total{model="mock"}'] >= 3 * 992
    assert metrics['kvyard_gateway_time_to_first_byte_seconds_count{model="mock"}'] >= 4


def test_a_conversation_is_read_as_the_engine_reads_it(both: tuple[Gated, Served]) -> None:
    """By our own template, and by asking the engine: the next turn goes where the first was, and is found there."""
    _, served = both
    for how in ("bytes", "engine"):
        with Gated(fleets=[served.url], tokenizer=how) as other:
            other.ready(2, 2)
            system = {"role": "system", "content": f"You are {how}. " * 40}
            tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
            for extra in ({}, {"tools": tools, "tool_choice": "none"}):
                body = {"messages": [system, {"role": "user", "content": "Hi"}], "max_tokens": 4, **extra}
                first = other.post("/v1/chat/completions", **body)
                eventually(lambda: other.post("/explain", body=body).json()["hit_blocks"] > 10)  # noqa: B023
                body["messages"] = [
                    *body["messages"],
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "y"},
                ]
                second = other.post("/v1/chat/completions", **body)
                assert worker_of(second) == worker_of(first) and cached(second) > 400
            assert other.gateway.members.pools["mock"].reader.prompting.unread == 0


def test_explanations(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    before = gated.gateway.traffic.counters.requests
    said = gated.post("/explain", body={"prompt": list(range(5000, 5100)), "model": "mock"}).json()
    assert said["worker"].startswith("worker") and said["blocks"] == 6 and len(said["candidates"]) == 2
    assert "costs least" in said["said"] and said["not_considered"] == {}
    chat = gated.post("/explain", body={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["tokens"] > 10
    assert gated.gateway.traffic.counters.requests == before
    assert gated.post("/explain", 404, body={"prompt": "x", "model": "nobody"}).json()["error"]["param"] == "model"
    assert "no field" in gated.post("/explain", 400, body={}, other=1).json()["error"]["message"]


def test_unreadable_bodies_are_passed_to_the_engine(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    for body in ({"prompt": {"a": 1}}, {"prompt": [1, "x"]}, {"prompt": "x", "n": "y"}, {}):
        reply = gated.client.post("/v1/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["message"]
        assert "x-kvyard-decision" in reply.headers
    for content in (b"", b"[1]", b"{", b"\xff", b'{"model": 5}', b"null"):
        reply = gated.client.post("/v1/completions", content=content)
        assert reply.status_code == 400 and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    big = [1 << 33]  # names no block; the engine says so
    assert "out of vocabulary" in gated.complete(big, 400).json()["error"]["message"]


def test_other_routes_go_through(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    ids = gated.post("/tokenize", prompt="abc").json()["tokens"]
    assert ids == [97, 98, 99]
    assert gated.post("/detokenize", tokens=ids).json()["prompt"] == "abc"
    assert gated.post("/v1/embeddings", input="x").json()["data"]
    assert gated.client.post("/v1/rerank", json={"query": "x"}).status_code == 404  # the mock has none
    assert gated.client.get("/v1/completions").status_code == 405
    assert gated.client.get("/nothing").status_code == 404


def test_ids_and_headers(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    reply = gated.complete("x", headers={"x-request-id": "mine-1"})
    assert reply.json()["id"] == "cmpl-mine-1"
    assert reply.headers["content-length"] == str(len(reply.content))
    ours = gated.complete("x", headers={"x-request-id": "x" * 200}).json()["id"]
    assert ours != "cmpl-" + "x" * 200


def test_several_prompts_go_together(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    for prompt in ([[1, 2, 3], [4, 5]], ["a", "b"]):
        assert len(gated.complete(prompt).json()["choices"]) == 2


def test_the_dashboard_is_there(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    gated.complete(PROMPT)
    gated.complete(PROMPT)  # credited with what was just sent, announced or not
    view = gated.client.get("/dashboard/view").json()
    assert view["kind"] == "gateway" and {one["name"] for one in view["workers"]} == {"worker0", "worker1"}
    assert {one["state"] for one in view["streams"]} == {"fresh"}
    assert view["decisions"][0]["blocks"] == 62 and "costs least" in view["decisions"][0]["said"]
    assert view["totals"]["ttft"]["count"] > 0 and view["totals"]["prompts"]["device"] > 0
    assert gated.client.get("/dashboard").status_code == 200


def test_a_tokenizer_of_a_file(tmp_path: Path) -> None:
    """Text by the file here, conversations by the engine, which has the same one."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")
    vocabulary = {"[UNK]": 0} | {word: at for at, word in enumerate("abcdefgh", 1)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = str(tmp_path / "tokenizer.json")
    made.save(file)
    text = "a b c d e f g h " * 20
    with front(2, mock={"tokenizer": file}, tokenizer=file) as (gated, _):
        first = gated.complete(text)
        assert first.json()["usage"]["prompt_tokens"] == 160

        def hits(**body: object) -> int:
            return int(gated.post("/explain", body=body).json()["hit_blocks"])

        eventually(lambda: hits(prompt=text) == 9)  # of ten: the last token is always computed
        assert cached(gated.complete(text)) == 144
        messages = [{"role": "user", "content": text}]
        talk = gated.post("/v1/chat/completions", messages=messages, max_tokens=2)
        eventually(lambda: hits(messages=messages) > 8)
        assert worker_of(gated.post("/v1/chat/completions", messages=messages, max_tokens=2)) == worker_of(talk)
        assert gated.gateway.members.pools["mock"].reader.prompting.unread == 0
