"""Doctor, events check, index service, live replay and recordings, each against real engines, and each held to the truth."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import DENSE, HYBRID, NAME, TOPIC, Engines, RealEngine
from tests.real.test_gateway import gate
from tests.real.watching import EventWatch
from tests.server.support import Served
from tests.waiting import eventually

from kvyard.cli.app import main
from kvyard.replay.traces.generate import Workload, generate
from kvyard.replay.traces.writing import write_trace

BOTH = pytest.mark.parametrize("settings", [DENSE, HYBRID], ids=["llama", "gemma3"])


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, argv)])
    return int(exit_.value.code or 0)


def traffic(engine: RealEngine, seed: int, requests: int = 25) -> list[list[int]]:
    """Prompts that share beginnings, sent one after the other; more than the engine has room for."""
    chance = random.Random(seed)
    stems = [[chance.randrange(3, 1000) for _ in range(chance.randint(100, 900))] for _ in range(6)]
    sent = []
    for _ in range(requests):
        stem = chance.choice(stems)
        prompt = stem[: chance.randint(60, len(stem))] + [chance.randrange(3, 1000) for _ in range(40)]
        engine.complete(prompt, max_tokens=2)
        sent.append(prompt)
    return sent


@BOTH
def test_doctor(engines: Engines, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.get(**settings)

    def examine(*more: object) -> dict[str, Any]:
        code = run(
            *("doctor", engine.url, engine.endpoint, "--replay", engine.replay_endpoint, "--json", "--seconds", 5),
            *("--tokenizer", engine.tokenizer, *more),
        )
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == any(one["broken"] for one in said["findings"])
        return {one["code"]: one for one in said["findings"] if one["broken"]}

    size = engine.settings.block_size
    template = engine.tokenizer.with_name("tokenizer_config.json")
    assert not examine("--block-size", size, "--model", NAME, "--template", template)
    assert set(examine("--block-size", size // 2)) == {"block-size"}
    assert "model" in "".join(examine("--model", "another"))


@BOTH
def test_events_check(engines: Engines, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.get(**settings)
    ending = threading.Event()

    def work() -> None:
        seed = 1000
        while not ending.is_set():
            traffic(engine, seed, 5)
            seed += 1

    working = threading.Thread(target=work)
    working.start()
    try:
        code = run("events", "check", engine.endpoint, "--duration", 12, "--blocks", engine.settings.blocks, "--json")
    finally:
        ending.set()
        working.join()
    said = json.loads(capsys.readouterr().out)
    assert code == 0, said
    assert "vllm" in json.dumps(said)


@BOTH
def test_the_index_scores_as_the_engine_does(
    engines: Engines, settings: dict[str, Any], figures: Callable[[str, Any], None]
) -> None:
    """The score is asked for, then the engine: what it finds is what was said, after evictions too."""
    engine = engines.get(**settings)
    size = engine.settings.block_size
    with Served(block_size=size) as served, EventWatch(engine.endpoint) as watch:
        traffic(engine, 0, 1)  # something to hear: a stream that never spoke isn't known to be whole
        served.register(
            instance_id="e",
            model_name=NAME,
            endpoint=engine.endpoint,
            replay_endpoint=engine.replay_endpoint,
            block_size=size,
            topic=TOPIC,
        )
        prompts = traffic(engine, 7, 60)
        scored = exact = hits = 0
        for prompt in [*prompts[-30:], *prompts[:10]]:
            quiet(watch)

            def score(prompt: list[int] = prompt) -> dict[str, Any] | None:
                found = served.score(prompt, model_name=NAME).get(("e", 0))
                return found if found is not None and found["state"] == "fresh" else None

            said = eventually(score)["tokens"]
            # The engine computes the last token always.
            had = engine.cached(prompt, max_tokens=1)
            scored += 1
            hits += had > 0
            exact += min(said, (len(prompt) - 1) // size * size) == had
        figures(f"index, {settings['model']}", {"prompts": scored, "exact": exact, "hits": hits})
        assert exact == scored and hits > 10
        assert watch.removed, "it had room for everything"


def quiet(watch: EventWatch) -> None:
    """Wait until the engine has said all that it has to say."""
    seen, since = watch.batches, time.monotonic()
    while time.monotonic() < since + 0.5:
        time.sleep(0.05)
        if watch.batches != seen:
            seen, since = watch.batches, time.monotonic()


def workload(path: Path, requests: int) -> Path:
    fields: dict[str, Any] = {
        "arrivals": "poisson:rate=4",
        "input": "lognormal:median=120,sigma=0.8",
        "output": "lognormal:median=12,sigma=0.6",
        "turns": "geometric:3",
        "think": "exponential:1",
        "tree": "2x300/6x200",
        "block_size": 32,
    }
    write_trace(generate(Workload(requests=requests, seed=5, **fields)), path)
    return path


def rows(path: Path) -> list[int]:
    """Cached tokens of each request, in order; none for one that is too long."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one["cached_tokens"] or 0 for one in sorted(found, key=lambda one: int(one["id"]))]


