"""Prompts handed from one real vLLM to another by NIXL, with ``kv_transfer_params`` through the gateway.

UCX carries blocks through shared memory or TCP, so no special hardware is needed. The prefill engine's own answer to the same
prompt is the reference: the models' weights make an answer depend on all of its prompt, so a wrong block would show.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.ports import free_ports
from tests.real.engine import NAME, EngineSettings, RealEngine
from tests.server.gateway.support import Gated

SIZE = 32
ANSWERS = 200
TOKENS = 12
KILLS = 2
"""Times that each of the two engines is killed."""
ASKED = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
COMPLETIONS = "/v1/completions"


def settings(policy: str) -> EngineSettings:
    """An engine that sends and receives blocks; ``policy`` says what it does where blocks don't come."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
    }
    return EngineSettings(
        model="llama-weights",
        blocks=400,
        block_size=SIZE,
        flags=("--load-format", "auto", "--kv-transfer-config", json.dumps(transfer)),
        environment=(
            ("PYTHONPATH", str(Path(os.environ["KVYARD_NIXL"]).absolute())),
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(1))),
        ),
    )


def together(*deeds: Callable[[], object]) -> None:
    threads = [threading.Thread(target=deed) for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module", params=["recompute"])
def pair(
    request: pytest.FixtureRequest, vllm_python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RealEngine, RealEngine]]:
    folder = tmp_path_factory.mktemp("nixl")
    first, second = (
        RealEngine(vllm_python, folder / f"{name}.log", settings(request.param)) for name in ("prefill", "decode")
    )
    with contextlib.closing(first), contextlib.closing(second):
        together(first.start, second.start)
        assert first.running, first.tail()
        assert second.running, second.tail()
        yield first, second


@contextlib.contextmanager
def gateway(first: RealEngine, second: RealEngine, **more: Any) -> Iterator[Gated]:
    listed = [
        {
            "url": engine.url,
            "name": name,
            "role": name,
            "events": engine.endpoint,
            "replay": engine.replay_endpoint,
            "block_size": SIZE,
        }
        for engine, name in ((first, "prefill"), (second, "decode"))
    ]
    with Gated(engines=listed, tokenizer="engine", **more) as gated:
        yield gated.ready(2)


