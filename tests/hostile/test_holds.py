"""No body within the limits holds a server's loop for more than 50 ms of CPU: it is answered, or refused, in short turns."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.hostile.support import MIB, MOST_HOLD_S, LoopHolds, holds
from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated, plain
from tests.server.mock.support import Served as MockServed
from tests.server.support import PATIENCE, Served

__all__ = ["holds"]

pytestmark = [pytest.mark.zmq, pytest.mark.slow]
MOST = 16 * MIB


def filled(begin: str, part: str, end: str, size: int = MOST) -> bytes:
    """A body of nearly ``size`` bytes, of many ``part``."""
    unit = part.encode("utf-8", "surrogateescape")
    return begin.encode() + unit * ((size - len(begin) - len(end) - 8) // len(unit)) + end.encode()


WAYS: dict[str, tuple[str, str, str]] = {
    "ids": ("[1", ",1", "]}"),
    "long ids": ("[12345", ",12345", "]}"),
    "ids in lists": ("[[1]", ",[1]", "]}"),
    "lists": ("[[]", ",[]", "]}"),
    "objects": ("[{}", ",{}", "]}"),
    "messages": ('[{"role":"user","content":"a"}', ',{"role":"user","content":"a"}', "]}"),
    "deep": ("", "[", ""),
    "strings": ('[""', ',""', "]}"),
    "floats": ("[1.5e-300", ",1.5e-300", "]}"),
    "one text": ('"', "a", '"}'),
    "text of words": ('"', "some words, [1, 2], ", '"}'),
    "text of commas": ('"', ",[", '"}'),
    "escapes": ('"', "\\n", '"}'),
    "quotes": ('"', '\\"', '"}'),
    "codes": ('"', "\\u00e4", '"}'),
    "letters": ('"', "ä", '"}'),
    "blanks": ("[1", " ", "]}"),
    "keys": ("1", ',"a":1', "}"),
    "no end": ("[1", ",1", ""),
    "no UTF-8": ('"', "\udcff", '"}'),
}
"""Values as large as may be: how they begin, go on and end."""


def post(url: str, path: str, body: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(url + path, content=body, headers=headers, timeout=PATIENCE, trust_env=False)


def check(holds: LoopHolds, url: str, path: str, body: bytes, way: str = "") -> int:
    """Send a body and see what it took; returns the status."""
    for _ in range(4):  # another process may have had the caches
        holds.longest, holds.where = 0.0, ""
        reply = post(url, path, body)
        assert reply.status_code < 500, (way, reply.text[:300])
        if holds.longest <= MOST_HOLD_S:
            break
    said = f"{path}, {way}: {holds.longest * 1000:.0f} ms in {holds.where}, answered {reply.status_code}"
    print(said)
    if holds.longest > MOST_HOLD_S:
        holds.failed.append(said)
    return reply.status_code


def check_all(holds: LoopHolds, url: str, path: str, name: str, more: str = "") -> None:
    """Send bodies whose field ``name`` is as large as may be, in all ways."""
    for way, (begin, part, end) in WAYS.items():
        check(holds, url, path, filled(f'{{{more}"{name}":{begin}', part, end), way)
    assert not holds.failed, "\n".join(holds.failed)


@contextlib.contextmanager
def gateway(**settings: Any) -> Iterator[str]:
    with ScriptedEngine(plain) as engine, gated(engine, **settings) as gate:
        yield gate.ready(1).url


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/v1/embeddings", "input"),
        ("/v1/load_lora_adapter", "lora_name"),
        ("/close_session", "session_id"),
    ],
)
def test_a_gateway(holds: LoopHolds, path: str, name: str) -> None:
    with gateway() as url:
        check_all(holds, url, path, name)


def test_a_gateway_whose_engines_tokenize(holds: LoopHolds) -> None:
    """As many tokens as a prompt may have, in the answer of an engine."""

    def script(head: str, body: bytes) -> Sequence[bytes]:
        if not head.startswith("POST /tokenize "):
            return plain(head, body)
        return [answer("200 OK", b'{"count":1900000,"tokens":[' + b"12345," * 1_900_000 + b"1]}")]

    with ScriptedEngine(script) as engine, gated(engine, tokenizer="engine", tokenize_seconds=PATIENCE) as gate:
        body = json.dumps({"prompt": "some words " * 90_000}).encode()
        assert check(holds, gate.ready(1).url, "/v1/completions", body) == 200
    assert not holds.failed, "\n".join(holds.failed)


@pytest.mark.parametrize(
    ("path", "name", "more"),
    [
        ("/score", "token_ids", ""),
        ("/score", "batch", ""),
        ("/query", "token_ids", ""),
        ("/query_by_hash", "block_hashes", ""),
        ("/explain", "token_ids", ""),
        ("/query", "media", '"token_ids":[1],'),
    ],
)
def test_an_index_service(holds: LoopHolds, path: str, name: str, more: str) -> None:
    with Served() as served:
        for worker in range(4):
            served.register(instance_id=f"w{worker}", endpoint="tcp://127.0.0.1:1", block_size=16)
        check_all(holds, served.url, path, name, f'"model_name":"m",{more}')


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ],
)
def test_a_mock(holds: LoopHolds, path: str, name: str) -> None:
    with MockServed() as served:
        check_all(holds, served.url, path, name)


def test_the_longest_prompts_that_are_read(holds: LoopHolds) -> None:
    """Two million ids, and text of the same size: routed by their content."""
    with gateway() as url:
        ids = json.dumps({"prompt": list(range(1_900_000))}, separators=(",", ":")).encode()
        assert check(holds, url, "/v1/completions", ids) == 200
        assert check(holds, url, "/v1/completions", json.dumps({"prompt": "some words " * 170_000}).encode()) == 200
    with Served() as served:
        served.register(instance_id="w", endpoint="tcp://127.0.0.1:1", block_size=16)
        ids = json.dumps({"model_name": "m", "token_ids": list(range(990_000))}, separators=(",", ":")).encode()
        assert check(holds, served.url, "/score", ids) == 200


@pytest.mark.parametrize(
    "prompt",
    [[12345] * 990_000, "some words " * 172_000, ["some words " * 80_000] * 2],
    ids=["ids", "text", "two texts"],
)
def test_a_mock_with_a_context_of_millions_of_tokens(holds: LoopHolds, prompt: Any) -> None:
    """Prompts are hashed and matched in turns."""
    body = json.dumps({"max_tokens": 1, "prompt": prompt}, separators=(",", ":")).encode()
    with MockServed(engine={"num_gpu_blocks": 200_000, "max_model_len": 3_000_000}) as mock:
        assert check(holds, mock.url, "/v1/completions", body, f"{len(body)} bytes") == 200
    assert not holds.failed, "\n".join(holds.failed)
