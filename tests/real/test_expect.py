"""Hits that kvyard says a real vLLM owes, and hits it counted: equal to the token, by request and in its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.real.engine import MODELS, NAME, Engines, RealEngine
from tests.real.owed import Answered, Planned, compare, planned

from kvyard.lab.expect import expect
from kvyard.lab.expect.counted import Counted, read_page
from kvyard.lab.expect.traffic import read_traffic
from kvyard.replay.traces import TraceRequest

CASES: dict[str, dict[str, Any]] = {
    "dense, blocks of 32, evicting": {"model": "llama", "block_size": 32, "blocks": 251},
    "dense, blocks of 64": {"model": "llama", "block_size": 64, "blocks": 1000},
    "hybrid, blocks of 64, evicting": {"model": "gemma3", "block_size": 64, "blocks": 301},
}
REQUESTS = int(os.environ.get("KVYARD_REQUESTS", "400"))
"""For each row."""


def sender(engine: RealEngine) -> Callable[[Planned], Answered]:
    def send(planned: Planned) -> Answered:
        body: dict[str, Any] = {"max_tokens": planned.tokens, "ignore_eos": True, "return_token_ids": True}
        if planned.salt is not None:
            body["cache_salt"] = planned.salt
        if not planned.abort:
            answer = engine.complete(planned.prompt, **body)
            details = answer["usage"]["prompt_tokens_details"] or {}
            return Answered(answer["choices"][0]["token_ids"], int(details.get("cached_tokens") or 0))
        whole = {"model": NAME, "prompt": planned.prompt, "temperature": 0, "stream": True, **body}
        with engine.client.stream("POST", "/v1/completions", json=whole) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    return Answered(json.loads(line[6:])["choices"][0].get("token_ids") or [0], None)
        raise AssertionError("no token came")

    return send


@pytest.mark.parametrize("name", CASES)
def test_owed_is_counted(name: str, engines: Engines, figures: Callable[[str, Any], None]) -> None:
    case = CASES[name]
    engine = engines.get(number=29, **case)
    settings = {
        "model": str(MODELS / case["model"] / "config.json"),
        "block_size": case["block_size"],
        "num_gpu_blocks": case["blocks"] - 1,
        "max_model_len": 4096,
    }

    def page() -> Counted:
        return read_page(engine.client.get("/metrics").text)

    plan = planned(REQUESTS, case["block_size"], 1500, seed=len(name))
    by_request, counters = compare(sender(engine), plan, settings, page)
    figures(
        f"expect: {name}",
        {
            "requests": by_request.requests,
            "compared": by_request.compared,
            "equal": by_request.equal,
            "owed": counters.owed,
            "counted": counters.counted,
            "prompt_tokens": counters.prompt_tokens,
        },
    )
    assert by_request.equal == by_request.compared, by_request.different
    assert not by_request.fault, by_request.sentence
    assert counters.counted == counters.owed > 0 and not counters.fault, counters.sentence


def test_caching_that_is_off_is_named(engines: Engines) -> None:
    """vLLM counts no look-ups then, which isn't other traffic."""
    engine = engines.get(model="llama", flags=("--no-enable-prefix-caching",))
    prompts = [[*range(100, 500), 600 + at] for at in range(12)]
    for prompt in prompts:
        engine.complete(prompt)
    counted = read_page(engine.client.get("/metrics").text)
    assert (counted.queries, counted.hits) == (0, 0)
    rows = [TraceRequest(f"{at}", at * 10**9, len(prompt), 4, tokens=prompt) for at, prompt in enumerate(prompts)]
    named = expect(read_traffic(rows), {"block_size": 32, "num_gpu_blocks": 999}, counted)
    assert named.cause == "caching-off" and "enable_prefix_caching=False" in named.sentence
