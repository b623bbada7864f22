"""Responses stay with the engine that made them, and conversations in other shapes are routed by what they say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.scripted_engine import ScriptedEngine, answer, chunked
from tests.server.gateway.support import Gated

from kvyard.server.gateway import homes as module
from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.prompting import PeekedMessages, PeekedResponses, read_body


class Keeper:
    """An engine that knows the responses that it made, and no others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: set[str] = set()

    def __call__(self, head: str, body: bytes) -> Sequence[bytes]:
        path = head.split(" ")[1]
        if path != "/v1/responses":
            id_ = path.split("/")[3]
            found = id_ in self.made
            return [answer("200 OK" if found else "404 Not Found", json.dumps({"id": id_, "by": self.name}).encode())]
        asked = json.loads(body)
        before = asked.get("previous_response_id")
        if before is not None and before not in self.made:
            return [answer("404 Not Found", b'{"error": {"message": "no such response"}}')]
        id_ = f"resp_{self.name}{len(self.made)}"
        self.made.add(id_)
        made = {"id": id_, "object": "response", "by": self.name}
        if asked.get("stream"):
            event = json.dumps({"type": "response.created", "response": made}).encode()
            return chunked(b"event: response.created\ndata: " + event + b"\n\n", b"data: {}\n\n")
        return [answer("200 OK", json.dumps(made).encode())]


def test_continuations_go_to_the_engine_of_their_response() -> None:
    keepers = [Keeper("a"), Keeper("b"), Keeper("c")]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(ScriptedEngine(keeper)) for keeper in keepers]
        listed = [{"url": engine.url, "name": keeper.name} for engine, keeper in zip(engines, keepers, strict=False)]
        gated = stack.enter_context(Gated(engines=listed, router={"policy": "round-robin"}))
        gated.ready(3)
        for stream in (False, True):
            last: dict[str, str] = {}
            for turn in range(12):
                more: dict[str, Any] = {"stream": True} if stream else {}
                if turn >= 3:
                    more["previous_response_id"] = list(last)[turn % 3]
                reply = gated.post("/v1/responses", model="odd", input="x", **more)
                text = reply.text.partition("data: ")[2].partition("\n")[0] if stream else reply.text
                found = json.loads(text).get("response") or json.loads(text)
                if turn >= 3:
                    assert found["by"] == last[more["previous_response_id"]]
                last[found["id"]] = found["by"]
            assert len({*last.values()}) == 3, "those that begin go round"
        for id_, by in last.items():
            assert gated.client.get(f"/v1/responses/{id_}").json() == {"id": id_, "by": by}
            assert gated.client.post(f"/v1/responses/{id_}/cancel", json={}).json()["by"] == by
        assert gated.client.get("/v1/responses/resp_unknown").status_code == 404
        gated.idle()


def test_a_response_is_its_keys_own(tmp_path: Path) -> None:
    """Two keys may ask for the same model; neither can read, cancel or go on from what the other made."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\n[[keys]]\nname = "b"\nkey = "sk-b"\n')
    with ScriptedEngine(Keeper("e")) as engine, Gated(engines=[{"url": engine.url}], keys_file=str(keys)) as gated:
        gated.ready(1)
        a, b = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        for stream in (False, True):
            made = gated.post("/v1/responses", headers=a, model="odd", input="x", stream=stream)
            (id_,) = re.findall(r"resp_e\d+", made.text)
            path = f"/v1/responses/{id_}"
            assert gated.client.get(path, headers=a).status_code == 200
            assert gated.client.get(path, headers=b).status_code == 404
            gated.post(f"{path}/cancel", 404, headers=b)
            gone_on = {"model": "odd", "input": "y", "previous_response_id": id_}
            refused = gated.post("/v1/responses", 404, headers=b, **gone_on).json()["error"]
            assert refused["message"].startswith(f"Response with id '{id_}' not found.")
            gated.post("/v1/responses", headers=a, **gone_on)
            # An id that isn't known here may be any key's.
            gated.post("/v1/responses", 404, headers=a, model="odd", input="y", previous_response_id="resp_unknown")
        gated.idle()


def test_parts_of_a_response_are_its_keys_own_too(tmp_path: Path) -> None:
    """Where paths that aren't known are passed on: to the engine that has the response, and for the key that made it."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\n[[keys]]\nname = "b"\nkey = "sk-b"\n')
    with ScriptedEngine(Keeper("e")) as first, ScriptedEngine(Keeper("f")) as second:
        engines = [{"url": first.url}, {"url": second.url}]
        with Gated(engines=engines, keys_file=str(keys), pass_unknown=True, router={"policy": "round-robin"}) as gated:
            gated.ready(2)
            a, b = ({"authorization": f"Bearer sk-{name}", "x-of": f"key-{name}"} for name in "ab")
            made = [gated.post("/v1/responses", headers=a, model="odd", input="x").json()["id"] for _ in range(4)]
            for id_ in made:
                path = f"/v1/responses/{id_}/input_items"
                for _ in range(2):
                    assert gated.client.get(path, headers=a).status_code == 200
                for way in (path, "/" + path, f"/v1//responses/{id_}/input_items", f"/v1/x/%2e%2e/responses/{id_}"):
                    url = httpx.URL(gated.url).copy_with(raw_path=way.encode())
                    assert gated.client.get(url, headers=b).status_code == 404, way
                heads = [head for engine in (first, second) for head, _ in engine.requests]
                assert not [head for head in heads if id_ in head and "key-b" in head], heads


def test_remembered_responses_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    known = ResponseHomes()
    for number in range(5):
        known.saw(b'{"id":"resp_%d"}' % number, ResponseHome("m", f"e{number}"))
    assert [known.find(f"resp_{number}") is not None for number in range(5)] == [False, False, True, True, True]
    known.saw(b'{"id": "chatcmpl-1"}', ResponseHome("m", "e"))
    assert known.find("chatcmpl-1") is None


@pytest.mark.parametrize(
    ("path", "body", "chat"),
    [
        ("/v1/responses", {"input": "hi"}, [("user", "hi")]),
        ("/v1/responses", {"input": "hi", "instructions": "be"}, [("system", "be"), ("user", "hi")]),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            [("user", "a")],
        ),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f"}]}, None),
        ("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}, None),
        ("/v1/responses", {"input": "hi", "tools": [{}]}, None),
        ("/v1/responses", {"input": 5}, None),
        (
            "/v1/messages",
            {"system": "be", "messages": [{"role": "user", "content": "a"}]},
            [("system", "be"), ("user", "a")],
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            [("user", "a\nb")],
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None),
        ("/v1/messages", {"messages": "x"}, None),
    ],
)
def test_other_shapes_of_conversations(path: str, body: dict[str, Any], chat: list[tuple[str, str]] | None) -> None:
    asked = read_body(path, json.dumps(body).encode())
    assert isinstance(asked, PeekedResponses | PeekedMessages)
    found = asyncio.run(asked.as_chat())
    said = None if found is None else [(one["role"], one["content"]) for one in json.loads(bytes(found.messages))]
    assert said == chat
