"""Faults of mock engines by name, and the cause that is named from what they answer, count and announce."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from tests.lab.expect.support import traffic
from tests.waiting import eventually

from kvyard.events.recording import About, RecordingWriter
from kvyard.events.transport import fetch_replay
from kvyard.lab.expect import Expectation, expect
from kvyard.lab.expect.counted import Counted, read_page
from kvyard.lab.expect.engine_visit import visit_engine
from kvyard.lab.expect.evidence import from_events
from kvyard.lab.expect.tail import last_lines
from kvyard.lab.expect.traffic import read_traffic
from kvyard.replay.traces import TraceRequest, open_trace
from kvyard.server.mock.faults import changed
from kvyard.testing import FleetServer

SETTINGS = {"block_size": 16, "num_gpu_blocks": 400, "max_model_len": 4096}


def prompts(count: int = 30) -> list[list[int]]:
    """Questions about a few texts."""
    random = Random(5)
    texts = [[random.randrange(200) for _ in range(400)] for _ in range(5)]
    return [[*random.choice(texts), *(random.randrange(200) for _ in range(20 + at % 9))] for at in range(count)]


def recorded(fleet: FleetServer, folder: Path) -> list[Path]:
    """The KV events of all workers so far, as recordings."""
    files = []
    for worker in range(len(fleet.urls)):
        (stream,) = fleet.streams(worker)
        assert stream.replay_endpoint is not None
        files.append(folder / f"{worker}.rec")
        with RecordingWriter(files[-1], About()) as recording:
            for frame in fetch_replay(stream.replay_endpoint, 0):
                recording.write(frame.seq, frame.parts())
    return files


def seen(
    faults: Mapping[str, Any], told: Mapping[str, object] = {}, events: Path | None = None, **more: object
) -> Expectation:
    """Return the expectation of a mock engine with ``faults``, whose settings are ``told``, beside what it counted, and
    beside its events if there is a folder for them."""
    rows: list[TraceRequest] = []
    cached: dict[str, int] = {}
    with (
        FleetServer(faults=faults, speed=1000, **{**SETTINGS, **more}) as fleet,  # type: ignore[arg-type]
        httpx.Client(base_url=fleet.url, trust_env=False) as client,
    ):
        for at, prompt in enumerate(prompts()):
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            rows.append(TraceRequest(f"r{at}", at * 10**9, len(prompt), 2, tokens=prompt))
            cached[f"r{at}"] = usage["prompt_tokens_details"]["cached_tokens"] or 0
        counted = read_page(client.get("/metrics").text)
        reported = visit_engine(fleet.url).settings
        evidence = from_events(recorded(fleet, events)) if events is not None else ()
    if not more:
        assert reported["max_model_len"] == 4096
    if faults.get("choices") is None:
        counted.by_request = cached
    return expect(traffic(rows), {**SETTINGS, **told}, counted, evidence=evidence)


def test_healthy_mock() -> None:
    found = seen({})
    assert (found.cause, found.equal) == ("", 30), found.different


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ({"salt_per_request": True}, "never-shared"),
        ({"adapter_per_request": True}, "never-shared"),
        ({"image_per_request": True}, "media"),
        ({"changing_text": True}, "changing-text"),
        ({"changing_text": True, "pool_share": 0.3}, "changing-text"),
        ({"pool_share": 0.15}, "pool"),
        ({"choices": 3}, "choices"),
        ({"asleep": True}, "asleep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fault_is_named(faults: dict[str, Any], cause: str) -> None:
    found = seen(faults)
    assert found.cause == cause and found.fault, (found.sentence, found.different)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("salt_per_request", "salts"),
        ("adapter_per_request", "adapters"),
        ("image_per_request", "media"),
        ("changing_text", "changing-text"),
    ],
)
def test_events_distinguish_salts_adapters_and_media(fault: str, cause: str, tmp_path: Path) -> None:
    found = seen({fault: True}, events=tmp_path)
    assert found.cause == cause and found.fault, (found.sentence, found.different)


def test_a_tier_that_stores_and_never_loads() -> None:
    small = {"num_gpu_blocks": 64, "host_blocks": 400}
    for faults, cause in (({"store_only": True}, "store-only"), ({}, "")):
        found = seen(faults, small, **small)
        assert found.cause == cause, (found.sentence, found.different)


def test_block_size_that_was_configured_wrongly() -> None:
    assert seen({}, {"block_size": 64, "num_gpu_blocks": 100}).cause == "block-size"


def test_seeds_differ_in_recorded_events(tmp_path: Path) -> None:
    for faults, found in (({}, set()), ({"hash_seed": True}, {"hash-seed"})):
        with FleetServer(faults=faults, workers=2, speed=1000, hash_seed="7", **SETTINGS) as fleet:
            for url in fleet.urls:
                httpx.post(f"{url}/v1/completions", json={"prompt": prompts(1)[0], "max_tokens": 1}, trust_env=False)
            (tmp_path / str(len(faults))).mkdir()
            files = recorded(fleet, tmp_path / str(len(faults)))
        assert from_events(files) == found


def test_events_that_are_off_in_a_gateway_s_recording(tmp_path: Path) -> None:
    """A router by caches that receives no events spreads requests, and the recording shows it."""
    pytest.importorskip("aiohttp", reason="needs kvyard[server]")
    from tests.server.gateway.support import front

    settings = {**SETTINGS, "num_gpu_blocks": 4000, "workers": 4, "router": "kv", "timing_speedup": 1000}
    random = Random(7)
    texts = [[random.randrange(200) for _ in range(400)] for _ in range(21)]
    for off, cause in ((True, "events-off"), (False, "")):
        recording = tmp_path / f"{off}.jsonl"
        router = {"policy": "kv", "predicted_ttl_s": 0}
        mock = {"engine": {"num_gpu_blocks": 4000, "block_size": 16}, "speed": 1000}
        with front(4, mock=mock, router=router, record=str(recording)) as (gate, served):
            for worker in served.fleet.workers:
                worker.faults = changed(worker.faults, {"events_off": off})
            for at in range(150):
                gate.complete([*texts[at % 21], *(random.randrange(200) for _ in range(20))], max_tokens=2)
                if not off and at < 21:  # the next request for this text may come before its events, on a busy machine
                    asked = {"prompt": texts[at]}
                    eventually(lambda asked=asked: gate.post("/explain", body=asked).json()["best_blocks"] >= 24)
            gate.idle()
            eventually(lambda path=recording: last_lines(path, 150).count(b"\n") == 150)
        recorded = read_traffic(open_trace(recording))
        found = expect(recorded, settings, Counted(source="recording", by_request=recorded.cached))
        assert found.cause == cause, (found.sentence, found.different)
