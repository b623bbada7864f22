"""Figures of several processes as one server's: nothing falls that may not fall."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from kvyard.server.gateway.processes.figures import Figures, ended_figures, merged_figures

SUMMED, COMMON = "kvyard_gateway_requests", "kvyard_index_events"


def figures(requests: int, events: int, worker: str = "w") -> Figures:
    """Of a process that had so many requests and heard so many events."""
    return [
        (SUMMED, "counter", "", [(SUMMED + "_total", {}, float(requests))]),
        (COMMON, "counter", "", [(COMMON + "_total", {"worker": worker}, float(events))]),
        ("kvyard_gateway_under_way", "gauge", "", [("kvyard_gateway_under_way", {}, 1.0)]),
    ]


def values(found: Figures) -> dict[str, float]:
    return {sample: value for _, _, _, samples in found for sample, _, value in samples}


def test_counters_never_fall_when_a_process_ends() -> None:
    """All hear the same events, from when they started on; sums are exact, and what all have grows as it does in each."""
    draw = random.Random(5)
    processes = {1: [0, 0], 2: [0, 0], 3: [0, 0]}
    ended: Figures = []
    requests = 0
    before = values(merged_figures(ended, [figures(*one) for one in processes.values()]))
    for step in range(300):
        events = draw.randrange(4)
        for one in processes.values():
            one[0] += 1
            one[1] += events
        requests += len(processes)
        if step % 7 == 3:
            number = draw.choice(list(processes))
            last = processes.pop(number)
            ended = ended_figures(ended, figures(*last), [figures(*one) for one in processes.values()])
            processes[number] = [0, 0]
        now = values(merged_figures(ended, [figures(*one) for one in processes.values()]))
        assert now[SUMMED + "_total"] == requests
        assert now[COMMON + "_total"] == before[COMMON + "_total"] + events
        assert now["kvyard_gateway_under_way"] == 3
        before = now


def test_engines_that_no_process_has_are_left_out() -> None:
    ended = ended_figures([], figures(1, 9, "old"), [figures(1, 2, "new")])
    assert values(merged_figures(ended, [figures(1, 2, "new")])) == {
        SUMMED + "_total": 2,
        COMMON + "_total": 2,
        "kvyard_gateway_under_way": 1,
    }
