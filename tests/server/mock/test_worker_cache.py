"""What is cached shows in the usage, and what is given up is given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.mock.support import Served
from tests.server.support import asking

from kvyard.engine.config import SpeculativeConfig

PROMPT = list(range(100))
"""Six whole blocks of 16, and a bit."""


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as fleet:
        yield fleet
        fleet.check()


def test_hits_show_in_the_usage(served: Served) -> None:
    assert served.cached(PROMPT) == 0
    assert served.cached(PROMPT) == 96
    assert served.cached(PROMPT[:50]) == 48
    assert served.cached([*PROMPT[:32], *range(1000, 1050)]) == 32
    first = served.complete(PROMPT, max_tokens=40, return_token_ids=True, ignore_eos=True)["choices"][0]["token_ids"]
    assert served.cached([*PROMPT, *first, 5]) == 128  # what was generated is cached too


def test_namespaces_don_t_meet(served: Served) -> None:
    served.complete(PROMPT)
    assert served.cached(PROMPT, cache_salt="a") == 0
    assert served.cached(PROMPT, cache_salt="a") == 96
    assert served.cached(PROMPT, cache_salt="b") == 0
    served.post("/v1/load_lora_adapter", lora_name="polite", lora_path="/adapters/polite")
    assert [model["id"] for model in served.get("/v1/models")["data"]] == ["mock", "polite"]
    assert served.cached(PROMPT, model="polite") == 0
    assert served.cached(PROMPT, model="polite") == 96
    served.post("/v1/load_lora_adapter", 400, lora_name="polite", lora_path="/adapters/polite")
    served.post("/v1/unload_lora_adapter", lora_name="polite")
    served.post("/v1/unload_lora_adapter", 404, lora_name="polite")
    served.complete(PROMPT, 404, model="polite")
    assert served.cached(PROMPT) == 96


def test_reset(served: Served) -> None:
    served.complete(PROMPT)
    assert served.client.post("/reset_prefix_cache").status_code == 200
    assert served.cached(PROMPT) == 0


def test_a_client_that_hangs_up_frees_its_blocks() -> None:
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="mock"}'
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "n": 2}
    with Served(speed=0.1) as served:
        with served.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            assert json.loads(next(reply.iter_lines()).removeprefix("data: "))["choices"][0]["text"]
            assert served.get("/admin/workers")[0]["running"] == 2
        eventually(lambda: served.metrics()[aborted] == 2)
        served.check()
        # And one that waits for an answer in one piece.
        with asking(served.url, "/v1/completions", **body):
            eventually(lambda: served.get("/admin/workers")[0]["running"] == 2)
        eventually(lambda: served.metrics()[aborted] == 4)
        served.check()


def test_more_than_fits_waits_and_comes_through() -> None:
    with Served(engine={"num_gpu_blocks": 18, "max_num_seqs": 4, "max_num_batched_tokens": 64}) as served:
        prompts = [[n, *range(99)] for n in range(1000, 1012)]
        reply = served.complete(prompts, max_tokens=60, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 12 * 60
        assert served.metrics()['vllm:num_preemptions_total{engine="0",model_name="mock"}'] > 0
        said = served.complete([*range(500)], 400)["error"]
        assert "blocks" in said["message"]
        stream = served.post("/v1/completions", prompt=[*range(500)], max_tokens=4, stream=True)
        assert "blocks" in stream and stream.rstrip().endswith("[DONE]")
        served.check()


@pytest.mark.parametrize(
    "engine",
    [
        {"backend": "sglang", "block_size": 1, "num_gpu_blocks": 4096},
        {"backend": "trtllm"},
        {"speculative": SpeculativeConfig(num_speculative_tokens=3, eagle=False)},
        {"enable_prefix_caching": False},
    ],
    ids=["sglang", "trtllm", "drafts", "no cache"],
)
def test_other_engines(engine: dict[str, Any]) -> None:
    """Every token comes once and in order, however the engine goes about it."""
    with Served(engine=engine) as served:
        prompts = [[n, *range(40)] for n in range(100, 106)]
        reply = served.complete(prompts, max_tokens=50, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 300
        assert [len(choice["text"]) for choice in reply["choices"]] == [50] * 6
        assert (
            served.complete(prompts[2], max_tokens=50, ignore_eos=True)["choices"][0]["text"]
            == reply["choices"][2]["text"]
        )
        served.check()


def test_hybrid_models_and_tiers() -> None:
    from kvyard.engine.models import plan, preset
    from kvyard.tiers.config import OffloadConfig, TierConfig
    from kvyard.tiers.links.config import LaneConfig, LinkConfig

    made = plan(preset("gpt-oss-20b"), 1 << 60)
    with Served(
        engine={**made.engine_options(), "groups": made.groups, "block_size": None, "num_gpu_blocks": 2000}
    ) as one:
        prompt = list(range(600))
        assert one.cached(prompt) == 0
        assert one.cached(prompt) >= 560
        one.check()
    lane = LaneConfig(bandwidth=10**10)
    host = TierConfig(num_blocks=400, link=LinkConfig(outward=lane, inward=lane))
    engine = {"num_gpu_blocks": 40, "bytes_per_block": 1 << 16, "tiers": OffloadConfig(tiers=(host,))}
    with Served(engine=engine) as two:
        two.complete(PROMPT)
        for n in range(8):
            two.complete([5000 + n] * 200)  # pushes it out of the device
        assert two.cached(PROMPT) == 96  # it comes back from the host
        assert two.metrics()['vllm:external_prefix_cache_hits_total{engine="0",model_name="mock"}'] == 96
        two.check()
