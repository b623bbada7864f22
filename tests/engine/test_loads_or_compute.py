"""Load or compute in a whole engine: a crowded link, one that is quick enough, and what records and reports say of it."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

import pytest

import kvyard
from kvyard.replay.report.words import left_loads
from kvyard.replay.run import SimulatedRun
from kvyard.replay.traces import TraceRequest

SECOND = 10**9


def prompts(at_a_time: int, families: int = 12, length: int = 4096) -> list[TraceRequest]:
    """Prompts far apart, so that all are stored, others that push them off the device, then all again in waves."""
    rows = []
    for serial in range(3 * families):
        family = serial % (2 * families)
        again = serial >= 2 * families
        at = serial * 10 if not again else 1000 + (family // at_a_time) * 100
        ids = [family * 100 + part for part in range(length // 512)]
        rows.append(TraceRequest(f"{again:d}.{family}", at * SECOND, length, 4, ids=ids, id_block_size=512))
    return rows


def run(rows: list[TraceRequest], gb_s: float, **settings: object) -> SimulatedRun:
    blocks = 12 * 4096 // 64 + 12
    return kvyard.replay(
        rows,
        workers=1,
        router="round-robin",
        num_gpu_blocks=blocks,
        host_blocks=4 * blocks,
        host_bandwidth=gb_s,
        **settings,
    )


def ttft(found: SimulatedRun) -> float:
    return geometric_mean(record.ttft for record in found.records if record.id.startswith("1."))


@pytest.mark.parametrize(("policy", "at_a_time"), [("threshold", 12), ("least-time", 12), ("least-time", 1)])
def test_a_link_that_is_slower_than_computing(policy: str, at_a_time: int) -> None:
    rows = prompts(at_a_time)
    forced, chosen = run(rows, 1.0), run(rows, 1.0, load_policy=policy)
    assert ttft(chosen) <= 0.8 * ttft(forced), "the bar is a fifth"
    report = chosen.report
    again = [record for record in chosen.records if record.id.startswith("1.")]
    left = sum(record.left for record in again)
    assert left == sum(report.left_tokens.values()) > 0
    assert left + sum(sum(record.loaded) for record in again) == 12 * (4096 - 64)
    assert report.left_requests == sum(record.left > 0 for record in again)
    assert report.misses["left"].part == report.left_requests
    assert report.missed_tokens["left"].part == left
    assert "tokens that lower tiers had" in left_loads(report)
    assert forced.report.left_requests == 0 and "left" not in forced.report.misses
    chosen.fleet.workers[0].cores[0].check_integrity()


@pytest.mark.parametrize("policy", ["threshold", "least-time"])
def test_where_loading_is_right_nothing_changes(policy: str) -> None:
    rows = prompts(1)
    forced, chosen = run(rows, 32.0), run(rows, 32.0, load_policy=policy)
    assert chosen.records == forced.records
    assert sum(sum(record.loaded) for record in forced.records) == 12 * (4096 - 64)


def test_a_report_says_what_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(prompts(1), 1.0, load_policy="least-time")
    found.save(html=tmp_path / "page.html")
    found.show()
    words = "12 requests computed 48,384 tokens that lower tiers had: computed sooner than loaded 48,384"
    assert words in (tmp_path / "page.html").read_text()
    assert words in " ".join(capsys.readouterr().out.split())
