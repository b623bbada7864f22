"""A real SGLang is calibrated from outside: what the command reads of it, and a profile that a replay takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.real.sglang.conftest import PAGES, SIZE
from tests.real.sglang.engine import SglangEngine

from kvyard.cli.app import main
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest


def test_a_real_engine_is_calibrated(
    pair: list[SglangEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary of the model is small: the engine dies of token ids that are beyond it."""
    engine, path = pair[0], tmp_path / "mine.json"
    with pytest.raises(SystemExit) as exit_:
        main(["calibrate", engine.url, "-o", str(path), "--max-batch", "8", "--max-prompt", "512", "--seconds", "120"])
    out, err = capsys.readouterr()
    assert exit_.value.code == 0, err
    print(out)
    assert "SGLang 0." in out
    assert f"--set block_size={SIZE} --set num_gpu_blocks={PAGES}" in out
    assert engine.running, engine.tail()
    done = replay([TraceRequest("one", 0, 256, 8)], workers=1, timing=f"profile:{path}", backend="sglang")
    assert done.records[0].ended > done.records[0].first_token > 0
