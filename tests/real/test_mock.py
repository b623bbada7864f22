"""The recording that holds the mock is what this vLLM says. With KVYARD_RERECORD=1 it is written again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import httpx
from tests.real.engine import DENSE, PATIENCE, Engines
from tests.server.mock.corpus import differences, read_corpus, send, write_corpus


def test_the_recording_is_what_vllm_says(engines: Engines, figures: Callable[[str, Any], None]) -> None:
    engine = engines.get(**DENSE)
    corpus = read_corpus()
    found: dict[str, list[Any]] = {}
    with httpx.Client(base_url=engine.url, timeout=PATIENCE, trust_env=False) as client:
        for request in corpus["requests"]:
            answer = send(client, request)
            differs = list(differences(answer, request["answer"]))
            if differs:
                found[request["name"]] = differs
            request["answer"] = answer
    figures("corpus", {"requests": len(corpus["requests"]), "changed since recorded": len(found)})
    if os.environ.get("KVYARD_RERECORD"):
        write_corpus(corpus)
    else:
        assert not found