def test_live_hits_equal_the_replay(
    engines: Engines, figures: Callable[[str, Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request at a time, so that nothing depends on speed: hit for hit the same, evictions included."""
    engine = engines.get(**DENSE)
    trace = workload(tmp_path / "trace.jsonl", 100)
    # Prompts of its own, so that nothing is cached from tests before.
    seed = random.SystemRandom().randrange(1 << 30)
    common = [trace, "--trace-block-size", 32, "--concurrency", 1, "--seed", seed]
    live, offline = tmp_path / "live.jsonl", tmp_path / "offline.jsonl"
    assert (
        run("replay", *common, "--live", engine.url, "--vocabulary", 1024, "--timeout", 240, "--per-request", live) == 0
    )
    fleet = ["--workers", 1, "--block-size", 32, "--num-gpu-blocks", engine.settings.blocks, "--max-model-len", 4096]
    assert run("replay", *common, *fleet, "--timing", "fixed:10,5", "--per-request", offline) == 0
    capsys.readouterr()
    had, said = rows(live), rows(offline)
    same = sum(one == other for one, other in zip(had, said, strict=False))
    figures(
        "live replay",
        {"requests": len(had), "same": same, "cached": sum(had), "predicted": sum(said)},
    )
    assert len(had) == len(said) == 100
    assert same == len(had), [(at, *both) for at, both in enumerate(zip(had, said, strict=False)) if both[0] != both[1]]


def test_a_recording_replays_as_it_was(
    engines: Engines, figures: Callable[[str, Any], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines.get(**DENSE)
    recording = tmp_path / "traffic.jsonl"
    chance = random.Random(11)
    stems = [[chance.randrange(3, 1000) for _ in range(chance.randint(200, 900))] for _ in range(12)]
    # Twice as much as there is room for, so that what others left of the cache is gone when it counts.
    filler = [[chance.randrange(3, 1000) for _ in range(2000)] for _ in range(8)]
    with gate([engine], record=str(recording)) as (gated, asker):
        for prompt in filler:
            asker.ask("filler", "/v1/completions", prompt=prompt)
        for _ in range(80):
            stem = chance.choice(stems)
            prompt = stem[: chance.randint(60, len(stem))] + [chance.randrange(3, 1000) for _ in range(40)]
            asker.ask("recorded", "/v1/completions", prompt=prompt)
        gated.idle()
    recorded = [json.loads(line)["cached"] for line in recording.read_text().splitlines()]
    assert len(recorded) == 88
    out = tmp_path / "replayed.jsonl"
    fleet = ["--workers", 1, "--block-size", 32, "--num-gpu-blocks", engine.settings.blocks, "--max-model-len", 4096]
    assert run("replay", recording, *fleet, "--concurrency", 1, "--timing", "fixed:10,5", "--per-request", out) == 0
    capsys.readouterr()
    said = rows(out)
    same = sum(one == other for one, other in zip(recorded, said, strict=False))
    figures("recording", {"requests": 88, "same": same, "cached": sum(recorded), "replayed": sum(said)})
    assert same == 88, [(at, *both) for at, both in enumerate(zip(recorded, said, strict=False)) if both[0] != both[1]]