def prompt(seed: int) -> list[int]:
    """Token ids of their own, or the first half of an earlier prompt's and then their own."""
    chance = random.Random(seed)
    length = chance.choice([chance.randrange(20, 120), chance.randrange(120, 600), chance.randrange(600, 1200)])
    own = [chance.randrange(3, 1000) for _ in range(length)]
    if seed % 3 == 2:
        before = prompt(seed - 1)
        return before[: len(before) // 2] + own[: length // 2]
    return own


def metric(engine: RealEngine, name: str) -> float:
    return sum(value for label, value in engine.metrics().items() if label.startswith(f"vllm:{name}"))


def alone(engine: RealEngine, ids: list[int]) -> list[int]:
    found: list[int] = engine.complete(ids, **ASKED)["choices"][0]["token_ids"]
    return found


def test_answers_are_those_of_one_engine(pair: tuple[RealEngine, RealEngine], figures: Any) -> None:
    first, second = pair
    before = {name: metric(second, name) for name in ("nixl_bytes_transferred_sum", "external_prefix_cache_hits_total")}
    compared = changed = 0
    with gateway(first, second) as gated:
        for number in range(ANSWERS):
            ids = prompt(number)
            reply = gated.post(COMPLETIONS, model=NAME, prompt=ids, **ASKED)
            assert "worker=prefill@0" in reply.headers["x-kvyard-prefill"]
            assert "worker=decode@0" in reply.headers["x-kvyard-decision"]
            wanted = alone(first, ids)
            assert reply.json()["choices"][0]["token_ids"] == wanted, (number, len(ids))
            compared += len(wanted)
            if number % 10 == 0:  # an answer tells a prompt from one with another token near its start
                changed += alone(first, [*ids[:4], ids[4] % 900 + 3, *ids[5:]]) != wanted
        gated.idle()
    gained = {name: metric(second, name) - value for name, value in before.items()}
    assert metric(second, "nixl_num_failed_transfers_total") == 0
    # All of a prompt that the decode engine hadn't cached itself came from the other one.
    assert gained["external_prefix_cache_hits_total"] > 0.5 * sum(len(prompt(number)) for number in range(ANSWERS))
    assert changed >= 18
    figures("nixl", {"answers": ANSWERS, "tokens": compared, "changed of 20": changed, **gained})


def test_streams_and_conversations(pair: tuple[RealEngine, RealEngine]) -> None:
    first, second = pair
    said = {"messages": [{"role": "user", "content": "Tell me of blocks that travel. " * 12}], **ASKED, "model": NAME}
    del said["return_token_ids"]
    with gateway(first, second) as gated:
        whole = gated.post("/v1/chat/completions", **said).json()["choices"][0]["message"]["content"]
        parts = []
        with gated.client.stream("POST", "/v1/chat/completions", json={**said, "stream": True}) as reply:
            assert reply.headers["x-kvyard-prefill"]
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    parts += [one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"]]
        assert "".join(parts) == whole == first.post("/v1/chat/completions", **said)["choices"][0]["message"]["content"]


def test_engines_killed_at_random_instants(pair: tuple[RealEngine, RealEngine], figures: Any) -> None:
    """A prefill engine's death costs no answer; a decode engine's costs what it was answering. No answer is ever wrong."""
    first, second = pair
    chance = random.Random(26)
    wanted = {number: alone(first, prompt(number)) for number in range(300, 340)}
    outcomes: dict[str, Counter[str]] = {}
    with gateway(first, second, retries=2) as gated:

        def client(over: threading.Event, found: Counter[str], seed: int) -> None:
            own = random.Random(seed)
            with httpx.Client(base_url=gated.url, timeout=600, trust_env=False) as asking:
                while not over.is_set():
                    number = own.choice(list(wanted))
                    body = {"model": NAME, "prompt": prompt(number), **ASKED}
                    try:
                        reply = asking.post(COMPLETIONS, json=body)
                    except httpx.TransportError as error:
                        found[type(error).__name__] += 1
                        continue
                    if reply.status_code != 200:
                        found[f"{reply.status_code}"] += 1
                        time.sleep(0.2)  # a client's own pause before it tries again
                        continue
                    right = reply.json()["choices"][0]["token_ids"] == wanted[number]
                    by = "handed over" if "x-kvyard-prefill" in reply.headers else "by one engine"
                    found[f"{by}, {'equal' if right else 'DIFFERENT'}"] += 1

        for name, engine in (("prefill", first), ("decode", second)):
            found = outcomes[name] = Counter()
            for kill in range(KILLS):
                over = threading.Event()
                clients = [
                    threading.Thread(target=client, args=(over, found, 10 * kill + number)) for number in range(3)
                ]
                for thread in clients:
                    thread.start()
                time.sleep(chance.uniform(2.0, 8.0))  # the random instant
                engine.kill()
                time.sleep(5.0)  # requests meet an engine that isn't there
                over.set()
                for thread in clients:
                    thread.join()
                engine.start()
                gated.ready(2)
                # And hand-overs go on, with the new engine.
                ids = prompt(900 + 10 * kill + (name == "decode"))
                reply = gated.post(COMPLETIONS, model=NAME, prompt=ids, **ASKED)
                assert reply.headers["x-kvyard-prefill"]
                assert reply.json()["choices"][0]["token_ids"] == alone(first, ids)
        gated.idle()
    print({name: dict(found) for name, found in outcomes.items()})
    figures("nixl faults", {name: dict(found) for name, found in outcomes.items()})
    assert not [label for found in outcomes.values() for label in found if "DIFFERENT" in label]
    assert set(outcomes["prefill"]) <= {"handed over, equal", "by one engine, equal"}
    assert outcomes["prefill"]["by one engine, equal"] > 0
