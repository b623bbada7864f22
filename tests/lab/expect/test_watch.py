"""Watching a recording that grows: only its end is compared, and results are scraped."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.lab.expect.support import ONE, counts, documents
from tests.server.read_process import ReadProcess
from tests.waiting import eventually

from kvyard.errors import KvyardError
from kvyard.lab.expect.gateway_link import CpuBudget, GatewayLink
from kvyard.lab.expect.tail import last_lines, read_latest
from kvyard.lab.expect.traffic import read_traffic
from kvyard.lab.expect.watch import ExpectWatch, latest
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
    watch = ExpectWatch(lambda rows: read_latest(path, rows, open_trace), ONE, every_s=60, requests=30)
    watch.look()
    assert watch.cpu_s > 0 and watch.expectation is not None
    assert (watch.expectation.cause, watch.expectation.compared, watch.expectation.equal) == ("", 30, 30)
    text = watch.metrics.text()[0].decode()
    assert "kvyard_expect_fault 0.0" in text and "kvyard_expect_exact_requests 30.0" in text
    recorded(path, rows, dict.fromkeys((row.id for row in rows), 0))
    watch.look()
    text = watch.metrics.text()[0].decode()
    assert 'kvyard_expect_cause{cause="caching-off",kind="fault"} 1.0' in text and "kvyard_expect_fault 1.0" in text
    assert watch.looks == 2


def test_caches_that_were_warmed_before_the_window_are_no_fault(tmp_path: Path) -> None:
    rows = documents(160, kinds=40)
    path = recorded(tmp_path / "r.jsonl", rows, counts(rows, ONE).by_request)
    watch = ExpectWatch(lambda count: read_latest(path, count, open_trace), ONE, every_s=60, requests=15)
    watch.look()
    found = watch.expectation
    assert found is not None and found.counted is not None and found.counted > sum(row.owed for row in found.rows)
    assert (found.cause, found.fault) == ("", False)


def test_looks_without_a_result_are_counted(tmp_path: Path) -> None:
    watch = ExpectWatch(lambda rows: read_latest(tmp_path / "none", rows, open_trace), ONE, every_s=60, requests=30)
    watch.look()
    assert (watch.looks, watch.failed, watch.expectation) == (1, 1, None)
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


def test_only_the_end_of_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(1000)) + b"half a li")
    monkeypatch.setattr("kvyard.lab.expect.tail.CHUNK", 16)
    assert last_lines(path, 3) == b"997\n998\n999\n"
    assert last_lines(path, 5000).count(b"\n") == 1000
    path.write_bytes(b"")
    assert last_lines(path, 3) == b""


def test_looks_take_a_small_share_of_the_gateway_s_processor_time() -> None:
    budget = CpuBudget(0.02)
    budget.observe(100.0, 0)
    assert budget.requests(2000) == 50, "the first look is small, and at once"
    budget.spent_s, budget.request_s = 0.9, 0.002
    assert not budget.requests(2000)
    budget.observe(125.0, 100)  # a quarter of a core
    assert budget.earned_s == pytest.approx(0.5) and not budget.requests(2000)
    assert budget.pause_s(60, 2000) == pytest.approx((0.4 + 50 * 0.002) / (0.02 * 0.25)), "until 50 requests are earned"
    budget.observe(5.0, 10)  # it was restarted
    assert budget.earned_s == pytest.approx(0.6)
    budget.observe(45.0, 80)
    assert 249 <= budget.requests(2000) <= 250 and budget.requests(40) == 40 and budget.pause_s(60, 2000) == 60
    budget.observe(10_000.0, 10_000)
    assert budget.requests(2000) == 2000 and budget.earned_s < 11, "an idle night isn't spent at once"
    budget.spent_s = 20.0
    budget.observe(10_000.0, 60)  # an idle gateway: seldom, and not never
    assert budget.pause_s(60, 2000) == 3600


def test_the_gateway_s_dashboard_shows_the_result(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs kvyard[server]")
    pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
    from tests.server.gateway.support import front

    recording = tmp_path / "traffic.jsonl"
    with front(1, mock={"engine": {"num_gpu_blocks": 1000, "block_size": 16}}, record=str(recording)) as (gate, _):
        for turn in range(12):
            gate.complete([*range(64 * (turn % 2), 64 * (turn % 2) + 160), 500 + turn], max_tokens=2)
        gate.idle()
        link = GatewayLink(gate.url)
        watch = ExpectWatch(
            lambda rows: read_latest(recording, rows, open_trace),
            {"block_size": 16, "num_gpu_blocks": 1000, "concurrency": 1, "timing": "polynomial"},
            every_s=60,
            requests=10,
            gateway=link,
        )
        eventually(lambda: last_lines(recording, 12).count(b"\n") == 12)

        async def look_once() -> None:
            await watch.start()
            await asyncio.to_thread(eventually, lambda: watch.expectation is not None or watch.failed)
            await asyncio.to_thread(eventually, lambda: gate.client.get("/dashboard/view").json()["expectation"])
            await watch.stop()

        asyncio.run(look_once())
        assert (watch.looks, watch.failed) == (1, 0)
        shown = gate.client.get("/dashboard/view").json()["expectation"]
        assert (shown["requests"], shown["exact"], shown["fault"]) == (10, 10, False)
        assert shown["owed"] == shown["counted"] > 0
        assert 0 < link.cpu_seconds() <= link.cpu_seconds()
        with pytest.raises(KvyardError, match="doesn't answer"):
            GatewayLink("http://127.0.0.1:9").cpu_seconds()
