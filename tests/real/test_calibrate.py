"""A real vLLM is calibrated from outside: what the command finds out of it, and a profile that a replay takes.

Then requests are sent to it, and what they took is compared with what a replay with that profile says.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import Engines, RealEngine

from kvyard.cli.app import main
from kvyard.clock import SECOND
from kvyard.lab.validate.compare import Validation, validate
from kvyard.lab.validate.reading import MeasuredRequest, MeasuredRun
from kvyard.replay.live.run import replay_live
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest

BUDGET, BLOCKS, SEATS = 1024, 800, 32
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}
"""Large enough that passes take much longer than Python around them."""
RATES = (1.0, 3.0)
"""Requests per second that are sent and predicted."""
REQUESTS = 200
WARM = 50
"""Requests before anything is measured: passes of an engine that has just started take up to twice as long."""
TOLERANCE = 0.5
"""How far off a mean may be on a machine that has little else to do, as a share."""
QUIET = 4.0
"""Load average up to which the tolerance holds on two cores: the engine and its client are half of it."""


Errors = dict[str, dict[str, float]]
"""By kind of latency, of the mean and percentiles, as shares."""


def get_engine(engines: Engines) -> RealEngine:
    return engines.get(
        blocks=BLOCKS,
        longest=2048,
        events=False,
        flags=(
            *("--hf-overrides", json.dumps(SHAPE)),
            *("--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", str(SEATS)),
        ),
        # One thread: several wait for each other on a busy machine. Development mode tells the scheduler's settings.
        environment=(("OMP_NUM_THREADS", "1"), ("VLLM_SERVER_DEV_MODE", "1")),
    )


def send(engine: RealEngine, name: str, rate: float, count: int) -> MeasuredRun:
    """Send ``count`` requests at random times, ``rate`` per second in the mean; what became of them."""
    draw = random.Random(name)
    came, requests = 0.0, []
    for number in range(count):
        requests.append(
            TraceRequest(f"{name}-{number}", int(came * SECOND), draw.randint(32, 384), draw.randint(8, 48))
        )
        came += draw.expovariate(rate)
    records = {record.id: record for record in replay_live(requests, engine.url, label=name).records}
    measured = []
    for request in requests:
        record = records[request.id]
        assert (record.status, record.output) == ("finished", request.output_length), record
        measured.append(MeasuredRequest(request=request, first_token=record.first_token, ended=record.ended, cached=0))
    return MeasuredRun(name=name, format="live", requests=measured, client=True)


def errors(found: Validation) -> Errors:
    return {name: {at: round(off, 3) for at, off in one.error.items()} for name, one in found.latency.items()}


def test_a_real_engine_is_calibrated(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = get_engine(engines)
    path = tmp_path / "mine.json"
    hits = engine.metrics()['vllm:prefix_cache_hits_total{engine="0",model_name="tiny"}']
    with pytest.raises(SystemExit) as exit_:
        main(["calibrate", engine.url, "-o", str(path), "--max-batch", "20", "--max-prompt", "512", "--seconds", "120"])
    out, err = capsys.readouterr()
    assert exit_.value.code == 0, err
    assert "vLLM 0." in out
    # vLLM turns asynchronous scheduling off on CPUs, and calibrate must know.
    assert "Passes are decided when they start: as the engine says." in out
    assert f"--set block_size=32 --set num_gpu_blocks={BLOCKS - 1}" in out
    assert f"--set max_num_batched_tokens={BUDGET} --set max_num_seqs={SEATS}" in out
    assert "HTTP, tokenizing and the client add" in out  # told by the engine's own metrics
    assert engine.metrics()['vllm:prefix_cache_hits_total{engine="0",model_name="tiny"}'] == hits
    done = replay([TraceRequest("one", 0, 256, 8)], workers=1, timing=f"profile:{path}", async_scheduling=False)
    assert done.records[0].ended > done.records[0].first_token > 0


def test_what_requests_take_is_predicted(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: Callable[[str, Any], None]
) -> None:
    """Two rates, by a profile that was made just before; a timing that knows nothing of the engine must be far off."""
    engine = get_engine(engines)
    send(engine, "warm", 4.0, WARM)
    path, loads = tmp_path / "mine.json", [os.getloadavg()[0]]
    with pytest.raises(SystemExit) as exit_:
        main(["calibrate", engine.url, "-o", str(path), "--max-batch", "20", "--max-prompt", "512", "--seconds", "120"])
    assert exit_.value.code == 0, capsys.readouterr().err
    settings = {
        "async_scheduling": False,
        "block_size": 32,
        "num_gpu_blocks": BLOCKS - 1,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": SEATS,
    }
    mine, others = dict[str, Errors](), dict[str, Errors]()
    for rate in RATES:
        loads.append(os.getloadavg()[0])
        run = send(engine, f"{rate:g}/s", rate, REQUESTS)
        mine[run.name] = errors(validate(run, {**settings, "timing": f"profile:{path}"}))
        others[run.name] = errors(validate(run, {**settings, "timing": "polynomial"}))
    loads.append(os.getloadavg()[0])
    figures("calibrated", {"load": loads, "errors": mine, "errors of the polynomial": others})
    assert all(abs(of["tpot"]["mean"]) > TOLERANCE for of in others.values()), others
    if max(loads) > QUIET:
        pytest.skip(f"others use the machine (load {max(loads):.1f}), so no tolerance holds; seen: {mine}")
    assert all(abs(of[kind]["mean"]) <= TOLERANCE for of in mine.values() for kind in ("ttft", "tpot", "e2e")), mine
