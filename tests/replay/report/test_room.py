"""Advice on room for blocks names what exists, and runs with more blocks than a card holds are marked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.replay.support import sessions

from kvyard.engine.models import find_config, plan
from kvyard.errors import KvyardError
from kvyard.lab.sweep import sweep
from kvyard.replay import replay
from kvyard.replay.report.answers import answers
from kvyard.replay.report.room import more_room, what_if
from kvyard.replay.report.words import notes
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.writing import write_trace


def engine(**settings: object) -> dict[str, Any]:
    made = make_config({"model": "qwen3-32b", "gpu": "h100", "workers": 1, **settings})
    found: dict[str, Any] = msgspec.to_builtins(made.workers[0].engine)
    return found


def test_ways_to_more_room_are_real() -> None:
    ways = re.findall(r"\((?:--)?(-?[\w-]+) (\w+): ([\d.]+) times the room\)", more_room(engine()))
    assert {name for name, _, _ in ways} == {"kv-cache-dtype", "quantization", "-tp", "gpu"}
    own = make_config({"model": "qwen3-32b", "gpu": "h100", "workers": 1}).workers[0].engine.capacity_tokens
    for name, value, times in ways:
        key = {"-tp": "tensor_parallel_size", "quantization": "weight_dtype"}.get(name, name.replace("-", "_"))
        changed = make_config({"model": "qwen3-32b", "gpu": "h100", "workers": 1, key: value}).workers[0].engine
        assert changed.capacity_tokens / own == pytest.approx(float(times), rel=0.05)


def test_remedies_in_use_are_not_named() -> None:
    said = more_room(engine(tensor_parallel_size=8, kv_cache_dtype="fp8", weight_dtype="fp8"))
    assert "-tp" not in said and "fp8" not in said and "--gpu h200" in said
    largest = more_room(engine(gpu="b300", tensor_parallel_size=8, kv_cache_dtype="fp8", weight_dtype="fp8"))
    assert largest == "fewer requests at a time (--max-num-seqs), or more workers"
    assert more_room({"num_gpu_blocks": 100}) == ""


@pytest.mark.parametrize(("gpu", "degree"), [("h100", 1), ("h200", 2), ("l40s", 4)])
def test_the_blocks_of_a_card_are_no_what_if(gpu: str, degree: int) -> None:
    on = engine(gpu=gpu, tensor_parallel_size=degree)
    assert what_if(on) == ""
    room = plan(find_config("qwen3-32b"), 2**60, tensor_parallel_size=degree).bytes_per_block
    assert room == on["bytes_per_block"]
    more = engine(gpu=gpu, tensor_parallel_size=degree, num_gpu_blocks=2 * on["num_gpu_blocks"])
    assert f"{2 * on['num_gpu_blocks']:,} blocks on each device" in what_if(more)


def test_a_card_without_room_for_weights() -> None:
    with pytest.raises(KvyardError, match="doesn't fit"):
        engine(gpu="l4")
    assert "room for none beside the model's weights" in what_if(engine(gpu="l4", num_gpu_blocks=1000))


def test_a_report_and_a_sweep_mark_a_what_if(tmp_path: Path) -> None:
    trace = [TraceRequest(str(at), at * 10**9, 200, 4) for at in range(3)]
    settings = {"model": "qwen3-32b", "gpu": "h100", "workers": 1}
    assert any(
        note.startswith("A what-if: 40,000 blocks")
        for note in notes(replay(trace, num_gpu_blocks=40_000, **settings).report)
    )
    assert not any("what-if" in note for note in notes(replay(trace, **settings).report))
    path = tmp_path / "trace.jsonl"
    write_trace(sessions(20), path, "mooncake")
    study = sweep(path, {"num_gpu_blocks": [1000, 40_000]}, folder=tmp_path / "sweep", trace_block_size=16, **settings)
    assert [note for note in study.result().notes if "What-if" in note] == [
        "What-ifs, with more blocks than the card has room for: num_gpu_blocks=40000."
    ]
    said = study.result().advice
    assert said[-1] == "What-ifs are not advised." and "Take num_gpu_blocks=1000:" in " ".join(said)
    alone = sweep(path, {"num_gpu_blocks": [40_000]}, folder=tmp_path / "alone", trace_block_size=16, **settings)
    assert "Take num_gpu_blocks=40000" in " ".join(alone.result().advice), "asked for nothing else"


def test_advice_for_a_card_never_names_more_blocks() -> None:
    trace = [TraceRequest(str(at), at * 10**8, 12_000, 400) for at in range(30)]
    said = " ".join(answers(replay(trace, model="qwen3-32b", gpu="h100", workers=1).report))
    assert (
        "requests wait while running ones hold the blocks. Try an FP8 cache" in said and "--num-gpu-blocks" not in said
    )
