"""Our engine against logs of TensorRT-LLM's Python schedulers."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from kvyard.lab.conform import LogError
from kvyard.lab.conform.trtllm import conform

LOGS = sorted((Path(__file__).parents[2] / "golden" / "trtllm").glob("*.jsonl.xz"))


@pytest.mark.parametrize("path", LOGS, ids=[path.name.split(".")[0] for path in LOGS])
def test_every_pass_is_the_same(path: Path) -> None:
    verdict = conform(path)
    assert verdict.difference is None, verdict.difference
    assert verdict.operations > 50


def altered(tmp_path: Path, **config: Any) -> Path:
    """A log with other settings than it was recorded with."""
    log = next(path for path in LOGS if path.name.startswith("no-evict-chunked@"))
    header, *lines = lzma.decompress(log.read_bytes()).decode().splitlines()
    changed = json.loads(header)
    changed["config"] |= config
    path = tmp_path / "altered@1.jsonl"
    path.write_text("\n".join([json.dumps(changed), *lines]))
    return path


@pytest.mark.parametrize(
    "config",
    [
        {"chunk_unit_size": 128, "tokens_per_block": 64},
        {"context_chunking_policy": "EQUAL_PROGRESS"},
        {"capacity_scheduler_policy": "MAX_UTILIZATION", "num_blocks": 30},
        {"max_batch_size": 2},
        {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.5},
        {"overlap": True},
    ],
)
def test_other_settings_are_another_run(tmp_path: Path, config: dict[str, Any]) -> None:
    assert conform(altered(tmp_path, **config)).difference is not None


def test_settings_that_the_engine_does_not_have_are_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"is no scheduler log: .*static_batch"):
        conform(altered(tmp_path, capacity_scheduler_policy="STATIC_BATCH"))
