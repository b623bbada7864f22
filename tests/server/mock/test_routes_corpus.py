"""The mock answers as vLLM did: 350 requests, good, odd and bad, against what a real engine said of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")

from tests.server.mock.corpus import (
    BLOCK_SIZE,
    DIFFERENCES,
    LONGEST,
    LORAS,
    MODEL,
    TOKENIZER,
    differences,
    read_corpus,
    send,
)
from tests.server.mock.support import PATIENCE, Served

from kvyard.engine.timing import FixedTiming
from kvyard.server.mock.config import Lora

REQUESTS: list[dict[str, Any]] = read_corpus()["requests"]
ALLOWED: dict[str, str] = json.loads(DIFFERENCES.read_text())
"""Requests whose answers differ, and why they may."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # Slow enough that each token is a chunk of its own, as it is with a real engine.
    engine = {"block_size": BLOCK_SIZE, "max_model_len": LONGEST, "timing": FixedTiming(prefill_ms=5, decode_ms=10)}
    loras = tuple(Lora(name=name, path=f"/models/{name}", number=number) for number, name in enumerate(LORAS, 1))
    with Served(engine=engine, served_model_name=MODEL, tokenizer=str(TOKENIZER), loras=loras) as fleet:
        yield fleet
        fleet.check()


def test_answers_are_those_of_vllm(served: Served) -> None:
    """All in one test: each takes milliseconds, and one connection serves them all."""
    found: dict[str, list[Any]] = {}
    with httpx.Client(base_url=served.url, timeout=PATIENCE, trust_env=False) as client:
        for request in REQUESTS:
            answer = send(client, request)
            differs = list(differences(answer, request["answer"]))
            if differs:
                found[request["name"]] = differs
    assert {name: differs for name, differs in found.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) == set(found), "what differs no longer needs no reason"


def test_the_corpus_is_wide_enough() -> None:
    assert len(REQUESTS) >= 150 and len({request["name"] for request in REQUESTS}) == len(REQUESTS)
    by_status = [request["answer"]["status"] for request in REQUESTS]
    assert min(by_status.count(200), by_status.count(400)) > 100
    assert sum("stream" in request["answer"] for request in REQUESTS) >= 15
