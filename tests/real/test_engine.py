"""The base of this suite: engines start, cache, announce, die and come back."""

from __future__ import annotations

from tests.real.engine import NAME, Engines


def test_serves_and_caches(engines: Engines) -> None:
    engine = engines.get()
    prompt = [7, 8, 9] * 30
    assert engine.cached(prompt) == 0
    # 90 tokens are two whole blocks of 32, and the last token is always computed.
    assert engine.cached(prompt) == 64
    assert engine.get("/v1/models")["data"][0]["id"] == NAME


def test_hybrid(engines: Engines) -> None:
    engine = engines.get(model="gemma3", block_size=64, hash_algorithm="sha256")
    prompt = [11, 12, 13] * 100
    assert engine.cached(prompt) == 0
    assert engine.cached(prompt) == 256


def test_lora_has_its_own_blocks(engines: Engines) -> None:
    engine = engines.get(lora=("lora-a", "lora-b"))
    prompt = [21, 22, 23] * 30
    texts = []
    for name in (NAME, "lora-a", "lora-b"):
        answer = engine.complete(prompt, model=name, max_tokens=8, return_token_ids=True)
        assert not (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
        texts.append(tuple(answer["choices"][0]["token_ids"]))
        assert engine.cached(prompt, model=name) == 64
    assert len(set(texts)) == 3, "adapters change what is said"


def test_killed_and_started_again(engines: Engines) -> None:
    engine = engines.get()
    prompt = [31, 32, 33] * 30
    engine.cached(prompt)
    engine.kill()
    assert not engine.running
    assert engines.get() is engine
    assert engine.cached(prompt) == 0, "a new process has nothing cached"
