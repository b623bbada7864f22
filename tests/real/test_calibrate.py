"""A real vLLM is calibrated from outside: what the command finds out of it, and a profile that a replay takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.real.engine import Engines

from kvyard.cli.app import main
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


def test_a_real_engine_is_calibrated(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engines.get(
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
