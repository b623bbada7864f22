"""Prefetch of the next turn while a tool runs: what was evicted meanwhile is back on the device when the turn comes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.replay.support import request

from kvyard.errors import KvyardError
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest
from kvyard.replay.traces.changes import prefetched

SETTINGS: dict[str, Any] = {
    "workers": 1,
    "block_size": 64,
    "num_gpu_blocks": 130,
    "host_blocks": 1000,
    "bytes_per_token": "128KiB",
    "host_bandwidth": 32,
}
BLOCK_NS = 64 * (128 << 10) / 32
"""Time of a block at 32 GB/s."""


def tool(filler: bool = True, tool_call: bool = True) -> list[TraceRequest]:
    """Two turns of 100 and 101 blocks with a tool of 10 s between them; a prompt of 100 blocks pushes the first out, into host
    memory, while the tool runs.
    """
    long = {"input_length": 6400, "ids": list(range(100)), "id_block_size": 64}
    rows = [request("a0", session="a", tool_call=tool_call, **long)]
    if filler:
        rows.append(request("filler", 3, **{**long, "ids": list(range(1000, 1100))}))
    return [*rows, request("a1", session="a", delay=10, **{**long, "input_length": 6464, "ids": list(range(101))})]


def second_turn(rows: list[TraceRequest], **settings: Any) -> tuple[int, int, tuple[int, ...]]:
    """TTFT, tokens found on the device, tokens loaded."""
    done = replay(rows, **SETTINGS, **settings)
    assert done.report.requests["all"] == len(rows) == len(done.records), "prefetches aren't counted"
    record = next(record for record in done.records if record.id == "a1")
    return record.first_token - record.arrival, record.cached, record.loaded


def test_prefetched_blocks_need_no_load() -> None:
    undisturbed, cached, _ = second_turn(tool(filler=False))
    assert cached == 6400
    late, cached, loaded = second_turn(tool())
    assert (cached, loaded) == (1856, (4544,)), "71 of 100 blocks were pushed out"
    assert late - undisturbed == 71 * BLOCK_NS
    assert second_turn(tool(), prefetch="2s") == (undisturbed, 6400, ())


def test_too_early_or_too_late_is_of_no_use() -> None:
    without = second_turn(tool())
    assert second_turn(tool(), prefetch="8s") == without, "before the other prompt pushed it out"
    assert second_turn(tool(), prefetch=0) == without, "never"
    assert second_turn(tool(), prefetch="11s") == without, "the tool takes 10 s only"
    assert second_turn(tool(tool_call=False), prefetch="2s") == without, "a person is no tool"
    half = 71 * BLOCK_NS / 2e9
    ttft, _, _ = second_turn(tool(), prefetch=f"{half}s")
    assert second_turn(tool(filler=False))[0] < ttft < without[0], "half of it was loaded when the turn came"


def test_in_a_closed_loop_it_takes_the_place_of_its_session() -> None:
    rows = [*tool(filler=False), request("b", session="b", input_length=100)]
    done = replay(rows, **SETTINGS, concurrency=1, prefetch="2s")
    ends = {record.id: (record.arrival, record.ended) for record in done.records}
    assert ends["b"][0] >= ends["a1"][1], "one session at a time"


def test_the_rows() -> None:
    rows = list(prefetched(tool(), 2_000_000_000))
    assert [row.id for row in rows] == ["a0", "filler", "a0:prefetch", "a1"]
    made = rows[2]
    assert (made.after, made.delay, made.output_length, made.session, made.root) == (
        ("a0",),
        8_000_000_000,
        1,
        None,
        "a",
    )
    assert made.ids == rows[0].ids and made.prefetch


def test_impossible_prefetches_are_refused() -> None:
    with pytest.raises(KvyardError, match="leave out prefetch, or bounds"):
        replay(tool(), **SETTINGS, prefetch="2s", bounds=True)
