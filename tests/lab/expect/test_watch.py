"""Watching a recording that grows: only its end is compared, and results are scraped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.lab.expect.support import ONE, counts, documents
from tests.server.read_process import ReadProcess
from tests.server.support import eventually

from kvyard.errors import KvyardError
from kvyard.lab.expect.traffic import read_traffic
from kvyard.lab.expect.watch import CPU_SHARE, ExpectWatch, latest
from kvyard.replay.traces import TraceRequest, open_trace

pytest.importorskip("prometheus_client", reason="needs kvyard[server]")


def recorded(path: Path, rows: list[TraceRequest], theirs: dict[str, int]) -> Path:
    """``rows`` as a gateway records them."""
    lines = [
        {
            "timestamp": row.arrival / 1e6,
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": list(row.ids or ()),
            "block_size": 16,
            "cached": theirs[row.id],
        }
        for row in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_end_of_a_recording_is_compared_with_warm_caches(tmp_path: Path) -> None:
    rows = documents(90)
    path = recorded(tmp_path / "r.jsonl", rows, counts(rows, ONE).by_request)
    traffic, counted = latest(read_traffic(open_trace(path)), 30)
    assert len(traffic.requests) == 60 and len(counted.by_request) == 30 and traffic.requests[0].arrival == 0
    watch = ExpectWatch(lambda: read_traffic(open_trace(path)), ONE, every_s=60, requests=30)
    assert watch.look() > 0 and watch.found is not None
    assert (watch.found.cause, watch.found.compared, watch.found.equal) == ("", 30, 30)
    text = watch.metrics.text()[0].decode()
    assert "kvyard_expect_fault 0.0" in text and "kvyard_expect_exact_requests 30.0" in text
    recorded(path, rows, dict.fromkeys((row.id for row in rows), 0))
    watch.look()
    text = watch.metrics.text()[0].decode()
    assert 'kvyard_expect_cause{cause="caching-off",kind="fault"} 1.0' in text and "kvyard_expect_fault 1.0" in text
    assert watch.looks == 2 and CPU_SHARE <= 0.02


def test_looks_without_a_result_are_counted(tmp_path: Path) -> None:
    watch = ExpectWatch(lambda: read_traffic(open_trace(tmp_path / "none")), ONE, every_s=60, requests=30)
    watch.look()
    assert (watch.looks, watch.failed, watch.found) == (1, 1, None)
    rows = documents(4)
    plain = read_traffic(rows)
    with pytest.raises(KvyardError, match="cached_tokens"):
        latest(plain, 2)


def test_the_command_serves_metrics(tmp_path: Path) -> None:
    rows = documents(40)
    path = recorded(tmp_path / "r.jsonl", rows, counts(rows, ONE).by_request)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ONE.items()]
    command = [sys.executable, "-m", "kvyard", "expect", str(path), *flags, "--watch=60s", "--window=20", "--port=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    with ReadProcess(process) as watching:
        url = str(
            eventually(lambda: watching.text.partition("metrics at ")[2].partition("\n")[0], lambda: watching.text)
        )
        eventually(
            lambda: "kvyard_expect_exact_requests 20.0" in httpx.get(url, trust_env=False).text, lambda: watching.text
        )
