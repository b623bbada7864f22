"""Public reports of missing hits, sent through the scheduler of a real vLLM: it finds what ``kvyard expect`` says it owes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.lab.expect.support import traffic
from tests.lab.expect.test_expectation_reports import REPORTS, prompts

from kvyard.lab.expect import expect
from kvyard.lab.expect.owed import settle_settings
from kvyard.replay.settings import make_config

SCRIPT = Path(__file__).with_name("reports_in_vllm.py")
CONFIGURED = ("granularity", "last-block", "draft-head")
"""Causes that a configuration has by design: 0.32 counts what the report's version counted."""
REAL = [
    report
    for report in REPORTS
    if report["settings"].get("backend", "vllm") == "vllm"
    and not report["settings"].keys() & {"workers", "host_blocks"}
    and not any("turns" in part for part in report["traffic"])
]


def in_vllm(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` as ``SchedulerUnderTest`` takes them."""
    engine = make_config(settle_settings(settings)).workers[0].engine
    groups = [
        {
            "type": group.kind,
            "block_size": group.block_size,
            **({"window": group.window} if group.kind == "sliding_window" else {}),
        }
        for group in engine.block_groups
    ]
    return {
        "groups": groups,
        "block_size": engine.block_groups[0].block_size,
        "num_blocks": engine.num_gpu_blocks + 1,
        "max_model_len": engine.max_model_len or 1 << 17,
        "max_num_seqs": 16,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "enable_chunked_prefill": True,
        "policy": "fcfs",
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": 0,
        "num_speculative_tokens": settings.get("num_speculative_tokens", 0),
        "drafter": "eagle",
        "async_scheduling": False,
    }


def test_reports_on_the_real_scheduler(tmp_path: Path) -> None:
    rows = [prompts(report["traffic"]) for report in REAL]
    cases = [
        {"settings": in_vllm(report["settings"]), "prompts": [list(row.tokens or ()) for row in each]}
        for report, each in zip(REAL, rows, strict=True)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    python = os.environ["KVYARD_VLLM_PYTHON"]
    done = subprocess.run([python, SCRIPT, tmp_path / "cases.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    different = {}
    for report, each, hits in zip(REAL, rows, json.loads(done.stdout), strict=True):
        owed = [row.owed for row in expect(traffic(each), {**report["settings"], "concurrency": 1}).rows]
        if owed != hits:
            different[report["link"]] = (owed, hits)
        if report["cause"] in CONFIGURED and "hits" in report.get("counted", {}):
            assert sum(hits) == report["counted"]["hits"], report["link"]
    assert not different and len(REAL) >= 8
