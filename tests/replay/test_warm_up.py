"""Warm-up: what isn't counted, and a report of the window alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest
from kvyard.replay.warm_up import WarmUp, parse_warm_up

FLEET = {
    "workers": 2,
    "timing": "fixed:10,5",
    "block_size": 16,
    "num_gpu_blocks": 2000,
    "host_blocks": 4000,
    "router": "kv",
}


def rows(count: int, start: int = 0) -> list[TraceRequest]:
    """One a second; every tenth has the prompt of the one ten before."""
    return [
        TraceRequest(str(number), number * SECOND, 512, 10, tuple(range(number % 10 * 100, number % 10 * 100 + 32)), 16)
        for number in range(start, start + count)
    ]


def test_texts() -> None:
    assert parse_warm_up("200") == WarmUp(requests=200)
    assert parse_warm_up("5m") == WarmUp(time=300 * SECOND)
    assert parse_warm_up("day.jsonl") == WarmUp(trace="day.jsonl")


def test_the_first_requests_fill_caches_and_are_not_counted() -> None:
    cold, warm = replay(rows(30), **FLEET), replay(rows(30), warm_up="10", **FLEET)
    assert cold.report.requests["all"] == 30 and warm.report.requests["all"] == 20
    assert [record.id for record in warm.records] == [str(number) for number in range(10, 30)]
    assert [record.ended for record in warm.records] == [record.ended for record in cold.records[10:]]
    assert warm.report.reuse["all"].value > 0.9 > cold.report.reuse["all"].value
    assert warm.report.duration_s == pytest.approx(19, abs=0.1)
    assert warm.records[3].id == "13" and warm.fleet.records["17"].id == "17"


def test_counters_are_of_the_window() -> None:
    cold, warm = replay(rows(30), **FLEET), replay(rows(30), warm_up="10s", **FLEET)
    assert sum(worker.computed_tokens for worker in cold.report.workers) == 10 * 512 + 20 * 16
    assert sum(worker.computed_tokens for worker in warm.report.workers) == 20 * 16
    assert sum(worker.passes for worker in warm.report.workers) == 20 * 10
    assert cold.report.transfers["stores"].blocks > 0 == warm.report.transfers["stores"].blocks
    assert warm.report.latency["itl"].count == 20 * 9
    assert all(time >= 0 for time in warm.report.timeline.times_s)


def test_another_trace_runs_before(tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    path.write_bytes(
        b"\n".join(
            msgspec.json.encode(
                {"timestamp": number * 1000, "input_length": 512, "output_length": 10, "hash_ids": [number % 10]}
            )
            for number in range(10)
        )
    )
    after = [TraceRequest(str(number), number * SECOND, 512, 10, (number % 10,), 512) for number in range(10)]
    done = replay(after, warm_up=str(path), **FLEET)
    assert done.report.requests["all"] == 10 and done.report.reuse["all"].value > 0.9
    assert done.records[0].arrival > 9 * SECOND
    assert done.report.duration_s == pytest.approx(9, abs=0.1)


def test_rows_of_a_file_are_of_the_window(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    replay(rows(30), warm_up="25", per_request=out, **FLEET)
    assert len(out.read_text().splitlines()) == 5


def test_nothing_left_is_refused() -> None:
    with pytest.raises(KvyardError, match="warm_up leaves no request to report on"):
        replay(rows(5), warm_up="10", **FLEET)
    with pytest.raises(KvyardError, match="bounds are those of a whole trace"):
        replay(rows(5), warm_up="2", bounds=True, **FLEET)
