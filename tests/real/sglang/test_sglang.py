"""Gateway, doctor and live replay with real SGLang servers, each held to what the servers report."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import MODELS, NAME
from tests.real.promises import AT_ONCE, PROMPT_FIRST, UNEXPLAINED, Asker, Promise
from tests.real.sglang.engine import STAND_IN, SglangEngine
from tests.real.test_gateway import Load, gate, judge
from tests.real.test_tools import rows, run, workload
from tests.waiting import eventually

ROUNDS = 54
THREADS = 4

REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for prompt in json.load(sys.stdin):
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
    )
    print(json.dumps(found[0, len(prompt):].tolist()))
"""


class SglangAsker(Asker):
    """Asks as SGLang can be asked."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._asked: list[tuple[str, Sequence[int], float, float]] = []
        """Engine, prompt, and when it was asked and answered."""

    def _keep(self, kind: str, decision: str, usage: Mapping[str, Any], ids: Sequence[int], began: float) -> None:
        super()._keep(kind, decision, usage, ids, began)
        [engine] = re.findall(r"worker=(\S+)@\d+; ", decision)
        self._asked.append((engine, ids, began, time.monotonic()))

    def _why(self, promise: Promise, ids: Sequence[int], began: float) -> str:
        why = super()._why(promise, ids, began)
        if why != UNEXPLAINED:
            return why
        size, stop = self.block_size, promise.promised
        if promise.promised < promise.delivered:
            # Held by test_answers_to_a_prompt_all_find_it: any other count would be another cause.
            whole = promise.delivered == (promise.prompt - 1) // size * size
            return PROMPT_FIRST if promise.kind == "n" and whole else why
        alike = [one for one in self._asked if one[0] == promise.engine and list(one[1][:stop]) == list(ids[:stop])]
        for (_, one, asked, answered), (_, other, again, _) in itertools.permutations(alike, 2):
            if asked <= again < answered and list(one[stop : stop + size]) != list(other[stop : stop + size]):
                return AT_ONCE
        return why

    def ask(self, kind: str, path: str, **body: Any) -> dict[str, Any]:
        if kind == "list of two":
            return {}  # SGLang reports the sum of all prompts' cached tokens, and a promise is about the last
        body.pop("add_special_tokens", None)  # vLLM's alone: SGLang's completions always begin with that token
        if "messages" in body and body.get("stream"):
            body["return_token_ids"] = False
        return super().ask(kind, path, **body)

    def prompt_ids(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> list[int]:
        if body["return_token_ids"]:
            return super().prompt_ids(body, answer)
        reply = self.client.post("/tokenize", json={"model": NAME, "messages": body["messages"]})
        return list(reply.json()["tokens"])


def ids(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 1000) for _ in range(length)]


def test_its_tokens_are_those_of_the_model(pair: list[SglangEngine]) -> None:
    """By ``transformers`` in the same environment, so the rotation that stands in for a kernel is right."""
    engine = pair[0]
    if engine.settings.model != "llama-weights":
        pytest.skip("SGLang's torch_native attention has no sliding windows: its tokens aren't the model's")
    prompts = [ids(number, length) for number, length in enumerate((5, 40, 100, 200, 352, 500))]
    found = subprocess.run(
        [engine.python, "-c", REFERENCE, str(MODELS / engine.settings.model)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
        env={**engine.environment(), "PYTHONPATH": str(STAND_IN)},
    )
    wanted = [json.loads(line) for line in found.stdout.splitlines()]
    for prompt, tokens in zip(prompts, wanted, strict=True):
        assert engine.generate(prompt, 12)["output_ids"] == tokens
        again = engine.generate(prompt, 12)  # from cache
        assert again["output_ids"] == tokens
        size = engine.settings.block_size
        assert again["meta_info"]["cached_tokens"] == (len(prompt) - 1) // size * size


def test_what_is_promised_is_delivered(pair: list[SglangEngine], figures: Callable[[str, Any], None]) -> None:
    with gate(pair, SglangAsker) as (gated, asker):
        load = Load(asker)
        kinds = [load.conversation, load.ids, load.streamed, load.texts, load.left, load.refused, load.several]
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(kinds[number % len(kinds)], number) for number in range(ROUNDS * len(kinds))]
            for job in jobs:
                job.result()
        gated.idle()
        judge(asker, figures, f"sglang, {pair[0].settings.model}")
        assert all(watch.removed for watch in asker.watches.values()), "they had room for everything"


@pytest.mark.parametrize("answers", [1, 3])
def test_answers_to_a_prompt_all_find_it(pair: list[SglangEngine], answers: int) -> None:
    """What is reported of a prompt that nobody asked before: with ``n`` all its whole pages, which one answer doesn't find."""
    engine, size = pair[0], pair[0].settings.block_size
    prompt = ids(7_000_000 + answers, 20 * size + 5)
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0.7, "n": answers}
    reply = engine.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    details = reply.json()["usage"]["prompt_tokens_details"] or {}
    assert (details.get("cached_tokens") or 0) == (0 if answers == 1 else 20 * size)


def test_the_doctor_finds_nothing_wrong_and_names_what_is(
    pair: list[SglangEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = pair[0]

    def examine(*more: object) -> set[str]:
        codes = look(*more)
        for _ in range(4):
            if codes != {"http-unreachable"}:  # an engine on a busy machine, which didn't answer in time
                break
            codes = look(*more)
        return codes

    def look(*more: object) -> set[str]:
        code = run(
            *("doctor", engine.url, engine.endpoint, "--replay", engine.replay_endpoint, "--json", "--seconds", 5),
            *("--tokenizer", engine.tokenizer, *more),
        )
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == any(one["broken"] for one in said["findings"])
        return {one["code"] for one in said["findings"] if one["broken"]}

    size = engine.settings.block_size
    assert not examine("--block-size", size, "--model", NAME)
    assert examine("--block-size", size * 2) == {"block-size"}
    assert "model" in "".join(examine("--model", "another"))


def test_live_hits_equal_the_replay(
    pair: list[SglangEngine],
    figures: Callable[[str, Any], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One request at a time: hit for hit the same, evictions included."""
    engine = pair[0]
    size = engine.settings.block_size
    engine.flush()
    trace = workload(tmp_path / "trace.jsonl", 100)
    seed = random.SystemRandom().randrange(1 << 30)
    common = [trace, "--trace-block-size", 32, "--concurrency", 1, "--seed", seed]
    live, offline = tmp_path / "live.jsonl", tmp_path / "offline.jsonl"
    asked = ("--live", engine.url, "--vocabulary", 1024, "--timeout", 240, "--per-request", live)
    assert run("replay", *common, *asked) == 0
    fleet = ["--workers", 1, "--block-size", size, "--num-gpu-blocks", engine.settings.blocks, "--max-model-len", 4096]
    assert (
        run("replay", *common, *fleet, "--set", "backend=sglang", "--timing", "fixed:10,5", "--per-request", offline)
        == 0
    )
    capsys.readouterr()
    had, said = rows(live), rows(offline)
    odd = [(at, *both) for at, both in enumerate(zip(had, said, strict=True)) if both[0] != both[1]]
    figures(f"sglang live replay, {engine.settings.model}", {"requests": len(had), "odd": odd, "cached": sum(had)})
    assert len(had) == 100
    assert not odd


def test_an_engine_that_is_killed_comes_back_empty(
    pair: list[SglangEngine], figures: Callable[[str, Any], None]
) -> None:
    """With one killed the other serves everything; once it is back its cache is known to be empty, and promises hold."""
    with gate(pair, SglangAsker) as (gated, asker):
        Load(asker).conversation(0)
        pair[1].kill()
        eventually(lambda: gated.engines()["e1"]["state"] == "down")
        before = len(asker.promises)
        Load(asker).conversation(1)
        Load(asker).ids(2)
        assert {one.engine for one in asker.promises[before:]} == {"e0"}
        pair[1].start()
        eventually(lambda: gated.engines()["e1"]["state"] == "ready")
        for seed in range(3, 9):
            Load(asker).conversation(seed)
            Load(asker).ids(seed)
        gated.idle()
        judge(asker, figures, f"sglang, killed, {pair[0].settings.model}")
